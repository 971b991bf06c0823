"""Run a training with hooks in every process, and count the functions on the way.

A training step is the time from the first `step` of an environment after an update's last
backward to the last backward of the next update: rows are gathered, answered and learned from. A
function counts if it does in any whole one. The bare profile holds what the learner calls between
the begin of each one and that of the next.

Frames from the learner's loop to backward are counted in a second run, in the async pipeline, where
the loop has a thread of its own. The loop is the innermost function of ours that is the same call
at all backwards, and the frames are those below it. A third run notes the lines that are executed.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.count_algorithm_lines import span
from tests.walk.trace import CHECKOUT, MODE, OUT, SECTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 900
LEARNER, ENVIRONMENTS, TRAIN = "learner", "environments", "train"
COMMON: dict[str, Any] = {
    "env_server": {
        "num_workers": 1,
        "envs_per_worker": 8,
        "sessions_per_worker": 2,
        "metrics_port": 0,
        "step_timeout_s": 300,
        "start_timeout_s": 300,
    },
    "learner": {
        "port": 0,
        "metrics_port": 0,
        "pipeline": "sync",
        "device": "cpu",
        "num_threads": 1,
        "checkpoint_every_updates": 1000,
        "log_every_s": 600,
    },
    "run": {"seed": 7, "max_updates": 4},
}
SPREAD: dict[str, Any] = {
    "environment": {"name": "spread", "episode_steps": 10},
    "algorithm": {
        "name": "mappo",
        "batch_size": 120,
        "batch_number": 2,
        "data_passes": 2,
        "unroll_steps": 5,
    },
    "network": {"name": "mlp", "hidden": [16]},
}
FORMATION: dict[str, Any] = {
    "environment": {"name": "formation"},
    "algorithm": {
        "name": "masac",
        "share_parameters": False,
        "replay": {
            "capacity_rows": 2000,
            "start_rows": 64,
            "batch_size": 32,
            "update_interval": 32,
            "updates_per_interval": 1,
            "unroll_steps": 4,
        },
    },
    "network": {"name": "mlp", "hidden": [16]},
}
TASKS = {"spread": SPREAD, "formation": FORMATION}
HOOK = """import sys
sys.path.insert(0, {here!r})
from tests.walk import trace
sys.path.remove({here!r})
trace.start()
"""


class Function(NamedTuple):
    """A function in the checkout.

    Attributes:
        file: path from the root.
        line: of `def`.
        name: with the classes and functions around it.
    """

    file: str
    line: int
    name: str


class Walk(NamedTuple):
    """Functions on the way.

    Attributes:
        functions: each with process and threads, in the order in which they first hold data.
        frames: names of the functions below the learner's loop at the deepest backward.
        loop: name of the learner's loop.
        bare: all functions of ours that the learner calls once a training step or more.
        executed: files and numbers of the lines that are executed, in the whole run.
        root: checkout that was run.
    """

    functions: dict[Function, list[tuple[str, str]]]
    frames: list[str]
    loop: str
    bare: set[Function]
    executed: set[tuple[str, int]]
    root: Path


def run(root: Path, config: Mapping[str, Any], mode: str = "data") -> list[dict[str, Any]]:
    """Train once and return what each process noted.

    Args:
        root: checkout that trains.
        config: the experiment.
        mode: "data", "stack", "settings" or "lines".

    Raises:
        SystemExit: if the training fails.
    """
    config = COMMON | config
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK.format(here=str(ROOT)))
        (folder / "case.yaml").write_text(json.dumps(config, indent=1))  # JSON is YAML
        variables = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "murmur", "train", str(folder / "case.yaml")),
                *("--run", str(folder / "run")),
            ],
            cwd=folder,
            env=variables
            | {
                "PYTHONPATH": os.pathsep.join([str(folder), str(root)]),
                OUT: name,
                CHECKOUT: str(root),
                MODE: mode,
                SECTIONS: ",".join(config),
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            logs = "".join(file.read_text()[-3000:] for file in (folder / "run").glob("*.log"))
            raise SystemExit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}\n{logs}")
        return [json.loads(file.read_text()) for file in sorted(folder.glob("walk-*.json"))]


def walk(root: Path, config: Mapping[str, Any]) -> Walk:
    """Train once and return the way of an observation."""
    noted = run(root, config)
    learner = max(noted, key=lambda process: len(process["backwards"]))
    steps = sorted(time for process in noted for time in process["steps"])
    assert learner["backwards"], "no backward was seen"
    assert steps, "no step of an environment was seen"
    windows = training_steps(steps, [b["time"] for b in learner["backwards"]])
    assert len(windows) > 1, "fewer than two training steps were seen"
    first_seen: dict[Function, float] = {}
    where: dict[Function, list[tuple[str, str]]] = {}
    for process in noted:
        role = role_of(process, learner)
        for file, line, name, thread, times in process["counted"]:
            if inside := [t for t in times if any(a <= t <= b for a, b in windows)]:
                function = enclosing(root, Function(file, line, name))
                first_seen[function] = min(inside[0], first_seen.get(function, inside[0]))
                if (role, thread) not in where.setdefault(function, []):
                    where[function].append((role, thread))
    whole = [(now[0], then[0]) for now, then in pairwise(windows)]  # with publishing and the log
    every: dict[Function, set[int]] = {}
    for file, line, name, _thread, times in learner["calls"]:
        seen = every.setdefault(enclosing(root, Function(file, line, name)), set())
        seen |= {i for i, (start, stop) in enumerate(whole) for t in times if start <= t < stop}
    bare = {function for function, seen in every.items() if len(seen) == len(whole)}
    async_learner = {**COMMON["learner"], "pipeline": "async"}
    stacks = run(root, {**config, "learner": async_learner}, "stack")
    loop, frames = loop_and_frames([b for process in stacks for b in process["backwards"]])
    functions = {
        function: where[function] for function in sorted(where, key=first_seen.__getitem__)
    }
    lines = [process["lines"] for process in run(root, config, "lines")]
    executed = {(file, line) for process in lines for file, line in process}
    return Walk(functions, frames, loop, bare, executed, root)


def role_of(process: Mapping[str, Any], learner: Mapping[str, Any]) -> str:
    """Return what a process does, by what it was seen to do."""
    if process is learner:
        return LEARNER
    return ENVIRONMENTS if process["steps"] else TRAIN


def training_steps(steps: list[float], backwards: list[float]) -> list[tuple[float, float]]:
    """Split a run at its updates.

    Args:
        steps: seconds at which an environment's step returned, ascending.
        backwards: seconds of the backwards.

    Returns:
        begin and end of each training step but the first.
    """
    events = sorted([*((time, 0) for time in steps), *((time, 1) for time in backwards)])
    windows: list[tuple[float, float]] = []
    begin: float | None = None
    end = 0.0
    for time, is_backward in events:
        if is_backward:
            end = time
        elif begin is None or end > begin:  # the first step after an update
            if begin is not None:
                windows.append((begin, end))
            begin = time
    if begin is not None and end > begin:
        windows.append((begin, end))
    return windows[1:]


def loop_and_frames(backwards: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the loop's name, and the names of the functions below it at the deepest backward."""
    stacks = [backward["stack"] for backward in backwards]
    common = 0
    while all(len(stack) > common and stack[common] == stacks[0][common] for stack in stacks):
        common += 1
    deepest = max(stacks, key=len)
    loop = deepest[common - 1][2] if common else ""
    return loop, [frame[2] for frame in deepest[common:] if not frame[2].endswith(">")]


