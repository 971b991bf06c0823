"""Faults of plug-ins, and of handshakes that cannot be or that name other agents."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import yaml

from murmur.runs.child import child_environment, murmur_command
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec, spec_to_proto
from tests.chaos.cases import Case
from tests.chaos.stack import Stack
from tests.learner_service.networks.plugged import ATTENTION, install
from tests.wire import Client, Refused

_GOOD = EnvSpec("toy", 2, (ArraySpec("view", "float32", (3,)),), Discrete(5), ("won",), 4)
_EXPERIMENT: dict[str, Any] = {
    "environment": {"name": "spread", "episode_steps": 5},
    "env_server": {"num_workers": 1, "envs_per_worker": 8, "metrics_port": 0},
    "algorithm": {"name": "mappo", "unroll_steps": 5, "batch_size": 60, "batch_number": 1},
    "learner": {"device": "cpu", "port": 0, "metrics_port": 0},
}


def _with(change: Callable[[pb.EnvSpec], object]) -> pb.EnvSpec:
    spec = spec_to_proto(_GOOD)
    change(spec)
    return spec


def _observe(
    name: str, dtype: str, shape: tuple[int, ...], per_agent: bool = True
) -> Callable[[pb.EnvSpec], object]:
    return lambda spec: spec.observations.add(
        name=name, dtype=dtype, shape=shape, per_agent=per_agent
    )


def _set(**fields: Any) -> Callable[[pb.EnvSpec], object]:
    def change(spec: pb.EnvSpec) -> None:
        for name, value in fields.items():
            setattr(spec, name, value)

    return change


HELLOS: dict[str, tuple[Callable[[pb.EnvSpec], object], str]] = {
    "a mask of 3 for 5 actions": (
        _observe("action_mask", "uint8", (3,)),
        "'action_mask' as uint8 (3,)",
    ),
    "one mask for all agents": (
        _observe("action_mask", "uint8", (5,), False),
        "of all agents together; the name is reserved for uint8 (5,) of each agent",
    ),
    "an int32 mask": (_observe("action_mask", "int32", (5,)), "reserved for uint8 (5,)"),
    "cells of 3 numbers": (_observe("agent_cell", "int32", (3,)), "reserved for int32 (2,)"),
    "one alive for all": (_observe("agent_mask", "uint8", (), False), "reserved for uint8 ()"),
    "endless episodes": (_set(max_episode_steps=2**32 - 1), "max_episode_steps 4294967295"),
    "no agents": (_set(num_agents=0), "has 0 agents"),
    "a million agents": (_set(num_agents=10**6), "has 1000000 agents"),
    "a line break": (_observe("a\nb", "float32", (1,)), "all printable"),
    "no name": (_observe("", "float32", (1,)), "1 to 256"),
    "one name twice": (_observe("view", "float32", (1,)), "'view' twice"),
    "one metric twice": (lambda spec: spec.metrics.append("won"), "metric 'won' twice"),
    "an empty shape": (_observe("x", "float32", (2, 0)), "empty shape (2, 0)"),
    "no actions": (lambda spec: spec.action.discrete.Clear(), "a choice among 0 actions"),
    "a billion actions": (
        lambda spec: setattr(spec.action.discrete, "num_actions", 10**9),
        "has 1000000000 actions",
    ),
    "bounds in the wrong order": (
        lambda spec: spec.action.continuous.CopyFrom(pb.Continuous(size=1, low=1, high=-1)),
        "in [1, -1]",
    ),
    "an image of 16 million cells": (
        _observe("image", "uint8", (1, 4000, 4000)),
        "would take",
    ),
}


def impossible_hellos(folder: Path) -> dict[str, Any]:
    """The first handshakes of a run describe what cannot be; then comes one that can."""
    config = {**_EXPERIMENT, "network": {"name": "auto"}}
    with Stack(folder, config) as stack:
        stack.start_learner()
        for what, (change, words) in HELLOS.items():
            with Client(stack.port, _GOOD, 2) as client:
                refused = _refusal(client, _with(change))
            known = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
            assert refused.code in known, f"{what}: {refused}"
            assert words in (refused.details or ""), f"{what}: {refused}"
        with Client(stack.port, _GOOD, 2) as client:
            client.hello()
        assert stack.learner is not None
        assert "Traceback" not in stack.learner.text()
    return {"refused": len(HELLOS)}


def other_agents(folder: Path) -> dict[str, Any]:
    """Sessions list the run's agents in another order, then lack one, then name another.

    Agents that share weights are mapped by name; agents with networks of their own are refused.
    """
    names = ("uav_0", "uav_1")
    run = replace(_GOOD, agents=names)
    others = {"another order": names[::-1], "another agent": ("uav_0", "uav_9")}
    refused = 0
    for shared in (True, False):
        part = folder / f"share_parameters={shared}"
        part.mkdir()
        algorithm = {**_EXPERIMENT["algorithm"], "share_parameters": shared}
        with Stack(part, {**_EXPERIMENT, "algorithm": algorithm}) as stack:
            stack.start_learner()
            with Client(stack.port, run, 2) as client:
                client.hello()
                for what, agents in others.items():
                    spec = spec_to_proto(replace(run, agents=agents))
                    with Client(stack.port, run, 2) as other:
                        if shared and what == "another order":
                            other.hello(spec=spec)
                            continue
                        said = _refusal(other, spec)
                    assert said.code is grpc.StatusCode.FAILED_PRECONDITION, f"{what}: {said}"
                    for name in agents:
                        assert name in (said.details or ""), f"{what}: {said}"
                    refused += 1
            assert stack.learner is not None
            assert "Traceback" not in stack.learner.text()
    return {"refused": refused, "mapped": 1}


def _refusal(client: Client, spec: pb.EnvSpec) -> Refused:
    try:
        client.hello(spec=spec)
    except Refused as refused:
        return refused
    raise AssertionError(f"accepted: {spec}")


def _train(folder: Path, name: str, **sections: Any) -> tuple[int, str, float]:
    """Exit code, output and seconds of a `murmur train` that finds plug-ins in the folder."""
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump({**_EXPERIMENT, "run": {"max_updates": 2}, **sections}))
    env = child_environment() | {"MURMUR_PARENT": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    began = time.monotonic()
    done = subprocess.run(
        murmur_command("train", str(config), "--run", str(folder / name)),
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def plugins_that_fail(folder: Path, *, short: bool = False) -> dict[str, Any]:
    """Plug-ins that raise end the run at once in their own words; one without options trains.

    short: one plug-in of the learner and one environment.
    """
    install(folder, "listening", ATTENTION)
    lost = "def build(*_):\n    raise KeyError('lost')\n"
    model = "from pydantic import BaseModel\nclass Config(BaseModel, frozen=True):\n    pass\n"
    install(folder, "lost_network", model + lost)
    install(folder, "lost_algorithm", model + lost, "algorithms")
    install(folder, "lost_environment", "raise RuntimeError('no licence')\n", "environments")
    failures = {
        "network": ({"network": {"name": "lost_network"}}, "KeyError: 'lost'"),
        "algorithm": ({"algorithm": {"name": "lost_algorithm"}}, "KeyError: 'lost'"),
        "environment": ({"environment": {"name": "lost_environment"}}, "RuntimeError: no licence"),
    }
    if short:
        del failures["algorithm"]
    slowest = 0.0
    for kind, (sections, words) in failures.items():
        code, output, took = _train(folder, kind, **sections)
        last = " ".join(output.split("error:")[-1].split())
        assert code == 2, output
        assert f"{kind} 'lost_{kind}' failed: {words}" in last, output
        assert "starting it again" not in output, output
        slowest = max(slowest, took)
    if not short:
        code, output, _ = _train(folder, "attention", network={"name": "listening"})
        assert code == 0, output
    return {"ended_s": slowest}


CASES = [
    Case("a handshake describes an environment that cannot be", impossible_hellos),
    Case("agents in another order, or others", other_agents),
    Case("a plug-in raises at the start", plugins_that_fail),
]
