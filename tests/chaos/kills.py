"""Random kills: a sync run stays equal bit for bit, an async run loses count of no row and learns.

    murmur bench kills                                     both, about half an hour
    python -m tests.chaos.kills learner FOLDER --minutes 4  the first, in pieces: call it until done
    python -m tests.chaos.kills workers FOLDER --minutes 4  the second

Learner: a sync run whose learner is killed (SIGKILL) at 50 random instants and started again from
its latest checkpoint ends with the same weights, optimisers, random numbers, waiting unrolls and
counts as one that was not disturbed.

Workers: 200 workers of an async run are killed at random. Every row that was sent is accounted for,
and the policy is compared with that of an untouched run of as many environment steps.
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from murmur.benchmarks.effort import Effort
from murmur.results import provenance, require_clean_source, run_command, save_result
from murmur.runs.child import murmur_command
from murmur.shared.process.errors import ConfigError
from tests.chaos.stack import Counts, Stack, read_json
from tests.waiting import wait_until

DESCRIPTION = (
    "50 random kills of a sync learner: equal bit for bit; 200 of async workers: every row counted"
)

LEARNER_KILLS, WORKER_KILLS = 50, 200
_FOREVER_S = 1e9
# Told by a signal, the learner writes where each thread is: what it was doing when it was killed.
_TRACER = """\
import faulthandler, os, signal
faulthandler.register(signal.SIGUSR2, open(os.environ["FAULTS_TRACE"], "a"), all_threads=True)
"""
_DOING = (  # functions of the learner, the innermost that is named decides
    ("_write", "writing a checkpoint"),
    ("_write_bytes", "writing a checkpoint"),
    ("save", "writing a checkpoint"),
    ("publish", "publishing"),
    ("update", "updating"),
    ("sample", "gathering a batch"),
    ("act", "acting"),
    ("_keep", "storing rows"),
    ("load", "storing rows"),
    ("next_batch", "waiting for rows"),
    ("_after", "logging"),
    ("_serve", "serving"),
)


def sync_experiment(updates: int) -> dict[str, Any]:
    """24 environments fill updates of 10: unrolls are left over at most checkpoints."""
    return {
        "run": {"max_updates": updates},
        "environment": {"name": "spread", "episode_steps": 20},
        "env_server": {
            "num_workers": 2,
            "envs_per_worker": 12,
            "sessions_per_worker": 2,
            "reconnect_max_s": 0.5,
        },
        "algorithm": {
            "name": "mappo",
            "unroll_steps": 6,
            "batch_size": 90,
            "batch_number": 2,
            "data_passes": 2,
        },
        "network": {"name": "mlp", "hidden": [32], "recurrent": 8},
        "learner": {
            "device": "cpu",
            "pipeline": "sync",
            "checkpoint_every_updates": 5,
            "log_every_s": 0.5,
        },
    }


def async_experiment() -> dict[str, Any]:
    """Four workers of two sessions of eight environments."""
    return {
        "environment": {"name": "spread"},
        "env_server": {
            "num_workers": 4,
            "envs_per_worker": 16,
            "sessions_per_worker": 2,
            "reconnect_max_s": 0.5,
        },
        "algorithm": {
            "name": "mappo",
            "unroll_steps": 25,
            "batch_size": 600,
            "batch_number": 4,
            "data_passes": 4,
        },
        "network": {"name": "mlp", "hidden": [64, 64]},
        "learner": {"device": "cpu", "log_every_s": 0.5, "checkpoint_every_updates": 50},
    }


class Deadline:
    """When to stop for this time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._end


# --- the learner ---------------------------------------------------------------------------------


