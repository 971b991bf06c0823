"""The ruler finds what holds an observation, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.walk.measure import (
    ROOT,
    TASKS,
    Function,
    body_lines,
    enclosing,
    executed_lines,
    loop_and_frames,
    training_steps,
    walk,
)
from tests.walk.trace import CHECKOUT, MODE, OUT, Memory

# One file of a package that is not ours by name: the ruler must not know names.
TOY = """
import threading
from typing import NamedTuple

import numpy as np
import torch

from tests.walk import trace


class Step(NamedTuple):
    observation: dict
    reward: np.ndarray
    discount: np.ndarray
    step_type: np.ndarray


class World:
    def step(self, action):
        self.physics(action)
        x = np.random.rand(4, 3).astype(np.float32)
        return Step({"x": x}, np.zeros(4), np.ones(4), np.ones(4, np.uint8))

    def physics(self, action):
        return action + 1


class Store:
    def __init__(self):
        self.rows = np.zeros((8, 4, 3), np.float32)
        self.size = 0

    def add(self, step):
        self.rows[self.size % 8] = step.observation["x"]
        self.size += 1

    def full(self):
        return self.size >= 8

    def sample(self):
        return torch.from_numpy(self.rows)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)


def scaled(batch):
    return [planted(x) for x in batch]


def planted(x):
    return x * 2


def loss_of(net, batch):
    return net(torch.stack(scaled(batch))).square().mean()


def log(message):
    return len(message)


def count_weights(net):
    return sum(p.numel() for p in net.parameters())


def learn(net, batch):
    loss = loss_of(net, batch)
    loss.backward()
    note(loss)
    count_weights(net)


def note(loss):
    return loss.item()


def loop(store, world, net):
    for _ in range(20):
        store.add(world.step(np.zeros(4)))
        log("a step is made")
        if store.full():
            learn(net, store.sample())


def main():
    trace.start()
    store, world, net = Store(), World(), Net()
    thread = threading.Thread(target=loop, args=(store, world, net), name="learns")
    thread.start()
    thread.join()


main()
"""


def test_a_function_counts_if_it_holds_data(tmp_path: Path) -> None:
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    (checkout / "anything").mkdir(parents=True)
    out.mkdir()
    script = checkout / "anything" / "toy.py"
    script.write_text(TOY)
    variables = {OUT: str(out), CHECKOUT: str(checkout), MODE: "data", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], env=os.environ | variables, check=True)
    (file,) = out.glob("walk-*.json")
    found = json.loads(file.read_text())
    counted = {enclosing(checkout, Function(*row[:3])).name for row in found["counted"]}
    on_the_way = {"World.step", "Store.add", "Store.sample", "scaled", "planted", "Net.forward"}
    assert counted == {*on_the_way, "loss_of", "learn", "loop", "note"}
    assert {row[3] for row in found["counted"]} == {"learns"}
    assert len(found["steps"]) > 1
    assert {tuple(frame[2] for frame in b["stack"]) for b in found["backwards"]} == {
        ("loop", "learn")
    }


def test_memory_keeps_ranges_apart_and_joins_those_that_meet() -> None:
    memory = Memory()
    memory.add(10, 20, None)
    memory.add(30, 40, None)
    assert memory.overlaps(19, 21)
    assert not memory.overlaps(20, 30)
    memory.add(18, 32, None)
    assert memory.overlaps(20, 30)
    assert not memory.overlaps(40, 50)
    assert not memory.overlaps(0, 10)


def test_a_training_step_ends_with_its_last_backward() -> None:
    steps, backwards = [1, 2, 5, 6, 10, 11], [3, 4, 7, 12, 13]
    assert training_steps(steps, backwards) == [(5, 7), (10, 13)]


def test_frames_are_those_below_the_call_that_stays() -> None:
    loop = [["a.py", 1, "run", 0], ["a.py", 9, "step", 1]]
    other = [["a.py", 1, "run", 0], ["a.py", 9, "step", 2], ["b.py", 1, "f.<locals>.<lambda>", 3]]
    stacks = [{"stack": loop}, {"stack": other}]
    assert loop_and_frames(stacks) == ("run", ["step"])


def test_lines_of_bodies_are_code_and_each_counts_once(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        'def outer(x):\n    """Text."""\n\n    def inner():\n        return x  # why\n\n'
        "    # a comment\n    return [y for y in inner()]\n"
    )
    outer, inner = Function("m.py", 1, "outer"), Function("m.py", 4, "outer.inner")
    assert body_lines(tmp_path, [outer]) == 3
    assert body_lines(tmp_path, [outer, inner]) == 3
    assert body_lines(tmp_path, [inner]) == 1
    assert body_lines(tmp_path, [outer], prose=True) == 7
    listed = Function("m.py", 8, "outer.<locals>.<listcomp>")
    assert enclosing(tmp_path, listed) == outer


def test_lines_executed_are_those_of_statements_that_ran(tmp_path: Path) -> None:
    script = tmp_path / "anything" / "m.py"
    script.parent.mkdir()
    script.write_text(
        "from tests.walk import trace\n\n\n"
        'def of(x):\n    """Text."""\n    if x:\n        y = (\n            x\n            + 1\n'
        "        )\n    else:\n        y = 0\n    return y\n\n\ntrace.start()\nof(1)\n"
    )
    variables = {
        **{OUT: str(tmp_path), CHECKOUT: str(tmp_path), MODE: "lines"},
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, str(script)], env=os.environ | variables, check=True)
    (file,) = tmp_path.glob("walk-*.json")
    executed = {(name, line) for name, line in json.loads(file.read_text())["lines"]}
    # `if x:`, the four lines of its branch, `else:` as a part of the `if`, and the return.
    assert executed_lines(tmp_path, [Function("anything/m.py", 4, "of")], executed) == 7
    assert executed_lines(tmp_path, [Function("anything/m.py", 4, "of")], set()) == 0


@pytest.mark.long
@pytest.mark.system
def test_a_planted_function_of_the_learner_counts(tmp_path: Path) -> None:
    """Stations that no rearrangement can do without are there, and one function more is seen."""
    for name in ("env_service", "learner_service", "shared", "murmur", "configs", "proto"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    with (tmp_path / "learner_service/algorithms/mappo.py").open("a") as file:
        file.write(
            "\n\n_build = build\n\n\ndef planted(batch):\n    return batch\n\n\n"
            "def build(*arguments):\n    algorithm = _build(*arguments)\n"
            "    update = algorithm.update\n"
            "    algorithm.update = lambda batch: update(planted(batch))\n    return algorithm\n"
        )
    found = walk(tmp_path, TASKS["spread"])
    names = {function.name.rpartition(".")[2] for function in found.functions}
    assert {"step", "act", "update", "sample", "pack", "unpack", "planted"} <= names
    assert {process for places in found.functions.values() for process, _thread in places} == {
        "environments",
        "learner",
    }
    assert 0 < len(found.frames) < 30
    assert len(found.bare) > 50
