"""Changes of batches by symmetries, by hand."""

import pytest
import torch

from murmur.learner_service.preprocess.augment.building import build_rl_augment
from murmur.learner_service.preprocess.augment.symmetry import Symmetries
from murmur.shared.config.experiment import AugmentConfig
from murmur.shared.config.section import validate
from murmur.shared.config.symmetry import ArrayChange, Symmetry
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_CELL,
    STATE,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)

CPU = torch.device("cpu")
# Actions: up, down, left, right. A quarter turn to the left makes of up left, of right up.
TURN = Symmetry(
    "a quarter",
    (
        ArrayChange("maps", turns=1),
        ArrayChange(STATE, turns=1),
        ArrayChange(AGENT_CELL, order=(1, 0), signs=(-1.0, 1.0), offsets=(2.0, 0.0)),
    ),
    (2, 3, 1, 0),
)
FLIP = Symmetry(
    "mirror",
    (
        ArrayChange("maps", flip=True),
        ArrayChange(STATE, flip=True),
        ArrayChange(AGENT_CELL, signs=(1.0, -1.0), offsets=(0.0, 2.0)),
    ),
    (0, 1, 3, 2),
)
GRID = EnvSpec(
    "grid",
    2,
    (
        ArraySpec("maps", "uint8", (2, 3, 3)),
        ArraySpec(STATE, "float32", (1, 3, 3), per_agent=False),
        ArraySpec(AGENT_CELL, "int32", (2,)),
        ArraySpec(ACTION_MASK, "uint8", (4,)),
        ArraySpec("other", "float32", (3,)),
    ),
    Discrete(4),
    symmetries=(TURN, FLIP),
)


def grid_batch(rows: int) -> dict[str, torch.Tensor]:
    maps = torch.zeros(rows, 2, 2, 3, 3, dtype=torch.uint8)
    maps[:, :, 1, 0, 1] = 9  # above the middle
    return {
        "now/maps": maps,
        "now/" + STATE: maps[:, 0, 1:].float(),
        "now/" + AGENT_CELL: torch.tensor([0, 1], dtype=torch.int32).expand(rows, 2, 2),
        "now/" + ACTION_MASK: torch.tensor([0, 1, 1, 1], dtype=torch.uint8).expand(rows, 2, 4),
        "now/other": torch.rand(rows, 2, 3),
        "next/now/maps": maps,
        "action": torch.tensor([[1, 3]], dtype=torch.int32).expand(rows, 2),
        "now/expert_action": torch.tensor([[-1, 3]], dtype=torch.int32).expand(rows, 2),
        "penalty": torch.tensor([-9.0, 0, 0, 0]).expand(rows, 2, 4),
        "reward": torch.rand(rows, 2),
    }


def test_grid_under_identity_turn_and_mirror_by_hand() -> None:
    given = grid_batch(3)
    out = Symmetries(GRID, CPU, ["now/", "next/now/"]).apply(given, torch.tensor([0, 1, 2]))
    for name in ("now/maps", "next/now/maps"):
        # Above the middle: stays there, is left of it, stays in the mirror.
        places = [out[name][i, 1, 1].nonzero().tolist() for i in range(3)]
        assert places == [[[0, 1]], [[1, 0]], [[0, 1]]]
        assert out[name].dtype == torch.uint8
    assert [out["now/" + STATE][i, 0].nonzero().tolist() for i in range(3)] == [
        [[0, 1]],
        [[1, 0]],
        [[0, 1]],
    ]
    assert out["now/" + AGENT_CELL][:, 0].tolist() == [[0, 1], [1, 0], [0, 1]]
    assert out["now/" + AGENT_CELL].dtype == torch.int32
    # Up was illegal: left is; up again.
    assert out["now/" + ACTION_MASK][:, 0].tolist() == [[0, 1, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]]
    assert out["penalty"][1, 0].tolist() == [0, 0, -9, 0]
    # Down and right: right and up; down and left.
    assert out["action"].tolist() == [[1, 3], [3, 0], [1, 2]]
    assert out["action"].dtype == torch.int32
    assert out["now/expert_action"].tolist() == [[-1, 3], [-1, 0], [-1, 2]]  # -1: not told
    assert all(out[name] is given[name] for name in ("now/other", "reward"))


def test_vector_and_continuous_action_by_hand() -> None:
    change = ArrayChange("view", order=(1, 0, 2), signs=(1.0, 1.0, -1.0), offsets=(0.0, 0.0, 5.0))
    spec = EnvSpec(
        "smooth",
        1,
        (ArraySpec("view", "float32", (3,)),),
        Continuous(2),
        symmetries=(Symmetry("swap", (change,), (1, 0), (-1.0, 1.0)),),
    )
    batch = {"view": torch.tensor([[[1.0, 2.0, 3.0]]]), "raw_action": torch.tensor([[[0.1, 0.7]]])}
    out = Symmetries(spec, CPU, [""]).apply(batch, torch.tensor([1]))
    assert out["view"].tolist() == [[[2, 1, 2]]]
    torch.testing.assert_close(out["raw_action"], torch.tensor([[[-0.7, 0.1]]]))


def test_time_series_change_alike() -> None:
    batch = {name: x.unsqueeze(1).expand(-1, 4, *x.shape[1:]) for name, x in grid_batch(2).items()}
    out = Symmetries(GRID, CPU, ["now/"]).apply(batch, torch.tensor([1, 2]))
    assert out["action"].tolist() == [[[3, 0]] * 4, [[1, 2]] * 4]
    assert (out["now/maps"] == out["now/maps"][:, :1]).all()


def test_all_symmetries_and_none_are_equally_likely() -> None:
    augment = build_rl_augment(validate(AugmentConfig, {"preset": "symmetry"}), GRID, CPU, ["now/"])
    assert augment is not None
    generator = torch.Generator().manual_seed(0)
    out = augment({"action": torch.tensor([[1]]).expand(3000, 1)}, generator)
    # Down: down or, turned, right; the mirror leaves it.
    assert abs((out["action"] == 3).float().mean() - 1 / 3) < 0.03


def test_environment_without_a_symmetry_is_refused() -> None:
    spec = EnvSpec("plain", 1, (ArraySpec("view", "float32", (3,)),), Discrete(2))
    with pytest.raises(ConfigError, match="'plain' announces no symmetry"):
        build_rl_augment(AugmentConfig(preset="symmetry"), spec, CPU)