def kill_learner(folder: Path, kills: int, updates: int, seconds: float) -> dict[str, Any] | None:
    """Continue with the killed run; the result once both runs are complete, else None."""
    deadline = Deadline(seconds)
    whole, killed = folder / "whole", folder / "killed"
    for part in (whole, killed):
        part.mkdir(parents=True, exist_ok=True)
    done = read_json(folder / "kills.json") or {"kills": []}
    instants = sorted(random.Random(1).uniform(0, updates) for _ in range(kills))  # noqa: S311
    (folder / "sitecustomize.py").write_text(_TRACER)
    experiment = sync_experiment(updates)
    if not _complete(killed, updates):
        with Stack(killed, experiment) as stack:
            stack.start_server()
            while not _complete(killed, updates):
                if deadline.over:
                    return None
                count = len(done["kills"])
                instant = instants[count] if count < kills else None
                killed_while = _one_life(stack, folder, instant)
                if killed_while is not None:
                    done["kills"].append(killed_while)
                    (folder / "kills.json").write_text(json.dumps(done))
    if not _complete(whole, updates):
        with Stack(whole, experiment) as stack:
            stack.start_server()
            learner = stack.start_learner()
            if learner.process.wait(600) != 0:
                raise RuntimeError(learner.text())
    states = [_state(part, updates) for part in (whole, killed)]
    different = differences(*states)
    if different:
        raise AssertionError(f"{len(done['kills'])} kills: these differ: {different}")
    return {
        "kills": len(done["kills"]),
        "updates": updates,
        "equal to the bit": True,
        "tensors compared": count_tensors(states[0]),
        "killed while": dict(Counter(done["kills"]).most_common()),
    }


def _one_life(stack: Stack, folder: Path, instant: float | None) -> str | None:
    """Start the learner and kill it; returns what it was doing, or None if it came to its end."""
    trace = folder / "trace"
    trace.write_text("")
    paths = stack_paths(folder)
    learner = stack.start_learner(more=paths | {"FAULTS_TRACE": str(trace)})
    if instant is not None:
        ended = learner.process.poll
        wait_until(
            lambda: ended() is not None or stack.metric("policy_version") >= instant,
            "the next kill is due",
            300,
        )
        time.sleep(random.uniform(0, 0.3))  # noqa: S311 - anywhere within an update, or the next
        if ended() is None:
            learner.send(signal.SIGUSR2)  # SIGUSR1 would stop it in order
            wait_until(trace.read_text, "the learner says what it does", 10, poll_s=0.001)
            time.sleep(0.002)
            learner.end(signal.SIGKILL)
            return doing(trace.read_text())
    if learner.process.wait(600) != 0:
        raise RuntimeError(learner.text())
    return None


def stack_paths(folder: Path) -> dict[str, str]:
    """PYTHONPATH that makes the learner load the tracer."""
    from murmur.runs.child import child_environment

    return {"PYTHONPATH": f"{folder}:{child_environment()['PYTHONPATH']}"}


def doing(trace: str) -> str:
    """What the inference thread, which is the learner's in sync mode, was doing."""
    for thread in trace.split("Thread 0x"):
        frames = re.findall(r'File ".*learner_service.*" in (\w+)|in (\w+)$', thread, re.MULTILINE)
        names = [a or b for a, b in frames]
        if "_serve" in names or "next_batch" in names:
            return next((what for name in names for n, what in _DOING if n == name), "serving")
    return "starting"


def _complete(part: Path, updates: int) -> bool:
    return (part / "run" / "checkpoints" / f"update-{updates:06d}.pt").is_file()


