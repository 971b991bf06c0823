"""A replay gives no step into an aborted row and none from it; no sum of rewards crosses one."""

import torch

from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.toys import ABORTED, CPU, FIRST, LAST, MID

SPEC = EnvSpec("toy", 1, (ArraySpec("view", "float32", (1,)),), Discrete(2))


def test_aborted_rows_are_left_out() -> None:
    kinds = [FIRST, MID, MID, ABORTED, FIRST, MID, LAST, FIRST]
    seen = drawn(kinds, [1.0, 1, 1, 1, 1, 1, 0, 1], [0.0, 1, 2, 0, 0, 8, 16, 0])
    # Row 0: 1 + 0.5 * 2, then row 2 is the last there is: its value, after two steps.
    # Row 1: 2, one step. Rows 2 (into the aborted row), 3 (aborted) and 6 (LAST) never.
    # Row 4: 8 + 0.5 * 16 and the episode terminates. Row 5: 16.
    assert seen == {0: (2.0, 0.25), 1: (2.0, 0.5), 4: (16.0, 0.0), 5: (16.0, 0.0)}


def test_an_episode_that_failed_to_start_is_left_out() -> None:
    kinds = [FIRST, MID, LAST, ABORTED, ABORTED, FIRST, MID, MID]
    seen = drawn(kinds, [1.0] * 8, [0.0, 1, 2, 90, 90, 0, 4, 8])
    # Row 0: 1 + 0.5 * 2 and the value of row 2, where the episode was cut short; row 1: 2.
    # Row 5: 4 + 0.5 * 8; row 6: 8. Rows 2 (LAST), 3 and 4 (aborted) never.
    assert seen == {0: (2.0, 0.25), 1: (2.0, 0.5), 5: (8.0, 0.25), 6: (8.0, 0.5)}


def drawn(
    kinds: list[int], discount: list[float], reward: list[float]
) -> dict[int, tuple[float, float]]:
    """Row -> the sum of its rewards and the discount of what follows, of all rows ever drawn."""
    config = ReplayConfig(
        capacity_rows=700,
        start_rows=1,
        batch_size=7,
        updates_per_interval=60,
        n_step=3,
        unroll_steps=7,
    )
    replay = ReplayStorage(config, SPEC, 0.5, None, CPU, {}, 1)
    unroll = replay.begin(1, 0, 0)
    unroll.arrays["step_type"][:, 0] = torch.tensor(kinds, dtype=torch.uint8)
    unroll.arrays["discount"][:, 0] = torch.tensor(discount)
    unroll.arrays["reward"][:, 0, 0] = torch.tensor(reward)
    unroll.cursor = 8
    replay.add(unroll)
    seen = {}
    for _ in range(60):
        batch = replay.sample(0, 0)
        assert batch is not None
        for i, r, d in zip(batch.index, batch.reward[:, 0], batch.discount, strict=True):
            seen[int(i)] = (float(r), float(d))
    return seen


def test_aborted_rows_alone_start_no_update() -> None:
    config = ReplayConfig(capacity_rows=70, start_rows=1, batch_size=7, unroll_steps=7)
    replay = ReplayStorage(config, SPEC, 0.5, None, CPU, {}, 1)
    for kind in (ABORTED, MID):
        unroll = replay.begin(1, 0, 0)
        unroll.arrays["step_type"][:] = kind
        unroll.cursor = 8
        replay.add(unroll)
        batch = replay.sample(0, 0)
        assert (batch is not None) == (kind == MID)
    assert batch is not None
    assert sorted(batch.index.tolist()) == list(range(7, 14))  # of the second unroll
