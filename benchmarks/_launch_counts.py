# ruff: noqa: ANN401 - of whichever murmur is found, at whichever place
"""Counts of a murmur's launches, this one's or another checkout's, on a pretended GPU.

    python -P _launch_counts.py [--acts-only | --runs-only | --smoke] PRETEND PRESET ...

prints one JSON object. It imports nothing of its own murmur: the one that Python finds is counted,
and PRETEND is the folder that holds the package pretend_cuda.
"""

import asyncio
import collections
import contextlib
import importlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Preset: the configuration and what is changed in it. Lengths of unrolls are set where one of two
# checkouts may choose its own: launches grow with them.
PRESETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "spread (MAPPO)": ("spread", ()),
    "formation (MAPPO)": ("formation", ("algorithm.unroll_steps=64",)),
    "formation, recurrent 64 (MAPPO)": (
        "formation",
        ("network.recurrent=64", "algorithm.unroll_steps=64"),
    ),
    "terrain-reference (COMA)": ("terrain-reference", ()),
    "terrain-reference-large (COMA)": ("terrain-reference-large", ()),
    "terrain-published (COMA)": (
        "terrain-published",
        ("algorithm.batch_size=60", "algorithm.unrolls_per_update=5"),
    ),
    "snakes (COMA)": ("snakes", ()),
    "snakes-greedy (MAPPO)": (
        "snakes-greedy",
        ("algorithm.unroll_steps=32", "augment.preset=none"),
    ),
    "snakes-ddpg (MADDPG)": ("snakes-ddpg", ()),
    "MASAC, formation, 2x256": (
        "formation",
        ("algorithm.name=masac", "network.hidden=[256, 256]", "algorithm.share_parameters=false"),
    ),
    "QMIX, spread": ("spread", ("algorithm.name=qmix",)),
}
# An update of a run on 16 cores: 15 workers bring their rows, the preset's own minibatches.
OF_A_RUN = "captured update of a run"
_WORKERS, _UPDATES_OF_A_RUN = 15, 5  # the last one is counted
# What is changed in the configuration then, where it differs.
AS_A_RUN: dict[str, tuple[str, ...]] = {
    "formation (MAPPO)": (),
    "formation, recurrent 64 (MAPPO)": ("network.recurrent=64",),
    "terrain-published (COMA)": (),
    "snakes-greedy (MAPPO)": (),
}
_TURNS, _COUNTED_TURNS = 16, 5
_UPDATES_EAGER, _UPDATES_CAPTURED = 2, 6  # the last one is counted
_ENVS = 2  # of a session
_DEADLINE_S = 60.0


def _module(*names: str) -> Any:
    """Import the first of these modules that exists: packages have moved between versions."""
    for name in names:
        for whole in (f"murmur.{name}", name):
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(whole)
    raise ModuleNotFoundError(names[0])


def _config(name: str, changes: Sequence[str], precision: str) -> Any:
    load = _module("shared.config.files", "shared.config").load
    fixed = (
        *("learner.device=cuda", f"learner.precision={precision}", "learner.pipeline=async"),
        *("evaluation.every_updates=0", "learner.metrics_port=0", "learner.port=0"),
    )
    return load(name, [*changes, *fixed], {})


def _spec(config: Any) -> Any:
    make = _module("env_service.environment").make_environment
    return make(config.environment, 1).spec


class Meter:
    """Counter of a thread's launches on the pretended machine since the last reading."""

    def __init__(self, machine: Any, thread: str) -> None:
        self._machine, self._thread = machine, thread
        self._before = self._now()

    def _now(self) -> tuple[collections.Counter[str], int, collections.Counter[str]]:
        launches = self._machine.launches.get(self._thread, {})
        waits = self._machine.waits.get(self._thread, {})
        replayed = self._machine.replayed.get(self._thread, {})
        return collections.Counter(launches), sum(waits.values()), collections.Counter(replayed)

    def read(self) -> dict[str, int]:
        """Return the counts since the last reading."""
        (now, waits, replayed), (then, waits_then, replayed_then) = self._now(), self._before
        self._before = now, waits, replayed
        new = now - then
        replays = new["graph replay"]
        return {
            "launches": new.total(),
            "graphs": replays,
            "outside": new.total() - replays,
            **{what: replayed[what] - replayed_then[what] for what in ("nodes", "kernels")},
            "syncs": waits - waits_then,
        }


def count_update(pretend: Any, config: Any, updates: int) -> tuple[dict[str, int], dict[str, int]]:
    """Count the last of some updates: the algorithm's part, and all from the batch's drawing on.

    `rows` are those of the batch, environment rows.
    """
    probe_module = _module("learner_service.tuning.probe", "learner_service.probe")
    with pretend.pretend_cuda(hollow=True) as machine:
        probe = probe_module.Probe(config, _spec(config))
        algorithm = getattr(probe, "algorithm", None) or probe._algorithm  # an older checkout's
        storage = probe.storage
        update, done = algorithm.update, storage.done
        own: dict[str, int] = {}
        whole: dict[str, int] = {}

        def counted(batch: Any) -> Any:
            meter = Meter(machine, threading.current_thread().name)
            scalars = update(batch)
            own.update(meter.read())
            own["rows"] = whole["rows"] = batch.size
            return scalars

        def counted_done(batch: Any) -> None:
            done(batch)
            whole.update(step.read())

        algorithm.update, storage.done = counted, counted_done
        for _ in range(updates):
            probe.fill()
            step = Meter(machine, threading.current_thread().name)
            probe.update()
    return own, whole


