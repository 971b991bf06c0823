"""`murmur slurm`: what the script asks for, and what it does where Slurm's commands are stand-ins.

tests/cluster submits it to a real Slurm.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from murmur.shared.process.errors import ConfigError
from murmur.slurm import array_script, job_script, write_script
from tests.waiting import wait_until


def script(tmp_path: Path, **options: Any) -> str:
    return job_script("spread", options.pop("overrides", ()), tmp_path / "run", **options)


def asked(text: str) -> list[list[str]]:
    """The words of the #SBATCH lines, for each component."""
    components: list[list[str]] = [[]]
    for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        if line == "hetjob":
            components.append([])
        else:
            components[-1] += shlex.split(line)
    return components


def settings(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(\(.*\)|\S+)", text, re.MULTILINE))


def test_components_ask_for_gpus_and_for_cpus(tmp_path: Path) -> None:
    options = ("--partition=gpu", "--time=1-00:00:00")
    text = script(tmp_path, gpus=16, env_nodes=4, cpus_per_node=32, sbatch=options)
    learner, servers = asked(text)
    size = ["--nodes=2", "--ntasks-per-node=8", "--cpus-per-task=8", "--gres=gpu:8"]
    assert learner[6:] == [*size, *options]
    assert servers == ["--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=32", *options]
    assert learner[:6] == [
        "--job-name=murmur-spread",
        f"--output={tmp_path}/run/logs/job-%j.log",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
        "--requeue",
        "--signal=B:USR1@180",
    ]
    found = settings(text)
    assert (found["ranks"], found["ranks_per_node"], found["workers"]) == ("16", "8", "32")
    assert "--ntasks=16 --ntasks-per-node=8" in found["learner_step"]
    assert "learner.device=cuda" in found["options"]


def test_servers_without_own_nodes_share_the_learners(tmp_path: Path) -> None:
    text = script(tmp_path, gpus=0, ranks=2, env_nodes=0, cpus_per_node=6, cpus_per_rank=3)
    (both,) = asked(text)
    assert both[6:] == ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=12"]
    found = settings(text)
    assert "--het-group" not in found["learner_step"] + found["server_step"]
    assert "--ntasks=2" in found["learner_step"]
    assert "device" not in found["options"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "8"),
        (["env_server.num_workers=5"], "5"),
        (["learner.pipeline=sync"], "1"),
    ],
)
def test_workers_are_the_configured_or_one_per_cpu(
    overrides: list[str], expected: str, tmp_path: Path
) -> None:
    text = script(tmp_path, cpus_per_node=8, overrides=overrides)
    assert settings(text)["workers"] == expected


def test_each_rank_of_a_sync_run_has_a_worker(tmp_path: Path) -> None:
    sync = ["learner.pipeline=sync"]
    text = script(tmp_path, gpus=8, env_nodes=3, overrides=sync)
    assert settings(text)["workers"] == "3"  # nine for eight ranks


