#!/bin/bash
# A murmur training as a Slurm job, written by `murmur slurm`. Change it as you like.
#
#   sbatch FILE                                  start it; again: continue from the last checkpoint
#   tail -F RUN/logs/*.log                       watch it
#   scancel --batch --signal=USR1 JOB            save, and queue it again
#   scancel JOB                                  end it
#
# `man sbatch` explains the #SBATCH lines.
#SBATCH --job-name={{name}}
#SBATCH --output={{log}}
#SBATCH --open-mode=append
#SBATCH --chdir={{folder}}
# After a node failure or a preemption the job is queued again; --no-requeue: it ends.
#SBATCH --requeue
# Seconds before the time limit, which must be longer, at which the learner saves.
#SBATCH --signal=B:USR1@180

{{components}}

# How a node runs murmur. In a container: murmur=(apptainer exec --nv IMAGE murmur).
murmur=({{murmur}})
# What it trains: `murmur config` lists configurations.
config={{config}}
options=({{options}})
# The run's folder, on a file system that all nodes share.
run={{run}}
# Learner processes, and how many of these are on one node.
ranks={{ranks}}
ranks_per_node={{ranks_per_node}}
# Worker processes of each environment server.
workers={{workers}}
# yes: one more server plays the run's evaluations.
evaluates={{evaluates}}
# yes: queue the job again, once saved before the time limit.
requeue=yes
# Restarts of each component, in one start of the job, and the pause between two looks at them.
max_restarts=3
look_every_s=2
# The options of each component's srun.
learner_step=({{learner_step}})
server_step=({{server_step}})
# ---------------------------------------------------------------------------------------------
# What follows is the same in every script. It runs on the first node of the learner.

set -u
# Each srun below says what it needs; what the job asked for is no default for it.
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE

