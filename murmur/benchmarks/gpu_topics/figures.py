"""Figures with goals and with what the counts of operations predict for an H200."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from murmur.machine import RESULTS

Value = float | str | bool | None

# What the prediction assumes: one H200.
EAGER_US = 5.0  # a launch from Python
CAPTURED_US = 2.0  # a small kernel within a graph
TFLOPS, TB_PER_S = 60.0, 4.8  # fp32 without tensor cores; memory


@dataclass(frozen=True)
class Figure:
    """One row of the result.

    Attributes:
        name: what is measured, with its unit.
        goal: to reach; None: there is none.
        sense: whether a value must be at most or at least the goal.
        expected: what the counts predict for an H200; None: nothing.
    """

    name: str
    goal: Value = None
    sense: Literal["<=", ">=", "="] = "<="
    expected: Value = None

    def met(self, value: Value) -> bool | None:
        """Whether a value reaches the goal; None without a goal or a value."""
        if self.goal is None or value is None:
            return None
        if self.sense == "=":
            return value == self.goal
        assert isinstance(value, int | float)
        assert isinstance(self.goal, int | float)
        return value <= self.goal if self.sense == "<=" else value >= self.goal


@dataclass(frozen=True)
class Case:
    """One algorithm on one environment.

    Attributes:
        name: as the table has it.
        config: the preset.
        changes: to it, KEY=VALUE.
        launches: of an eager update in fp32; 0: not counted. A saved result of `murmur bench
            launches` comes before it.
        act_launches: of acting for one session.
        gflop: of an update.
        gb: moved by an update.
        preset: its name in `murmur bench launches`.
    """

    name: str
    config: str
    changes: tuple[str, ...] = ()
    launches: int = 0
    act_launches: int = 0
    gflop: float = 0.0
    gb: float = 0.0
    preset: str = ""

    def counted(self, work: str, otherwise: int = 0) -> int:
        """Launches of some work, as the newest saved result has them."""
        return saved_launches().get(f"{self.preset}: {work}", otherwise)

    @property
    def eager_ms(self) -> float | None:
        """Predicted time of an eager update: launches, or arithmetic if that takes longer."""
        count = self.counted("update, fp32", self.launches)
        return max(count * EAGER_US / 1e3, self.roofline_ms) if count else None

    @property
    def captured_ms(self) -> float | None:
        """Predicted time of a captured update: its kernels are those of an eager one."""
        count = self.counted("update, fp32", self.launches)
        return max(count * CAPTURED_US / 1e3, self.roofline_ms) if count else None

    @property
    def roofline_ms(self) -> float:
        """The least time that arithmetic and memory allow, in milliseconds."""
        return max(self.gflop / TFLOPS, self.gb / TB_PER_S)


@cache
def saved_launches() -> dict[str, int]:
    """Launches by "preset: work", of the newest saved result of `murmur bench launches`."""
    newest, found = "", dict[str, int]()
    for file in RESULTS.glob("launches-*.json"):
        try:
            data = json.loads(file.read_text())
            rows = data["result"]["launches"]
            counts = {name: int(row["launches"]) for name, row in rows.items()}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if data["date"] > newest:
            newest, found = data["date"], counts
    return found


# Launches, GFLOP and GB are counts of updates before they were captured. The last one takes
# longest: the time of a topic may be over before.
CASES = (
    Case("mappo, spread", "spread", (), 3361, 27, 1.6, 0.35, "spread (MAPPO)"),
    Case("mappo, formation", "formation", (), 4722, 36, 17, 2.1, "formation (MAPPO)"),
    Case(
        "coma, terrain-reference",
        "terrain-reference",
        (),
        4454,
        49,
        45,
        5.1,
        "terrain-reference (COMA)",
    ),
    Case(
        "coma, terrain-published",
        "terrain-published",
        ("algorithm.batch_size=60", "algorithm.unrolls_per_update=5"),
        4212,
        40,
        466,
        7.3,
        "terrain-published (COMA)",
    ),
    Case("coma, snakes", "snakes", (), 4925, 37, 0.4, 0.1, "snakes (COMA)"),
    Case(
        "mappo, snakes-greedy",
        "snakes-greedy",
        ("augment.preset=none",),
        3865,
        28,
        110,
        5.8,
        "snakes-greedy (MAPPO)",
    ),
    Case("maddpg, snakes-ddpg", "snakes-ddpg", (), 334, 25, 0.3, 0.25, "snakes-ddpg (MADDPG)"),
    Case(
        "masac, formation, 2x256",
        "formation",
        ("algorithm.name=masac", "network.hidden=[256, 256]", "algorithm.share_parameters=false"),
        355,
        37,
        1.8,
        0.2,
        "MASAC, formation, 2x256",
    ),
    Case("qmix, spread", "spread", ("algorithm.name=qmix",), 340, 32, 0.0, 0.04, "QMIX, spread"),
    Case(
        "mappo, formation, GRU 64",
        "formation",
        ("network.recurrent=64",),
        90426,
        40,
        20,
        2.5,
        "formation, recurrent 64 (MAPPO)",
    ),
)
SMALL = Case(
    "mappo, spread, small",
    "spread",
    (
        *("algorithm.batch_size=24", "algorithm.batch_number=1", "algorithm.data_passes=1"),
        *("network.name=mlp", "network.hidden=[8]", "env_server.envs_per_worker=2"),
    ),
    400,
    27,
)
SMALL_REPLAY = Case(
    "qmix, spread, small",
    "spread",
    (
        *("algorithm.name=qmix", "algorithm.replay.batch_size=4", "algorithm.replay.start_rows=8"),
        *("network.name=mlp", "network.hidden=[8]", "env_server.envs_per_worker=2"),
    ),
    340,
    32,
)


def rows(
    figures: Iterable[Figure], values: Mapping[str, Value]
) -> dict[str, dict[str, str | float | bool | None]]:
    """The table: name -> value, goal, whether it is met, expected; figures without a plan last."""
    planned = {figure.name: figure for figure in figures}
    names = [*planned, *(name for name in values if name not in planned)]
    return {
        name: _row(planned.get(name, Figure(name)), values.get(name), measured=name in values)
        for name in names
    }


def _row(figure: Figure, value: Value, *, measured: bool) -> dict[str, Any]:
    met = figure.met(value)
    goal = "" if figure.goal is None else f"{figure.sense} {figure.goal}".removeprefix("= ")
    return {
        "measured": value if measured else "",
        "goal": goal,
        "met": "" if met is None else "yes" if met else "NO",
        "expected of an H200": "" if figure.expected is None else figure.expected,
    }