def test_a_learner_makes_room_for_all_sessions(tmp_path: Path) -> None:
    # 4 servers x 32 workers x 2 sessions on 2 ranks: 128 for each, and 2 to spare.
    text = script(tmp_path, gpus=2, env_nodes=4, cpus_per_node=32)
    assert "learner.max_sessions=130" in settings(text)["options"]
    few = script(tmp_path, gpus=2, env_nodes=1, cpus_per_node=32)
    assert "max_sessions" not in settings(few)["options"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 12}, ["--gpus 12", "--gpus-per-node 8"]),
        ({"gpus": 2, "ranks": 2}, ["--ranks 2", "--gpus 0"]),
        ({"gpus": 7}, ["batch_size", "all 7 learners"]),
        ({"sbatch": ("qos=long",)}, ["begins with '-'"]),
        ({"sbatch": ("--qos=long\nrm",)}, ["--sbatch"]),
    ],
)
def test_what_slurm_cannot_use_is_refused(
    options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        script(tmp_path, **options)
    for word in words:
        assert word in str(error.value)


def test_a_script_is_not_overwritten(tmp_path: Path) -> None:
    file, run = tmp_path / "job.sh", tmp_path / "run"
    write_script(script(tmp_path), run, file)
    assert os.access(file, os.X_OK)
    assert (tmp_path / "run" / "logs").is_dir()  # Slurm does not make its log's folder
    with pytest.raises(ConfigError, match="exists"):
        write_script("", run, file)


# Runs its command once for each task. It hands SIGUSR1 on, and ends with the largest exit code.
SRUN = """
pids=() tasks=1
trap 'kill -USR1 "${pids[@]}" 2> /dev/null' USR1
while [[ $1 == --* ]]; do
    if [[ $1 == --ntasks=* ]]; then tasks=${1#*=}; fi
    shift
done
for ((i = 0; i < tasks; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=$tasks "$@" &
    pids+=("$!")
done
worst=0
for pid in "${pids[@]}"; do
    while wait "$pid"; code=$?; kill -0 "$pid" 2> /dev/null; do :; done
    if ((code > worst)); then worst=$code; fi
done
exit "$worst"
"""
SCONTROL = """
if [[ $1 == show ]]; then echo localhost; else echo "$*" >> "$CALLS"; fi
"""
# Ends with the next exit code of its plan, one file for each role; `stays` until SIGUSR1.
MURMUR = """
trap 'exit 0' USR1
who=$1
if [[ $* == *--evaluate* ]]; then who=evaluator; fi
if [[ $who == certs ]]; then mkdir "$2"; stat -c %a "$2" > "$PLANS/mode"; fi
plan=$PLANS/$who
what=$(head -n 1 "$plan" 2> /dev/null)
if [[ -n $what ]]; then sed -i 1d "$plan"; fi
echo "$who ${RANK-}/${WORLD_SIZE-}/${LOCAL_RANK-}/${LOCAL_WORLD_SIZE-}/$MASTER_ADDR $*" >> "$CALLS"
if [[ $what == stays ]]; then while true; do sleep 0.02; done; fi
exit "${what:-0}"
"""


class Job:
    """A script at work, with stand-ins for Slurm's commands and for murmur."""

    def __init__(self, folder: Path, text: str, plans: dict[str, list[str]]) -> None:
        self.folder, self.calls_file, self.plans = folder, folder / "calls", folder / "plans"
        commands = folder / "commands"
        for made in (commands, self.plans):
            made.mkdir()
        for name, body in (("srun", SRUN), ("scontrol", SCONTROL), ("murmur", MURMUR)):
            (commands / name).write_text("#!/bin/bash\n" + body)
            (commands / name).chmod(0o755)
        for name, steps in plans.items():
            (self.plans / name).write_text("".join(f"{step}\n" for step in steps))
        text = re.sub(r"^murmur=.*$", f"murmur=({commands}/murmur)", text, flags=re.MULTILINE)
        text = text.replace("look_every_s=2 ", "look_every_s=0.05 ")
        (folder / "job.sh").write_text(text)
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sh")],
            env={
                "PATH": f"{commands}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "77",
                "SLURM_JOB_NODELIST": "localhost",
                "CALLS": str(self.calls_file),
                "PLANS": str(self.plans),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def calls(self, start: str = "") -> list[str]:
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        return [line for line in text.splitlines() if line.startswith(start)]

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def begin(plans: dict[str, list[str]], change: str = "", **options: Any) -> Job:
        text = script(tmp_path, **{"gpus": 0, "env_nodes": 0, "cpus_per_node": 3} | options)
        write_script(text, tmp_path / "run", tmp_path / "written.sh")
        if change:  # a line of the script
            text, changed = re.subn(rf"^{change.partition('=')[0]}=.*$", change, text, flags=re.M)
            assert changed == 1
        jobs.append(Job(tmp_path, text, plans))
        return jobs[-1]

    yield begin
    for one in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.communicate()


def test_servers_end_with_a_complete_learner(start: Callable[..., Job], tmp_path: Path) -> None:
    one = start(
        {"learner": ["0"], "env-server": ["stays"], "evaluator": ["stays"]},
        overrides=["evaluation.every_updates=5"],
    )
    assert one.end()[0] == 0
    (learner,) = one.calls("learner")
    (server,) = one.calls("env-server")
    (evaluator,) = one.calls("evaluator")
    certs = tmp_path / "run" / "certs-77"
    port = re.findall(r"learner\.port=(\d+)", learner)[0]
    assert f"--run {tmp_path}/run --auto-resume" in learner
    assert f"security.folder={certs}/learner" in learner
    assert learner.startswith("learner ////localhost ")  # alone: it has no rank
    for call, role in ((server, "environment"), (evaluator, "evaluator")):
        assert f"env_server.learner=localhost:{port} " in call
        assert f"security.folder={certs}/{role}" in call
    assert "--first-worker 0 " in server
    assert "env_server.num_workers=3" in server
    assert "env_server.num_workers=3" in learner  # of all servers, here one
    assert "--host=localhost" in one.calls("certs")[0]
    assert (one.plans / "mode").read_text() == "700\n"
    assert not certs.exists()  # the job's tokens end with it


def test_ranks_know_who_they_are(start: Callable[..., Job]) -> None:
    one = start({"env-server": ["stays"]}, ranks=2)
    assert one.end()[0] == 0
    ranks = sorted(call.split()[1] for call in one.calls("learner"))
    assert ranks == ["0/2/0/2/localhost", "1/2/1/2/localhost"]
    (server,) = one.calls("env-server")
    first, second = re.findall(r"localhost:(\d+)", server)
    assert int(second) == int(first) + 1


@pytest.mark.parametrize(
    ("codes", "starts", "code"),
    [(["1", "0"], 2, 0), (["2"], 1, 2), (["1"] * 3, 3, 1)],
    ids=["a crash", "an error to correct", "too many crashes"],
)
def test_a_learner_is_restarted_after_a_crash(
    start: Callable[..., Job], codes: list[str], starts: int, code: int
) -> None:
    one = start({"learner": codes, "env-server": ["stays"]}, "max_restarts=2")
    assert one.end()[0] == code
    assert len(one.calls("learner")) == starts


def test_server_restarts_and_an_impossible_one_ends_the_job(
    start: Callable[..., Job],
) -> None:
    one = start({"learner": ["stays"], "env-server": ["1", "0", "2"]})
    code, out = one.end()
    assert code == 2
    assert len(one.calls("env-server")) == 3
    assert "env-server-0 ended with exit code 2" in out


@pytest.mark.parametrize("requeue", [True, False])
def test_sigusr1_saves_and_queues_the_job_again(start: Callable[..., Job], requeue: bool) -> None:
    change = "" if requeue else "requeue=no"
    one = start({"learner": ["stays"], "env-server": ["stays"]}, change)
    wait_until(lambda: one.calls("learner") and one.calls("env-server"), "both at work")
    one.process.send_signal(signal.SIGUSR1)
    code, out = one.end()
    assert code == 0
    assert one.calls("requeue") == (["requeue 77"] if requeue else [])
    assert ("submit this script again" in out) is not requeue
    assert len(one.calls("learner")) == 1


ARRAY_MURMUR = """
trap 'exit 130' TERM
echo "$*" >> "$CALLS"
while [[ $(basename "$4") == two ]]; do sleep 0.02; done
"""


def test_an_array_trains_a_run_in_each_task(tmp_path: Path) -> None:
    sweep = tmp_path / "my sweep"
    text = array_script(sweep, ["one", "two"], gpus=1, parallel=4, sbatch=["--time=1"])
    (words,) = asked(text)
    assert "--array=0-1%4" in words
    assert f"--output={sweep}/logs/job-%A-%a.log" in words
    assert words[-3:] == ["--cpus-per-task=8", "--gres=gpu:1", "--time=1"]
    commands, calls = tmp_path / "commands", tmp_path / "calls"
    commands.mkdir()
    for name, body in (("murmur", ARRAY_MURMUR), ("scontrol", 'echo "scontrol $*" >> "$CALLS"')):
        (commands / name).write_text("#!/bin/bash\n" + body)
        (commands / name).chmod(0o755)
    text = re.sub(r"^murmur=.*$", f"murmur=({commands}/murmur)", text, flags=re.MULTILINE)
    (tmp_path / "array.sh").write_text(text)
    (sweep / "two" / "checkpoints").mkdir(parents=True)
    (sweep / "two" / "checkpoints" / "update-5.pt").touch()

    def task(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(tmp_path / "array.sh")],
            env={
                "PATH": f"{commands}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "77",
                "SLURM_ARRAY_TASK_ID": str(number),
                "CALLS": str(calls),
            },
            stdout=subprocess.PIPE,
            text=True,
        )

    first = task(0)
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert calls.read_text() == f"train {sweep}/configs/one.yaml --run {sweep}/one --no-page\n"
    second = task(1)
    wait_until(lambda: "--resume" in calls.read_text())
    second.send_signal(signal.SIGUSR1)
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 130
    assert "queued again" in out
    assert calls.read_text().splitlines()[1:] == [
        f"train --resume --run {sweep}/two --no-page",
        "scontrol requeue 77",
    ]
