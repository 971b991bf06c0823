"""Padding changes nothing: what rows beyond a batch, or of earlier batches, hold is never seen."""

import math

import pytest
import torch
from torch import Tensor

from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.layers.stacked import sharing_agents
from murmur.learner_service.learning.fixed_shapes import GraphedAlgorithm, packed, unpacked
from murmur.learner_service.learning.returns import ValueNorm
from murmur.learner_service.preprocess.running_moments import crowd
from murmur.learner_service.storage.rollout import Batch, transitions
from murmur.shared.wire.timestep import StepType
from tests.learner_service.algorithms.test_captured_on_policy import build, wide
from tests.learner_service.algorithms.test_captured_updates import tensors
from tests.learner_service.toys import CPU


def on_a_gpu(name: str) -> GraphedAlgorithm:
    built = build(name, False)
    assert isinstance(built, GraphedAlgorithm)
    return built


def learn(algorithm: GraphedAlgorithm, batch: Batch) -> dict[str, Tensor]:
    return algorithm.update(Batch(dict(batch.arrays), batch.version, times=batch.times))


def test_arrays_of_all_types_come_back_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    arrays = {
        "image": torch.randint(0, 256, (5, 2, 1, 3, 3), dtype=torch.uint8, generator=generator),
        "mask": torch.randint(0, 2, (5, 2, 4), generator=generator).bool(),
        "vector": torch.randn(5, 2, 3, generator=generator),
        "action": torch.randint(-1, 9, (5, 2), generator=generator),
        "cell": torch.randint(0, 9, (5, 2, 2), dtype=torch.int32, generator=generator),
        "alive": torch.randint(0, 2, (5, 2), dtype=torch.uint8, generator=generator),
    }
    arrays["vector"][0, 0, 0], arrays["vector"][1, 1, 1] = math.nan, -0.0
    layout, words = packed(arrays, 2)
    assert words.shape == (5, 2, 3 + 1 + 3 + 1 + 2 + 1 + 2)
    index = torch.tensor([4, 0, 0])
    found = unpacked(layout, words.index_select(0, index))
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype
        torch.testing.assert_close(found[name], x[index], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["mappo", "mappo-discrete-recurrent", "coma"])
def test_every_row_that_counts_is_in_one_minibatch_of_each_pass(name: str) -> None:
    algorithm, batch = on_a_gpu(name), wide(name, 1)
    learn(algorithm, wide(name, 3))  # leaves more rows behind
    learn(algorithm, batch)
    fixed, arrays = algorithm._fixed, batch.arrays
    steps, envs = arrays["step_type"].shape
    weight = fixed._buffers["columns"][: steps * envs, :, fixed.columns.index("weight")]
    valid = transitions(batch).valid
    assert torch.equal(weight[: valid.numel()].amax(1) > 0, valid.flatten())
    assert not weight[valid.numel() :].any()
    counted = weight.flatten() if algorithm._single else weight.amax(1)
    expected = counted.nonzero().flatten().tolist()
    rows = fixed._buffers["rows" if algorithm.memory_size else "order"]
    for of_pass in rows:
        assert int(of_pass.max()) < len(counted)
        assert sorted(of_pass[counted[of_pass] > 0].tolist()) == expected


@pytest.mark.parametrize("name", ["mappo", "mappo-discrete-recurrent", "coma"])
def test_what_is_beyond_a_batch_changes_nothing(name: str) -> None:
    batches, found = [wide(name, 2), wide(name, 0)], []
    for fill in (0.0, math.nan):
        algorithm = on_a_gpu(name)
        losses = [learn(algorithm, batches[0])]
        for buffer in algorithm._fixed._buffers.values():
            if buffer.is_floating_point():
                buffer.fill_(fill)
        losses.append(learn(algorithm, batches[1]))
        assert all(x.isfinite() for x in losses[1].values())
        found.append((losses, tensors(algorithm.state_dict())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_batch_beyond_the_room_gets_room() -> None:
    algorithm = on_a_gpu("mappo")
    learn(algorithm, wide("mappo", 0))
    fixed = algorithm._fixed
    before = fixed._rows
    batch = wide("mappo", 0)
    arrays = {k: torch.cat([x] * 8, 1) for k, x in batch.arrays.items()}
    many = Batch(arrays, [0] * arrays["step_type"].shape[1], times=8.0)
    assert all(x.isfinite() for x in learn(algorithm, many).values())
    assert fixed._rows > before
    assert math.log2(fixed._rows).is_integer()


def test_returns_are_those_of_a_cpu() -> None:
    """What a padded batch is prepared to is what the same batch is on a CPU."""
    padded, plain, batch = on_a_gpu("mappo"), on_a_gpu("mappo"), wide("mappo", 2)
    batch.arrays["step_type"][3:, 1] = int(StepType.ABORTED)
    assert isinstance(plain, Mappo)
    learn(padded, batch)
    plain._static = False
    rows = plain._rows(batch)
    fixed = padded._fixed
    for name in ("log_prob", "advantage", "target"):
        ours = fixed._buffers["columns"][: len(rows.weight), :, fixed.columns.index(name)]
        mine, theirs = (x[rows.weight > 0] for x in (ours, rows.columns[name]))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded._batch_scalars, plain._batch_scalars, rtol=1e-4, atol=1e-5)


def test_outliers_of_a_padded_batch_are_those_of_the_batch() -> None:
    values, valid = torch.randn(600, 2, 1), torch.rand(600, 2, 1) < 0.9
    values[7, 1] = 1e6
    expected = crowd(values, valid, None, 3.0, 0.0)
    more = torch.full((1448, 2, 1), math.inf)
    wider = torch.cat([values, more]), torch.cat([valid, torch.zeros_like(more).bool()])
    found = crowd(*wider, None, 3.0, 0.0, torch.tensor(600))
    assert all(map(torch.equal, found, expected))
    # And so the returns that are clipped.
    norms = [ValueNorm(sharing_agents((0, 0), CPU)) for _ in range(2)]
    for _ in range(2):
        norms[0].update(values[:300, :, 0], torch.ones(300, 2))
        norms[1].update(values[:300, :, 0], torch.ones(300, 2))
    plain = norms[0].update(values.squeeze(-1), valid.float().squeeze(-1))
    returns, counted = (torch.cat([x.squeeze(-1), torch.zeros(1448, 2)]) for x in (values, valid))
    assert torch.equal(norms[1].update(returns, counted, rows=torch.tensor(600))[:600], plain)
    assert float(norms[0].clipped) == float(norms[1].clipped)


@pytest.mark.parametrize("name", ["mappo", "mappo-discrete-recurrent", "coma"])
def test_expected_memory_is_that_of_the_buffers(name: str) -> None:
    algorithm, batch = on_a_gpu(name), wide(name, 2)
    rows = batch.arrays["step_type"].numel()
    expected = algorithm.graph_bytes(rows)
    learn(algorithm, batch)
    taken = sum(x.nbytes for x in algorithm._fixed._buffers.values())
    assert taken <= expected <= 40 * taken  # with the graphs' pool
