"""The cases: every algorithm x space x sharing x recurrence x precision."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.wire.derived_maps import Channel, DerivedMap
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_CELL,
    AGENT_MASK,
    STATE,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)

AGENTS, ACTIONS, SIDE, PIXELS = 3, 4, 6, 40
PRECISIONS = ("fp32", "bf16", "fp16")
SHARING: dict[str, Any] = {"shared": True, "own": False, "groups": [0, 0, 1]}
_ROLLOUT = {"unroll_steps": 4, "batch_size": 12, "batch_number": 2, "data_passes": 2}
_REPLAY = {
    **{"capacity_rows": 400, "start_rows": 24, "batch_size": 16, "update_interval": 12},
    **{"updates_per_interval": 1, "unroll_steps": 4, "n_step": 2, "prioritized": True},
}
# Algorithm: its options, its spaces, and whether networks may remember.
ALGORITHMS: dict[str, tuple[dict[str, Any], tuple[str, ...], bool]] = {
    "mappo": ({"name": "mappo", **_ROLLOUT}, ("discrete", "continuous", "images", "pixels"), True),
    "ippo": (
        {"name": "mappo", "centralized": False, **_ROLLOUT},
        ("discrete", "continuous", "images", "pixels"),
        True,
    ),
    "mappo-vtrace": ({"name": "mappo", "vtrace_clip": 1.0, **_ROLLOUT}, ("discrete",), True),
    "happo": ({"name": "happo", **_ROLLOUT}, ("discrete", "continuous", "images"), True),
    "coma": ({"name": "coma", **_ROLLOUT}, ("discrete", "images"), True),
    "coma-clipped": (
        {"name": "coma", **_ROLLOUT, "clip_ratio": 0.2, "normalize_advantage": True},
        ("discrete",),
        True,
    ),
    "maddpg": (
        {"name": "maddpg", "replay": _REPLAY},
        ("discrete", "continuous", "images", "pixels"),
        False,
    ),
    "iddpg": (
        {"name": "maddpg", "centralized": False, "replay": _REPLAY},
        ("discrete", "continuous"),
        False,
    ),
    "masac": (
        {"name": "masac", "replay": _REPLAY},
        ("discrete", "continuous", "images", "pixels"),
        False,
    ),
    "qmix": ({"name": "qmix", "replay": _REPLAY}, ("discrete", "images", "pixels"), False),
    "qmix-sequences": (
        {"name": "qmix", "replay": {**_REPLAY, "n_step": 1, "prioritized": False}},
        ("discrete", "images"),
        True,
    ),
    "qplex": ({"name": "qplex", "replay": _REPLAY}, ("discrete", "images"), False),
    "vdn": ({"name": "qmix", "mixer": "vdn", "replay": _REPLAY}, ("discrete",), False),
    "iql": ({"name": "qmix", "mixer": "none", "replay": _REPLAY}, ("discrete",), False),
}


def make_spec(space: str, agents: int = AGENTS) -> EnvSpec:
    """The spec of a space: agents die in "discrete"; "images" has cells, maps of the state and
    derived maps; "pixels" are bytes, large enough to stay bytes.
    """
    action = Continuous(2) if space == "continuous" else Discrete(ACTIONS)
    observations = [ArraySpec("view", "float32", (5,))]
    if space == "discrete":
        observations += [ArraySpec(AGENT_MASK, "uint8", ())]
    if space != "continuous":
        observations += [ArraySpec(ACTION_MASK, "uint8", (ACTIONS,))]
    if space == "images":
        observations += [
            ArraySpec("drawn", "float32", (2, SIDE, SIDE)),
            ArraySpec("left", "float32", (1,)),
            ArraySpec("board", "uint8", (1, SIDE, SIDE)),
            ArraySpec(STATE, "float32", (2, SIDE, SIDE), per_agent=False),
            ArraySpec(AGENT_CELL, "int32", (2,)),
        ]
    if space == "pixels":
        observations += [ArraySpec("image", "uint8", (1, PIXELS, PIXELS))]
    derived = (
        Channel("copy", "drawn", 1),
        Channel("fill", "left"),
        Channel("constant", values=(1.0,) * agents),
        Channel("entropy", "drawn", 0, (1e-4, 0.499, 0.501)),
    )
    return EnvSpec(
        *("pretended", agents, tuple(observations), action, ("score",), 6),
        derived=(DerivedMap("maps", derived),) if space == "images" else (),
    )


@dataclass(frozen=True)
class Case:
    """A combination of algorithm, space, sharing, recurrence and precision."""

    algorithm: str
    space: str
    sharing: str
    recurrent: bool
    precision: str

    def __str__(self) -> str:
        memory = "recurrent" if self.recurrent else "plain"
        return f"{self.algorithm}-{self.space}-{self.sharing}-{memory}-{self.precision}"

    @property
    def options(self) -> dict[str, Any]:
        """The algorithm's section."""
        return {**ALGORITHMS[self.algorithm][0], "share_parameters": SHARING[self.sharing]}

    @property
    def network(self) -> dict[str, Any]:
        """The network's section."""
        recurrent = 4 if self.recurrent else 0
        if self.space == "pixels":
            small = {"channels": [2, 3]} if self.recurrent else {}
            name = "impala" if self.recurrent else "nature"
            options = {"hidden": [4], "frame_stack": 3, "recurrent": recurrent}
            return {"name": name, **small, **options}
        if self.space != "images":
            return {"name": "mlp", "hidden": [8], "recurrent": recurrent}
        shape = {"channels": [3], "kernels": [3], "strides": [2], "hidden": [8]}
        centered: dict[str, Any] = {"centered": [0, 2]}
        if self.options["name"] == "coma":
            centered["centered_state"] = [1]
        return {"name": "cnn", **shape, **centered, "recurrent": recurrent}

    def config(self, **sections: dict[str, Any]) -> ExperimentConfig:
        """The configuration, with options of sections replaced."""
        base: dict[str, dict[str, Any]] = {
            "environment": {"name": "pretended"},
            "env_server": {"envs_per_worker": 6, "sessions_per_worker": 2},
            "algorithm": self.options,
            "network": self.network,
            "learner": {
                **{"device": "cuda", "precision": self.precision, "pipeline": "async"},
                **{"port": 0, "metrics_port": 0, "max_skipped_updates": 100},
                **{"checkpoint_every_updates": 1000, "batcher": {"max_batch_envs": 16}},
            },
            "evaluation": {"every_updates": 0},
            "augment": {"preset": "random-shift" if self.space == "pixels" else "none"},
        }
        for name, section in sections.items():
            base[name] = {**base.get(name, {}), **section}
        return validate(ExperimentConfig, base)


def every_case() -> Iterator[Case]:
    """All combinations."""
    for name, (_, spaces, remembers) in ALGORITHMS.items():
        memories = (False, True) if remembers else (False,)
        for found in itertools.product(spaces, SHARING, memories, PRECISIONS):
            yield Case(name, *found)


def some_cases() -> Iterator[Case]:
    """A few combinations, in which every value of each property occurs."""
    for i, (name, (_, spaces, remembers)) in enumerate(ALGORITHMS.items()):
        for j, space in enumerate(spaces):
            if j and name in ("ippo", "iddpg", "qplex"):
                continue  # what is theirs alone does not look at observations
            if space == "pixels" and name not in ("mappo", "masac"):
                continue  # slow here
            sharing = list(SHARING)[(i + j) % 3]
            yield Case(name, space, sharing, remembers and (i + j) % 2 == 1, PRECISIONS[j % 3])
