"""Figures with goals, predictions from counts of operations, and former measurements."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any, Literal

from murmur.doctor.machine import RESULTS
from murmur.shared.config.files import config_names

Value = float | str | bool | None

# What the prediction assumes, as one H100 had them.
LAUNCH_US = 30.0  # a launch from Python
NODE_US = 4.2  # a small kernel within a graph
TFLOPS, TB_PER_S = 32.0, 3.35  # convolutions of terrain-published in TF32; memory
WORKERS = 15  # of a run on a machine with 16 cores
OF_A_RUN = "captured update of a run"  # work that `murmur bench launches` counts
_NODES = ("kernels in graphs", "nodes")  # columns of `launches`, the first one that is there
_BEFORE = "gpu-20261126-nvidia-h100-80gb-hbm3.json"  # commit 03a9fe658b


@dataclass(frozen=True)
class Figure:
    """One row of the result.

    Attributes:
        name: name of the quantity, with its unit.
        goal: value to reach; None: there is none.
        sense: required relation of a value to the goal.
        expected: predicted value; None: there is none.
        before: value of an H100 with the former code, if this figure had another name; None: see
            `measured_before`.
        old_goal: former goal that `goal` replaces, as text; "": none.
    """

    name: str
    goal: Value = None
    sense: Literal["<=", ">=", "="] = "<="
    expected: Value = None
    before: Value = None
    old_goal: str = ""

    def met(self, value: Value) -> bool | None:
        """Return whether a value reaches the goal; None without a goal or a value.

        Text and NaN reach none.
        """
        if self.goal is None or value is None:
            return None
        if self.sense == "=":
            return value == self.goal
        assert isinstance(self.goal, int | float)
        if not isinstance(value, int | float):
            return False
        return value <= self.goal if self.sense == "<=" else value >= self.goal


@dataclass(frozen=True)
class Count:
    """Number of launches of some work, as `murmur bench launches` counts them.

    Attributes:
        launches: launches from Python, including replays of graphs.
        nodes: operations of the graphs that are replayed.
        graphs: replays among the launches.
        rows: environment rows of an update's batch; 0: unknown.
    """

    launches: int
    nodes: int = 0
    graphs: int = 0
    rows: int = 0

    @property
    def ms(self) -> float:
        """Predicted time: the host launches one by one, the device works through the nodes."""
        return (self.nodes * NODE_US + self.launches * LAUNCH_US) / 1e3


@dataclass(frozen=True)
class Case:
    """One algorithm on one environment, with the batches of a run on 16 cores.

    Attributes:
        name: name in the tables.
        config: the preset.
        changes: changes to the preset, KEY=VALUE.
        mflop_per_row: arithmetic of an update for each environment row of its batch, 1e6 additions
            and multiplications.
        goal_ms: longest time of a captured update [ms] that meets the goal; None: no goal.
        old_goal: former goal; see Figure.
        preset: its name in `murmur bench launches`; "": not counted.
        workers: number of environment processes behind the update's batch; 0: the preset's own.
        before_ms: time of its captured update on an H100 with the former code [ms].
    """

    name: str
    config: str
    changes: tuple[str, ...] = ()
    mflop_per_row: float = 0.0
    goal_ms: float | None = None
    old_goal: str = ""
    preset: str = ""
    workers: int = 0
    before_ms: float | None = None

    def counted(self, work: str) -> Count | None:
        """Return the launches of some work in the newest saved result."""
        return saved_launches().get(f"{self.preset}: {work}")

    @property
    def captured_ms(self) -> float | None:
        """Predicted time of a captured update, its batch included: counts, or arithmetic."""
        count = self.counted(OF_A_RUN)
        if count is None:
            return None
        return max(count.ms, count.rows * self.mflop_per_row / TFLOPS / 1e3)

    @property
    def arithmetic_bound(self) -> bool:
        """Return whether arithmetic takes longer than launches and small kernels."""
        count = self.counted(OF_A_RUN)
        return count is not None and (self.captured_ms or 0.0) > count.ms


@cache
def saved_launches() -> dict[str, Count]:
    """Return launches by "preset: work", as the newest saved result has them."""
    saved = []
    for file in RESULTS.glob("launches-*.json"):
        try:
            data = json.loads(file.read_text())
            counts = {
                name: Count(
                    int(row["launches"]),
                    int(next((row[name] for name in _NODES if row.get(name)), 0)),
                    int(row.get("of them graphs") or 0),
                    int(row.get("rows") or 0),
                )
                for name, row in data["result"]["launches"].items()
            }
            saved.append((data["date"], counts))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    saved.sort(key=itemgetter(0))
    return {name: count for _, counts in saved for name, count in counts.items()}


@cache
def measured_before() -> dict[str, Value]:
    """Return figures by name as an H100 had them, for those with the same meaning."""
    try:
        figures = json.loads((RESULTS / _BEFORE).read_text())["result"]["figures"]
    except (OSError, ValueError, KeyError):  # not part of the installed package
        return {}
    return {name: row["measured"] for name, row in figures.items() if row["measured"] != ""}


_OFF_POLICY_MS = 0.7
# In the order of their value: the time of a topic may be over before the last ones.
_ALL_CASES = (
    Case(
        "coma, terrain-reference",
        "terrain-reference",
        (),
        47,
        150.0,
        "<= 20 for 1,024 rows",
        "terrain-reference (COMA)",
        before_ms=228.0,
    ),
    Case(
        "coma, terrain-reference-large",
        "terrain-reference-large",
        (),
        47,
        60.0,
        "",
        "terrain-reference-large (COMA)",
    ),
    Case(
        "masac, formation, 2x256",
        "formation",
        ("algorithm.name=masac", "network.hidden=[256, 256]", "algorithm.share_parameters=false"),
        0,
        _OFF_POLICY_MS,
        "",
        "MASAC, formation, 2x256",
        before_ms=1.687,
    ),
    Case(
        "maddpg, snakes-ddpg",
        "snakes-ddpg",
        (),
        0,
        _OFF_POLICY_MS,
        "",
        "snakes-ddpg (MADDPG)",
        before_ms=1.621,
    ),
    Case(
        "qmix, spread",
        "spread",
        ("algorithm.name=qmix",),
        0,
        _OFF_POLICY_MS,
        "",
        "QMIX, spread",
        before_ms=1.511,
    ),
    Case(
        "coma, terrain-published",
        "terrain-published",
        (),
        6200,
        None,
        "<= 20 with minibatches of 60",
        "terrain-published (COMA)",
        before_ms=144.0,
    ),
    Case("mappo, spread", "spread", (), 1, None, "", "spread (MAPPO)"),
    Case("mappo, formation", "formation", (), 4.2, None, "", "formation (MAPPO)"),
    Case(
        "mappo, snakes-greedy",
        "snakes-greedy",
        (),
        13.4,
        None,
        "",
        "snakes-greedy (MAPPO)",
    ),
    Case("coma, snakes", "snakes", (), 4, None, "", "snakes (COMA)"),
    Case(
        "mappo, formation, GRU 64",
        "formation",
        ("network.recurrent=64",),
        5,
        None,
        "",
        "formation, recurrent 64 (MAPPO)",
    ),
)
CASES = tuple(
    replace(case, workers=WORKERS) for case in _ALL_CASES if case.config in config_names()
)
SMALL = Case(
    "mappo, spread, small",
    "spread",
    (
        *("algorithm.batch_size=24", "algorithm.batch_number=1", "algorithm.data_passes=1"),
        *("network.name=mlp", "network.hidden=[8]", "env_server.envs_per_worker=2"),
    ),
)
SMALL_REPLAY = Case(
    "qmix, spread, small",
    "spread",
    (
        *("algorithm.name=qmix", "algorithm.replay.batch_size=4", "algorithm.replay.start_rows=8"),
        *("network.name=mlp", "network.hidden=[8]", "env_server.envs_per_worker=2"),
    ),
)


def rows(
    figures: Iterable[Figure], values: Mapping[str, Value]
) -> dict[str, dict[str, str | float | bool | None]]:
    """Return the table: name -> value, goal, whether met, expected; unplanned figures last."""
    planned = {figure.name: figure for figure in figures}
    names = [*planned, *(name for name in values if name not in planned)]
    return {
        name: _row(planned.get(name, Figure(name)), values.get(name), measured=name in values)
        for name in names
    }


def _row(figure: Figure, value: Value, *, measured: bool) -> dict[str, Any]:
    met = figure.met(value)
    goal = "" if figure.goal is None else f"{figure.sense} {figure.goal}".removeprefix("= ")
    before = measured_before().get(figure.name) if figure.before is None else figure.before
    return {
        "measured": value if measured else "",
        "goal": goal,
        "met": "" if met is None else "yes" if met else "NO",
        "predicted": "" if figure.expected is None else figure.expected,
        "before": "" if before is None else before,
        "goal before": figure.old_goal,
    }
