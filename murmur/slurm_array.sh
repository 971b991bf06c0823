#!/bin/bash
# A murmur sweep as a Slurm job array, written by `murmur sweep --slurm`: a run for each task, on one
# node. Change it as you like.
#
#   sbatch FILE                                  start it; again: continue what is not complete
#   tail -F SWEEP/logs/job-*.log                 watch it
#   scancel --batch --signal=USR1 JOB_TASK       save a run, and queue it again
#   murmur compare SWEEP                         compare the runs
#
# `man sbatch` explains the #SBATCH lines.
#SBATCH --job-name={{name}}
#SBATCH --array={{array}}
#SBATCH --output={{log}}
#SBATCH --open-mode=append
#SBATCH --chdir={{folder}}
# After a node failure or a preemption a task is queued again; --no-requeue: it ends.
#SBATCH --requeue
# Seconds before the time limit, which must be longer, at which a run saves.
#SBATCH --signal=B:USR1@180

{{request}}

# How a node runs murmur. In a container: murmur=(apptainer exec --nv IMAGE murmur).
murmur=({{murmur}})
# The sweep's folder, on a file system that all nodes share, and its runs: one for each task.
sweep={{sweep}}
runs=({{runs}})
# yes: queue a task again, once saved before the time limit.
requeue=yes
# ---------------------------------------------------------------------------------------------

set -u
run=${runs[SLURM_ARRAY_TASK_ID]}
folder=$sweep/$run

say() { echo "$(date '+%F %T') $run: $*"; }

if compgen -G "$folder/checkpoints/update-*.pt" > /dev/null; then
    what=(--resume)
else
    what=("$sweep/configs/$run.yaml")
fi
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) on $(hostname): ${what[*]}"

# Slurm sends SIGUSR1 before the time limit (--signal above), SIGTERM at `scancel` and at the limit.
stopping=
pid=
trap 'stopping=requeue; say "SIGUSR1: the run saves"; kill -TERM $pid' USR1
trap 'stopping=${stopping:-end}; kill -TERM $pid' TERM
"${murmur[@]}" train "${what[@]}" --run "$folder" --no-page &
pid=$!
wait "$pid"
code=$?
while kill -0 "$pid" 2> /dev/null; do # a trapped signal ended `wait`
    wait "$pid"
    code=$?
done

say "ended with exit code $code"
# 0: the run is complete. 2: an error that no restart corrects.
if [[ $stopping == requeue ]] && ((code != 0 && code != 2)); then
    if [[ $requeue == yes ]] && scontrol requeue "$SLURM_JOB_ID"; then
        say "queued again; it continues from the checkpoint"
    else
        say "saved; submit this script again to continue from the checkpoint"
    fi
fi
exit "$code"
