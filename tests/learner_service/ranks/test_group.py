"""Groups of learners, in real processes over gloo."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from murmur.learner_service.ranks.group import ALONE, Group, checksum, require_same
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.ledger import Ledger
from tests.ranks.processes import JobError, Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks."""
    with Ranks() as two:
        yield two


def _tensors(rank: int) -> list[torch.Tensor]:
    """Of two shapes and two dtypes; rank 0: 1, 2, 3, 4; rank 1: 3, 2, 9, 0."""
    values = [[1.0, 2.0], [3.0, 2.0]][rank], [[3.0], [9.0]][rank], [4, 0][rank]
    return [
        torch.tensor(values[0]),
        torch.tensor([values[1]]).T,
        torch.tensor(values[2], dtype=torch.int64),
    ]


def _reduced(group: Group, how: str) -> list[list[float]]:
    tensors = _tensors(group.rank)
    getattr(group, how)(tensors)
    assert [t.shape for t in tensors] == [(2,), (1, 1), ()]
    return [t.flatten().tolist() for t in tensors]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sum_", [[4.0, 4.0], [12.0], [4]]),
        ("largest_", [[3.0, 2.0], [9.0], [4]]),
        ("broadcast_", [[1.0, 2.0], [3.0], [4]]),
    ],
)
def test_tensors_are_reduced_in_place(ranks: Ranks, how: str, expected: list[list[float]]) -> None:
    assert ranks.call(_reduced, how) == [expected, expected]


def _mean(group: Group) -> list[float]:
    a, b = _tensors(group.rank)[:2]
    before = group.calls
    group.mean_([a, b])
    assert group.calls == before + 1  # one for both
    return [*a.tolist(), *b.flatten().tolist()]


def test_mean_is_one_exchange(ranks: Ranks) -> None:
    assert ranks.call(_mean) == [[2.0, 2.0, 6.0]] * 2


def _not_contiguous(group: Group) -> list[list[float]]:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T + group.rank
    group.mean_([x])
    group.broadcast_([x])
    return x.tolist()


def test_transposed_tensors_keep_their_order(ranks: Ranks) -> None:
    assert ranks.call(_not_contiguous) == [[[1.5, 3.5], [2.5, 4.5]]] * 2


def _agreed(group: Group) -> list[dict[str, float]]:
    mine = {"rows": float(2**40 + group.rank), "stop": float(group.rank)}
    return [group.agree(mine, how) for how in ("min", "max", "sum")]


def test_ranks_agree_on_numbers(ranks: Ranks) -> None:
    least, greatest, total = (
        {"rows": 2.0**40, "stop": 0.0},
        {"rows": 2.0**40 + 1, "stop": 1.0},
        {"rows": 2.0**41 + 1, "stop": 1.0},
    )
    assert ranks.call(_agreed) == [[least, greatest, total]] * 2


def _decided(group: Group) -> list[int]:
    first = group.rank == 0
    held = [group.all_ranks(first), group.all_ranks(True), group.any_rank(first)]
    return [*held, group.any_rank(False), group.of_rank_0(2**48 + 1 + group.rank)]


def test_ranks_decide_together(ranks: Ranks) -> None:
    assert ranks.call(_decided) == [[False, True, True, False, 2**48 + 1]] * 2
    assert [ALONE.all_ranks(False), ALONE.any_rank(True), ALONE.of_rank_0(7)] == [False, True, 7]


def _gathered(group: Group) -> list[float]:
    group.all_ranks(True)
    return group.gather(10.0 + group.rank)


def test_gather_orders_by_rank(ranks: Ranks) -> None:
    assert ranks.call(_gathered) == [[10.0, 11.0]] * 2


def _waiting(group: Group) -> tuple[bool, float, float]:
    ledger = Ledger("learner")
    ledger.adopt()
    before = group.waited_s
    group.agree({"x": 1.0}, "sum")
    return ledger.current()[0] == "start", ledger.seconds()["wait_ranks"], group.waited_s - before


def test_waiting_is_a_state_of_the_ledger(ranks: Ranks) -> None:
    for back_in_start, seconds, counted in ranks.call(_waiting):
        assert back_in_start
        assert 0 < seconds <= counted * 1.5 + 1e-3


def test_alone_changes_nothing_and_counts_nothing() -> None:
    tensors = _tensors(1)
    for call in (ALONE.mean_, ALONE.sum_, ALONE.largest_, ALONE.broadcast_):
        call(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, _tensors(1), strict=True))
    assert ALONE.agree({"a": 3.0}, "sum") == {"a": 3.0}
    assert ALONE.gather(2.0) == [2.0]
    assert ALONE.all_ranks(True)
    require_same(ALONE, {"a": tensors[0]}, "update 1")
    assert (ALONE.calls, ALONE.bytes, ALONE.waited_s) == (0, 0, 0.0)


def test_without_torchrun_a_learner_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Group.from_environment(CPU, 1.0) is ALONE
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Group.from_environment(CPU, 1.0) is ALONE


def test_incomplete_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        Group.from_environment(CPU, 1.0)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK=2 and WORLD_SIZE=2"):
        Group.from_environment(CPU, 1.0)


def test_checksum_sees_each_bit() -> None:
    x = torch.arange(6, dtype=torch.float32)
    swapped = x[[1, 0, 2, 3, 4, 5]]
    nudged = x.clone()
    nudged[3] = torch.nextafter(x[3], torch.tensor(10.0))
    assert len({int(checksum(t)) for t in (x, swapped, nudged)}) == 3
    assert int(checksum(torch.tensor([True, False]))) == 1  # 1 * 1 + 0 * 3
    assert int(checksum(torch.tensor([5, 7], dtype=torch.uint8))) == 26  # 1 * 5 + 3 * 7


def _compared(group: Group, planted: float) -> None:
    weights = {"actor.0.weight": torch.ones(3, 2), "critic.0.bias": torch.zeros(4)}
    weights["critic.0.bias"][2] += planted * group.rank
    require_same(group, weights, "update 300")


def test_planted_difference_ends_with_a_message(ranks: Ranks) -> None:
    ranks.call(_compared, 0.0)
    for rank in range(2):
        ranks.start(rank, _compared, 1e-30)
    for rank in range(2):
        with pytest.raises(JobError, match=r"update 300: 1 of 2 .* first 'critic.0.bias'"):
            ranks.result(rank)


def test_killed_rank_ends_the_others_with_a_message() -> None:
    with Ranks() as two:
        two.call(_gathered)
        two.start(0, _gathered)
        pid = two.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            JobError, match="ConnectionLostError: rank 0 of 2: another rank is gone"
        ):
            two.result(0)


def test_rank_that_does_not_come_ends_the_wait_with_a_message() -> None:
    with Ranks(timeout_s=0.5) as two:
        two.start(0, _gathered)
        with pytest.raises(
            JobError, match="ConnectionLostError: rank 0 of 2: another rank is gone"
        ):
            two.result(0)