@cache
def definitions(file: Path) -> list[tuple[int, int, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return first and last line, full name and node of each function of a file."""
    found: list[tuple[int, int, str, ast.FunctionDef | ast.AsyncFunctionDef]] = []

    def explore(node: ast.AST, around: str) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = span(part)
                name = f"{around}{part.name}"
                found.append((min(lines), max(lines), name, part))
                explore(part, f"{name}.")
            elif isinstance(part, ast.ClassDef):
                explore(part, f"{around}{part.name}.")
            else:
                explore(part, around)

    explore(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def enclosing(root: Path, function: Function) -> Function:
    """Return the `def` that a comprehension or a lambda is part of."""
    around = [d for d in definitions(root / function.file) if d[0] <= function.line <= d[1]]
    if not around:
        return function
    first, _last, name, _node = max(around, key=lambda d: d[0])
    return Function(function.file, first, name)


def executed_lines(
    root: Path, functions: Iterable[Function], executed: set[tuple[str, int]]
) -> int:
    """Count the lines of the statements of functions' bodies that are executed.

    Args:
        root: checkout.
        functions: those with the bodies.
        executed: files and numbers of the lines that were.
    """
    found: set[tuple[str, int]] = set()
    for function in functions:
        code = code_of(root / function.file)
        for first, _last, _name, node in definitions(root / function.file):
            if first == function.line:
                for statement in ast.walk(node):
                    if isinstance(statement, ast.stmt) and statement is not node:
                        lines = {(function.file, line) for line in own_lines(statement) & code}
                        found |= lines if lines & executed else set()
    return len(found)


def own_lines(statement: ast.stmt) -> set[int]:
    """Return the numbers of a statement's lines without those of the statements within it."""
    within = (part for part in ast.walk(statement) if isinstance(part, ast.stmt))
    return span(statement).difference(*(span(part) for part in within if part is not statement))


def body_lines(root: Path, functions: Iterable[Function], prose: bool = False) -> int:
    """Count the lines of functions' bodies, a line of two functions once.

    Args:
        root: checkout.
        functions: those with the bodies.
        prose: whether docstrings, comments and blank lines count too.
    """
    found: dict[str, set[int]] = {}
    for function in functions:
        file = root / function.file
        for first, _last, _name, node in definitions(file):
            if first == function.line:
                body = node.body
                if not prose and ast.get_docstring(node) is not None:
                    body = body[1:]
                lines = {line for statement in body for line in span(statement)}
                if prose and body:
                    lines = set(range(min(lines), max(lines) + 1))
                found.setdefault(function.file, set()).update(
                    lines if prose else lines & code_of(file)
                )
    return sum(map(len, found.values()))


@cache
def code_of(file: Path) -> set[int]:
    """Return the numbers of a file's lines that have code on them."""
    text = file.read_text(encoding="utf-8")
    prose = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*prose, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


class Stays(NamedTuple):
    """Functions that settings reach before the first step of an environment, with processes.

    Of the processes from `murmur train` to the learner, not of those that step environments.

    Attributes:
        makes: those that return settings that they were not given.
        hands: others that give settings to a function of ours.
        given: all others that are given settings.
        root: checkout that was run.
    """

    makes: dict[Function, set[str]]
    hands: dict[Function, set[str]]
    given: dict[Function, set[str]]
    root: Path


def settings(root: Path, config: Mapping[str, Any]) -> Stays:
    """Train once and return the way of the configuration."""
    noted = run(root, {**config, "run": {**COMMON["run"], "max_updates": 1}}, "settings")
    until = min(time for process in noted for time in process["steps"])
    found: dict[str, dict[Function, set[str]]] = {"making": {}, "handing": {}, "counted": {}}
    for process in noted:
        role = process_name(process)
        for kind, functions in found.items():
            for file, line, name, _thread, times in process[kind]:
                if times[0] <= until and role in (TRAIN, LEARNER):
                    function = enclosing(root, Function(file, line, name))
                    functions.setdefault(function, set()).add(role)
    makes, hands = found["making"], found["handing"]
    hands = {f: roles for f, roles in hands.items() if f not in makes}
    given = {f: roles for f, roles in found["counted"].items() if f not in {*makes, *hands}}
    return Stays(makes, hands, given, root)


def process_name(process: Mapping[str, Any]) -> str:
    """Return the command of a murmur process, or "worker"."""
    command = process["command"]
    at = command.index("murmur") if "murmur" in command else -1
    return command[at + 1] if at >= 0 else "worker"