certs=$run/certs-$SLURM_JOB_ID
mapfile -t learner_nodes < <(
    scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
mapfile -t server_nodes < <(
    scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_1:-$SLURM_JOB_NODELIST}")

# Jobs that share a node need different ports. The job ID chooses a range below 32768, where the
# system's own choices begin: one port to find each other (rendezvous), then one for each rank.
export MASTER_ADDR=${learner_nodes[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % (12000 / (ranks + 1)) * (ranks + 1)))
export learner_port=$((MASTER_PORT + 1))
addresses=
for ((rank = 0; rank < ranks; rank++)); do
    node=${learner_nodes[rank / ranks_per_node]}
    addresses+=${addresses:+,}$node:$((learner_port + rank))
done

declare -A pids=() deaths=() # of the learner and of each server, by name
stopping=                    # why the job stops: requeue, end, failed
code=0

say() { echo "$(date '+%F %T') $*"; }

alive() { kill -0 "${pids[$1]}" 2> /dev/null; }

# Tells a component to end in order. srun hands SIGUSR1 to its processes; at SIGTERM it would kill
# them.
stop() { kill -USR1 "${pids[$1]}" 2> /dev/null; }

# A trapped signal ends this pause at once.
pause() {
    sleep "$look_every_s" &
    wait "$!"
}

start_learner() {
    # With several ranks, each process learns its rank from the variables that torchrun would set.
    # It adds its number on its node to learner.port, which comes to the port of its rank.
    local as_rank='exec "$@"'
    if ((ranks > 1)); then
        as_rank='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
            exec "$@" --set "learner.port=$((learner_port + SLURM_PROCID - SLURM_LOCALID))"'
        export LOCAL_WORLD_SIZE=$ranks_per_node
    fi
    # When a rank ends, the others notice and end; srun kills what is left after --wait seconds. Its
    # exit code is the largest of all: that of the rank that failed, as the others end with 1.
    srun "${learner_step[@]}" --job-name=learner --kill-on-bad-exit=0 --wait=60 \
        --open-mode=append --output="$run/logs/learner-%t.log" \
        bash -c "$as_rank" - "${murmur[@]}" learner "$config" --run "$run" --auto-resume \
        "${options[@]}" --set "security.folder=$certs/learner" \
        --set learner.host=0.0.0.0 --set "learner.port=$learner_port" \
        --set learner.metrics_port=0 \
        --set "env_server.num_workers=$((workers * ${#server_nodes[@]}))" & # of all servers
    pids[learner]=$!
}

# $1: env-server-<number>, or evaluator, which shares the first server's node.
start_server() {
    local number=0 role=environment own=(--evaluate)
    if [[ $1 == evaluator ]]; then
        role=evaluator
    else
        number=${1##*-}
        own=(--first-worker "$((number * workers))")
    fi
    srun "${server_step[@]}" --nodelist="${server_nodes[number]}" --job-name="$1" \
        --open-mode=append --output="$run/logs/$1.log" \
        "${murmur[@]}" env-server "$config" "${own[@]}" \
        "${options[@]}" --set "security.folder=$certs/$role" \
        --set "env_server.learner=$addresses" --set "env_server.num_workers=$workers" \
        --set env_server.metrics_port=0 &
    pids[$1]=$!
}

# Starts servers again that ended. Exit code 2 is an error that no restart corrects.
tend_servers() {
    local name ended
    for name in "${servers[@]}"; do
        [[ -n ${pids[$name]:-} ]] && ! alive "$name" || continue
        wait "${pids[$name]}"
        ended=$?
        unset "pids[$name]"
        if ((ended == 2)); then
            say "$name ended with exit code 2, see $run/logs/$name.log: the job stops"
            stopping=failed
            stop learner
        elif ((${deaths[$name]:=0} < max_restarts)); then
            deaths[$name]=$((deaths[$name] + 1))
            say "$name ended with exit code $ended: restart ${deaths[$name]} of $max_restarts"
            start_server "$name"
        else
            say "$name ended with exit code $ended; the job continues without it"
        fi
    done
}

# Slurm sends SIGUSR1 to this script before the time limit (--signal above), and you send it by
# `scancel --batch --signal=USR1 JOB`: the learner saves, the job is queued again.
trap 'stopping=requeue; say "SIGUSR1: the learner saves"; stop learner' USR1
# At `scancel JOB`, `scontrol requeue JOB` and the time limit Slurm sends SIGTERM itself and, after
# the cluster's KillWait (often 30 s), SIGKILL: there may be no time to save.
trap 'stopping=${stopping:-end}' TERM
trap 'rm -rf "$certs"' EXIT

# Certificates and tokens for this start of the job alone, in a folder that only you can read.
(
    umask 077
    "${murmur[@]}" certs "$certs" --force --days 365 "${learner_nodes[@]/#/--host=}"
) > /dev/null || exit

servers=()
for number in "${!server_nodes[@]}"; do servers+=("env-server-$number"); done
if [[ $evaluates == yes ]]; then servers+=(evaluator); fi

say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): learner on ${learner_nodes[*]}," \
    "environment servers on ${server_nodes[*]}, run in $run"
start_learner
for name in "${servers[@]}"; do start_server "$name"; done

restarts=0
while true; do
    pause
    if alive learner; then
        [[ -n $stopping ]] || tend_servers
        continue
    fi
    wait "${pids[learner]}"
    code=$?
    # 0: the run is complete, or was told to stop. 2: an error that no restart corrects.
    if [[ -n $stopping ]] || ((code == 0 || code == 2 || restarts == max_restarts)); then break; fi
    restarts=$((restarts + 1))
    say "the learner ended with exit code $code: restart $restarts of $max_restarts"
    start_learner
done

say "the learner ended with exit code $code; the environment servers end"
for name in "${servers[@]}"; do
    if [[ -n ${pids[$name]:-} ]]; then
        stop "$name"
        wait "${pids[$name]}"
    fi
done

rm -rf "$certs" # a job that is queued again may be killed before it ends
if [[ $stopping == requeue ]] && ((code != 2)); then
    if [[ $requeue == yes ]] && scontrol requeue "$SLURM_JOB_ID"; then
        say "queued again; it continues from the checkpoint"
    else
        say "saved; submit this script again to continue from the checkpoint"
    fi
elif [[ $stopping == failed ]]; then
    code=2
fi
exit "$code"
