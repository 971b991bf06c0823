"""Memory of unrolls: blocks of columns that keep what is in them while it grows."""

import dataclasses

import numpy as np
import pytest
import torch

from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.storage import Arena, Record, time_step_layout
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.toys import CPU, MID, vector_spec

LAYOUT = {
    "step_type": ((), torch.uint8),
    "action": ((2,), torch.int32),
    "map": ((3, 5), torch.uint8),
    "half": ((3,), torch.float16),
    "reward": ((2,), torch.float32),
}


def test_record_gives_each_array_aligned_bytes_of_its_own() -> None:
    record = Record(LAYOUT, ["action"])
    assert record.fields["action"].offset == 0  # what the policy gives comes first
    assert record.num_bytes == 40  # 8 + 8 + 6 + 1 + 15 = 38, to a multiple of 8
    ends = 0
    for field in sorted(record.fields.values(), key=lambda f: f.offset):
        assert field.offset == ends
        assert field.offset % field.dtype.itemsize == 0
        ends = field.offset + field.num_bytes
    assert ends == 38


def test_filled_record_holds_what_the_policy_gave() -> None:
    record = Record({**LAYOUT, "log_prob": ((2,), torch.float32)}, ["action", "log_prob"])
    bytes_ = torch.randint(256, (4, record.num_bytes), dtype=torch.uint8)
    action = torch.arange(8, dtype=torch.int32).view(4, 2)
    log_prob = torch.randn(4, 2)
    words = record.filled(bytes_, {"log_prob": log_prob, "action": action})
    filled = words.view(torch.uint8)
    assert torch.equal(record.fields["action"].of(filled), action)
    assert torch.equal(record.fields["log_prob"].of(filled), log_prob)
    for name in ("step_type", "map"):
        assert torch.equal(record.fields[name].of(filled), record.fields[name].of(bytes_))


@pytest.mark.parametrize("records", [None, ["action"]], ids=["arrays", "records"])
def test_arena_keeps_its_blocks_while_it_grows(records: list[str] | None) -> None:
    arena = Arena(LAYOUT, {"memory": ((2,), torch.float32)}, CPU, records=records)
    first = arena.allocate(3, length=3, at_least=0).first_column
    for name, array in arena.arrays.items():
        array[:, first : first + 3] = torch.arange(3, dtype=array.dtype).view(
            1, 3, *[1] * (array.dim() - 2)
        )
        array[:1, 0] = 7
        assert array.shape[0] == (1 if name == "memory" else 4)
    blocks = [arena.allocate(n, length=3 + n, at_least=0).first_column for n in (2, 5)]
    assert [first, *blocks] == [1, 4, 6]
    assert arena.columns == 13  # 1 + 3, 1 + 6, 1 + 12: column 0 belongs to none
    for array in arena.arrays.values():
        assert array[0, first : first + 3].reshape(3, -1)[:, 0].tolist() == [0, 1, 2]
    assert arena.arrays["reward"].shape == (9, 13, 2)
    if records is not None:  # one and the same memory
        arena.records.zero_()
        assert not arena.arrays["reward"].any()


def test_arena_makes_room_for_those_expected() -> None:
    arena = Arena(LAYOUT, {}, CPU, records=None)
    arena.allocate(2, length=2, at_least=10)
    assert (arena.columns, arena.grown) == (11, 1)
    arena.allocate(8, length=2, at_least=10)
    assert (arena.columns, arena.grown) == (11, 1)


def test_unrolls_move_with_their_arena() -> None:
    spec = EnvSpec("toy", 1, (ArraySpec("view", "float32", (2,)),), Discrete(2))
    storage = RolloutStorage(spec, 3, 100, None, CPU)
    unrolls = []
    for i, n in enumerate((1, 4, 2)):
        unrolls.append(storage.begin(n, i, 0))
        unrolls[i].host[OBSERVATION + "view"][0] = i
        unrolls[i].arrays["reward"][:] = 10 + i
    for i, unroll in enumerate(unrolls):
        assert (unroll.arrays[OBSERVATION + "view"][0] == i).all()
        assert (unroll.host["reward"] == 10 + i).all()
        arena = storage.arena.arrays["reward"]
        at = unroll.first_column
        assert torch.equal(arena[:4, at : at + unroll.num_envs], unroll.arrays["reward"])


def test_freed_unroll_is_used_again_with_another_length() -> None:
    spec = dataclasses.replace(vector_spec(num_agents=1), max_episode_steps=0)
    storage = RolloutStorage(spec, 0, 6, 1, CPU)  # the length follows from the environments
    storage.expect(1)
    first = storage.begin(1, 0, 0)
    assert first.length == 16
    first.arrays["reward"][:] = 5
    storage.release(first)
    storage._wanted = 40
    storage.expect(1)
    again = storage.begin(1, 0, 1)
    assert again is first
    assert again.length == again.transitions == 40
    assert again.arrays["reward"].shape[0] == len(again.versions) == 41
    while not again.full:
        again.arrays["step_type"][again.cursor] = MID
        again.cursor += 1
    storage.add(again)
    batch = storage.sample(0, 0)
    assert batch is not None
    assert batch.size == 40


def test_layout_of_a_spec_fits_a_record() -> None:
    spec = vector_spec(num_agents=3, masked=True)
    record = Record(time_step_layout(spec, {"log_prob": ()}), ["action", "log_prob"])
    records = torch.zeros(2, record.num_bytes, dtype=torch.uint8)
    for field in record.fields.values():
        of = field.of(records)
        assert of.shape == (2, *field.shape)
        assert of.data_ptr() - records.data_ptr() == field.offset
        assert np.shares_memory(of.numpy(), records.numpy())