def count_act(pretend: Any, config: Any, sessions: int) -> dict[str, int]:
    """Count one turn of the inference thread: from the rows of these sessions to their actions."""
    run_module = _module(
        "learner_service.run", "learner_service.training.run", "learner_service.app"
    )
    with tempfile.TemporaryDirectory() as folder, pretend.pretend_cuda(hollow=True) as machine:
        whole = config, Path(folder), None, False, threading.Event()
        context = getattr(run_module, "RunContext", None)
        run = run_module.Run(*whole) if context is None else run_module.Run(context(*whole))
        run.open(_spec(config))
        try:
            return asyncio.run(_turns(run, machine, sessions))
        finally:
            process = run if context is None else run.context
            process.learner.finished.set()
            run.batcher.close()
            process.close()


async def _turns(run: Any, machine: Any, sessions: int) -> dict[str, int]:
    batching = _module(
        "learner_service.serving.requests",
        "learner_service.serving.batcher",
        "learner_service.batcher",
    )
    pb = _module("shared.rpc.rollout_pb2")
    admitted = [
        run.admit(pb.Hello(worker_id=str(i), num_envs=_ENVS), run.spec)[0] for i in range(sessions)
    ]
    await _idle(run)
    meter, found = Meter(machine, "inference"), []
    for turn in range(_TURNS):
        loop = asyncio.get_running_loop()
        requests = [
            batching.Request(s, turn + 1, _row(run.spec, first=turn == 0), loop.create_future())
            for s in admitted
        ]
        run.batcher.arrivals.put(requests)
        await asyncio.wait_for(asyncio.gather(*(r.reply for r in requests)), _DEADLINE_S)
        await _idle(run)
        found.append(meter.read())
    last = found[-_COUNTED_TURNS:]
    return {name: round(statistics.median(turn[name] for turn in last)) for name in last[0]}


async def _idle(run: Any) -> None:
    """Wait until the inference thread has nothing left to do in its turn."""
    turns, deadline = run.inference.batches_served, time.monotonic() + _DEADLINE_S
    while run.inference.batches_served < turns + 1 and time.monotonic() < deadline:
        run.batcher.arrivals.put(())  # an empty turn comes at once
        await asyncio.sleep(0.001)


def _row(spec: Any, *, first: bool) -> Any:
    timestep = _module("shared.wire.timestep")
    n, a = _ENVS, spec.num_agents
    kind = timestep.StepType.FIRST if first else timestep.StepType.MID
    return timestep.TimeStep(
        step_type=np.full(n, int(kind), np.uint8),
        reward=np.zeros((n, a), np.float32),
        discount=np.ones(n, np.float32),
        observation={
            o.name: np.ones(((n, a) if o.per_agent else (n,)) + tuple(o.shape), o.dtype)
            for o in spec.observations
        },
        metrics={m: np.zeros(n, np.float32) for m in spec.metrics},
    )


def _graph_option(config: Any) -> str:
    """Return the option that turns graphs off; empty if nothing is captured."""
    if hasattr(config.learner, "cuda_graph"):
        return "learner.cuda_graph"
    base = _module("learner_service.learning.base", "learner_service.algorithm")
    options = base.algorithm_options(config.algorithm)
    return "algorithm.cuda_graph" if "cuda_graph" in options else ""


def count_preset(
    pretend: Any, preset: str, *, acts: int, updates: bool
) -> dict[str, dict[str, int]]:
    """Count a preset's launches by work and precision.

    Args:
        pretend: package pretend_cuda.
        preset: name in PRESETS.
        acts: number of acts to count.
        updates: flag to count updates.
    """
    name, changes = PRESETS[preset]
    option = _graph_option(_config(name, changes, "fp32"))
    kinds = [("", [f"{option}=false"] if option else [])] + ([("captured ", [])] if option else [])
    found = {}
    for sessions, precision in ((1, "fp32"), (16, "fp32"), (1, "bf16"))[:acts]:
        for kind, more in kinds if option.startswith("learner") else kinds[:1]:
            # 16 sessions must not wait for updates.
            whole = (*changes, *more, "learner.max_policy_lag=1000")
            counts = count_act(pretend, _config(name, whole, precision), sessions)
            suffix = "" if precision == "fp32" else f", {precision}"
            found[f"{kind}act, {sessions} sessions{suffix}"] = counts
    for precision in ("fp32", "bf16") if updates else ():
        for kind, more in kinds:
            config = _config(name, (*changes, *more), precision)
            count = _UPDATES_CAPTURED if kind else _UPDATES_EAGER
            own, with_batch = count_update(pretend, config, count)
            found[f"{kind}update, {precision}"] = own
            found[f"{kind}update, {precision}, with its batch"] = with_batch
    return found


def count_of_a_run(pretend: Any, preset: str) -> dict[str, int]:
    """Count a captured update with all its launches, as a run on 16 cores makes it."""
    name, changes = PRESETS[preset]
    changes = (*AS_A_RUN.get(preset, changes), f"env_server.num_workers={_WORKERS}")
    return count_update(pretend, _config(name, changes, "fp32"), _UPDATES_OF_A_RUN)[1]


def main(arguments: Sequence[str]) -> None:
    """Count the launches of the presets, and print one JSON object."""
    smoke, updates = "--smoke" in arguments, not {"--acts-only", "--smoke"} & set(arguments)
    runs_only = "--runs-only" in arguments
    folder, *presets = (a for a in arguments if not a.startswith("--"))
    sys.path.append(folder)
    pretend = importlib.import_module("pretend_cuda")
    found = {}
    for preset in presets or PRESETS:
        started = time.monotonic()
        if runs_only:
            found[preset] = {OF_A_RUN: count_of_a_run(pretend, preset)}
        else:
            found[preset] = count_preset(pretend, preset, acts=1 if smoke else 3, updates=updates)
            if updates:
                found[preset][OF_A_RUN] = count_of_a_run(pretend, preset)
        print(f"{preset}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        print(json.dumps({preset: found[preset]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