def _state(part: Path, updates: int) -> dict[str, Any]:
    """The final checkpoint, without what may differ: how long the run took."""
    path = part / "run" / "checkpoints" / f"update-{updates:06d}.pt"
    state: dict[str, Any] = torch.load(path, weights_only=True)
    state["progress"].pop("seconds")
    state.pop("config")  # the ports
    return state


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two trees of tensors and plain values are not equal bit for bit."""
    if type(a) is not type(b):
        return [where]
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        same = same and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [where]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [where]
        return [d for k in a for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [where]
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


def count_tensors(state: Any) -> int:
    """How many there are."""
    if isinstance(state, torch.Tensor):
        return 1
    if isinstance(state, Mapping):
        return sum(map(count_tensors, state.values()))
    return sum(map(count_tensors, state)) if isinstance(state, list | tuple) else 0


# --- workers -------------------------------------------------------------------------------------


def kill_workers(folder: Path, kills: int, seconds: float) -> dict[str, Any] | None:
    """Continue with the killed run; the result once both runs are complete, else None."""
    deadline = Deadline(seconds)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "kills.json"
    done = read_json(file) or {"kills": 0, "sent": 0}
    killed, whole = folder / "killed", folder / "whole"
    for part in (killed, whole):
        part.mkdir(exist_ok=True)
    if done["kills"] < kills:
        with Stack(killed, async_experiment()) as stack:
            stack.start_learner()
            server = stack.start_server()
            wait_until(lambda: stack.sessions() == 8, "all play", 120)
            deadline = Deadline(seconds)  # from here: a slow machine is to come to something
            while done["kills"] < kills and not deadline.over:
                time.sleep(random.uniform(0.5, 3.5))  # noqa: S311
                if server.process.poll() is not None:
                    raise RuntimeError(f"the environment server ended:\n{server.text()}")
                workers = server.workers()
                if workers:
                    random.choice(workers).kill()  # noqa: S311
                    done["kills"] += 1
            wait_until(lambda: stack.sessions() == 8, "all play again", 120)
            done["sent"] += stack.settle()
            done["counts"] = vars(stack.counts())
            done["steps"] = last_record(killed)["env_steps"]
            assert stack.learner is not None
            if stack.learner.end() != 0:
                raise RuntimeError(stack.learner.text())
            file.write_text(json.dumps(done))
        if done["kills"] < kills:
            return None
    if "whole" not in done:
        if deadline.over:
            return None
        experiment = async_experiment() | {"run": {"max_env_steps": done["steps"]}}
        with Stack(whole, experiment) as stack:
            learner = stack.start_learner()
            stack.start_server()
            if learner.process.wait(1200) != 0:
                raise RuntimeError(learner.text())
        done["whole"] = True
        file.write_text(json.dumps(done))
    counts = Counts(**done["counts"])
    way = done["sent"] - counts.received
    if not counts.balanced or not 0 <= way <= kills * 16:
        raise AssertionError(f"{done}")
    return {
        "kills": done["kills"],
        "environment steps": done["steps"],
        "rows sent": done["sent"],
        "rows received": counts.received,
        "rows trained": counts.learned,
        "rows stored": counts.stored,
        **{f"rows dropped: {reason}": rows for reason, rows in sorted(counts.dropped.items())},
        "rows lost on the way": way,
        "return of the killed run": evaluated(killed),
        "return of an untouched run": evaluated(whole),
    }


def evaluated(part: Path, episodes: int = 200) -> list[float]:
    """Mean return of the final policy and its 95 % interval, on episodes that all runs share."""
    out = part / "evaluation.json"
    command = murmur_command("evaluate", str(part / "run"), f"--episodes={episodes}")
    more = ["--checkpoint=latest", f"--json={out}"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    summary = json.loads(out.read_text())["summary"]["return"]
    return [summary["mean"], summary["low"], summary["high"]]


def last_record(part: Path) -> dict[str, Any]:
    """The last line of a run's progress.jsonl."""
    lines = (part / "run" / "progress.jsonl").read_text().splitlines()
    last: dict[str, Any] = json.loads(lines[-1])
    return last


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Both, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="murmur-kills-") as name:
        folder = Path(name)
        kills, updates = effort.choose((1, 12), (3, 200), (LEARNER_KILLS, 2000))
        learner = kill_learner(folder / "learner", kills, updates, _FOREVER_S)
        assert learner
        if effort is Effort.SMOKE:  # evaluations take too long
            return {"learner": learner}
        kills = effort.choose(0, 6, WORKER_KILLS)
        workers = kill_workers(folder / "workers", kills, _FOREVER_S)
    assert workers
    return {"learner": learner, "workers": workers}


def main() -> None:
    """In pieces: see the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("what", choices=["learner", "workers", "save"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    results = folder / "results.json"
    known = read_json(results)
    if options.what == "save":
        if known.keys() != {"learner", "workers"}:
            raise ConfigError(f"{results} holds {sorted(known)}; both parts must be done")
        require_clean_source(options.dirty)
        origin = provenance() | {"command": "murmur bench kills --save"}  # the same in one go
        print(save_result("kills", known, origin))
        return
    seconds = 60 * options.minutes
    if options.what == "learner":
        result = kill_learner(folder / "learner", LEARNER_KILLS, 2000, seconds)
    else:
        result = kill_workers(folder / "workers", WORKER_KILLS, seconds)
    if result is None:
        print("not done yet: call it again")
        sys.exit(3)
    results.write_text(json.dumps({**known, options.what: result}, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_command(main)
