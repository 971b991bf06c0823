"""Bookkeeping of epochs: every sample once, in the order that was promised."""

from collections import Counter

import numpy as np
import pytest

from murmur.learner_service.storage.epochs import (
    TRAIN,
    VALID,
    Chosen,
    Epochs,
    merged_states,
)
from murmur.shared.process.errors import MurmurError
from murmur.shared.wire.sample_codec import Grant
from murmur.shared.wire.seeding import shuffled


def play(
    epochs: Epochs, num_epochs: int, broken: set[int], rng: np.random.Generator, lose: float = 0.0
) -> list[Chosen]:
    """Answer requests in a random order, lose some sessions, take what is ready."""
    chosen: list[Chosen] = []
    under_way: list[Grant] = []
    while epochs.epoch < num_epochs:
        request = epochs.request(int(rng.integers(1, 5)))
        if request is not None:
            under_way.append(request)
        if under_way and (request is None or rng.random() < 0.5):
            answered = under_way.pop(int(rng.integers(len(under_way))))
            if rng.random() < lose:
                epochs.give_back(answered)
                continue
            lost = [i for i in answered.indices if answered.split == TRAIN and i in broken]
            epochs.arrived(answered, [i for i in answered.indices if i not in lost])
            for index in lost:
                epochs.broke(answered, index)
        batch = epochs.take()
        if batch is not None:
            epochs.freed(batch)
            epochs.done(ends_epoch=batch.ends_epoch)
            chosen.append(batch)
    return chosen


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("places", [0, 20])
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_is_trained_once_in_each_epoch(ordered: bool, places: int, seed: int) -> None:
    broken = {3, 17, 22}
    epochs = Epochs((23, 4), 7, 5, places, ordered=ordered)
    chosen = play(epochs, 3, broken, np.random.default_rng(seed), lose=0.3)
    for epoch in range(3):
        batches = [c for c in chosen if c.epoch == epoch]
        trained = Counter(i for c in batches for i in c.indices)
        assert trained == Counter(set(range(23)) - broken)
        assert [c.begins_epoch for c in batches] == [True] + [False] * (len(batches) - 1)
        assert [c.ends_epoch for c in batches] == [False] * (len(batches) - 1) + [True]
        assert [len(c.indices) for c in batches] == [5, 5, 5, 5]


@pytest.mark.parametrize("places", [0, 12])
def test_ordered_batches_are_slices_of_the_permutation(places: int) -> None:
    wanted = [[i for i in shuffled(7, e, 12).tolist() if i != 4] for e in (0, 1)]
    for seed in range(3):
        epochs = Epochs((12, 0), 7, 3, places, ordered=True)
        chosen = play(epochs, 2, {4}, np.random.default_rng(seed), lose=0.2)
        for epoch in (0, 1):
            indices = [c.indices for c in chosen if c.epoch == epoch]
            assert indices == [wanted[epoch][at : at + 3] for at in range(0, 11, 3)]


def test_a_cache_requests_each_sample_once() -> None:
    epochs = Epochs((10, 3), 1, 4, ordered=False)
    asked: Counter[tuple[int, int]] = Counter()
    while (request := epochs.request(4)) is not None:
        asked.update((request.split, i) for i in request.indices)
        epochs.arrived(request, request.indices)
    assert asked == Counter(
        {**{(TRAIN, i): 1 for i in range(10)}, **{(VALID, i): 1 for i in range(3)}}
    )
    for _ in range(9):  # three epochs of three batches
        batch = epochs.take()
        assert batch is not None
        epochs.done(ends_epoch=batch.ends_epoch)
    assert epochs.epoch == 3
    assert epochs.request(4) is None


def test_streaming_never_holds_more_than_its_places() -> None:
    epochs = Epochs((30, 0), 1, 4, 9, ordered=False)
    held = 0
    while (request := epochs.request(4)) is not None:
        held += len(request.indices)
        assert len({epochs.place_of(request, i) for i in request.indices}) == len(request.indices)
        epochs.arrived(request, request.indices)
    assert held == 9
    batch = epochs.take()
    assert batch is not None
    epochs.freed(batch)
    request = epochs.request(99)
    assert request is not None
    assert len(request.indices) == 4


def test_arrival_order_counts_unless_ordered() -> None:
    epochs = Epochs((6, 0), 1, 2, ordered=False)
    requests = [epochs.request(1) for _ in range(6)]
    for request in reversed(requests):
        assert request is not None
        epochs.arrived(request, request.indices)
    batch = epochs.take()
    assert batch is not None
    assert batch.indices == [r.indices[0] for r in reversed(requests) if r][:2]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("places", [0, 16])
def test_a_resumed_epoch_continues_with_the_rest(ordered: bool, places: int) -> None:
    broken = {5}
    first = Epochs((19, 2), 3, 4, places, ordered=ordered)
    rng = np.random.default_rng(0)
    before: list[Chosen] = []
    while len(before) < 6:  # in the middle of the second epoch
        request = first.request(3)
        if request is not None:
            lost = [i for i in request.indices if request.split == TRAIN and i in broken]
            first.arrived(request, [i for i in request.indices if i not in lost])
            for index in lost:
                first.broke(request, index)
        batch = first.take()
        if batch is not None:
            first.freed(batch)
            first.done(ends_epoch=batch.ends_epoch)
            before.append(batch)
    assert first.epoch == 1
    second = Epochs((19, 2), 3, 4, places, ordered=ordered)
    second.load_state_dict(first.state_dict())
    after = play(second, 3, broken, rng)
    for epoch in (1, 2):
        trained = Counter(i for c in before + after if c.epoch == epoch for i in c.indices)
        assert trained == Counter(set(range(19)) - broken)
    if ordered:
        whole = play(Epochs((19, 2), 3, 4, places, ordered=True), 3, broken, rng)
        assert [c.indices for c in before + after] == [c.indices for c in whole]


def test_a_rest_that_is_broken_now_ends_the_epoch() -> None:
    epochs = Epochs((4, 0), 3, 2, ordered=False)
    state = epochs.state_dict()
    order = shuffled(3, 0, 4).tolist()
    flags = np.zeros(4, np.bool_)
    flags[order[:2]] = True
    bits = np.packbits(flags)
    state["trained"] = state["trained"].new_tensor(bits)
    epochs.load_state_dict(state)
    request = epochs.request(2)
    assert request is not None
    for index in request.indices:
        epochs.broke(request, index)
    while (request := epochs.request(4)) is not None:
        epochs.arrived(request, request.indices)
    batch = epochs.take()
    assert batch is not None
    assert (batch.epoch, sorted(batch.indices), batch.ends_epoch) == (1, sorted(order[:2]), True)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_sample_broken_on_one_server_leaves_later_epochs(ordered: bool, seed: int) -> None:
    """Two epochs are under way in the window; a sample may come for one and be broken for both."""
    rng, flaky = np.random.default_rng(seed), (3, 7)
    epochs = Epochs((12, 2), 7, 3, 12, ordered=ordered)
    known: dict[int, int] = {}  # index -> epoch that was under way when it was broken
    under_way: list[Grant] = []
    trained: list[Chosen] = []
    for _ in range(600):
        request = epochs.request(2)
        if request is not None:
            under_way.append(request)
        if under_way and (request is None or rng.random() < 0.3):
            answered = under_way.pop(int(rng.integers(len(under_way))))
            lost = [
                i
                for i in answered.indices
                if answered.split == TRAIN
                and i in flaky
                and epochs.epoch > 1
                and rng.random() < 0.5
            ]
            epochs.arrived(answered, [i for i in answered.indices if i not in lost])
            for index in lost:
                epochs.broke(answered, index)
                known.setdefault(index, epochs.epoch)
        if rng.random() < 0.5 and (batch := epochs.take()) is not None:
            epochs.freed(batch)
            epochs.done(ends_epoch=batch.ends_epoch)
            trained.append(batch)
    assert set(known) == set(flaky)
    assert epochs.epoch > 10  # no place was lost
    for epoch in range(epochs.epoch):
        counts = Counter(i for c in trained if c.epoch == epoch for i in c.indices)
        gone = {i for i, since in known.items() if epoch > since}
        still = {i for i, since in known.items() if epoch == since}
        assert set(counts.values()) == {1}
        assert set(range(12)) - gone - still <= set(counts) <= set(range(12)) - gone


def test_nothing_is_requested_once_all_samples_are_broken() -> None:
    epochs = Epochs((2, 0), 7, 1, 2, ordered=False)
    request = epochs.request(2)
    assert request is not None
    epochs.broke(request, 0)
    with pytest.raises(MurmurError, match="every sample of split 'train' is broken"):
        epochs.broke(request, 1)
    assert epochs.request(2) is None


def test_a_split_of_broken_samples_ends_the_run() -> None:
    epochs = Epochs((2, 0), 3, 2, ordered=False)
    request = epochs.request(2)
    assert request is not None
    assert epochs.broke(request, 0)
    assert not epochs.broke(request, 0)
    with pytest.raises(MurmurError, match=r"every sample of split 'train' is broken \(2\)"):
        epochs.broke(request, 1)


def test_validation_samples_are_whole_without_broken_ones() -> None:
    epochs = Epochs((1, 3), 3, 2, ordered=False)
    requests = [epochs.request(9), epochs.request(9)]
    valid = requests[1]
    assert valid is not None
    assert valid.split == VALID
    epochs.arrived(valid, (0, 2))
    assert epochs.valid is None
    epochs.broke(valid, 1)
    assert epochs.valid is not None
    assert epochs.valid.tolist() == [0, 2]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("places", [0, 20])
def test_ranks_share_the_samples_and_end_epochs_together(ordered: bool, places: int) -> None:
    """23 and 4 samples among three ranks: 8, 8, 7 and 2, 1, 1."""
    ranks = [Epochs((23, 4), 7, 3, places, ordered=ordered, rank=r, size=3) for r in range(3)]
    for epoch in range(2):
        trained: list[list[int]] = [[], [], []]
        asked: list[int] = []
        while not all(e.exhausted for e in ranks):
            for rank, epochs in enumerate(ranks):
                if (request := epochs.request(4)) is not None:
                    asked += request.indices if request.split == VALID else ()
                    epochs.arrived(request, request.indices)
                if (batch := epochs.take()) is not None:
                    trained[rank] += batch.indices
                    epochs.freed(batch)
                    epochs.done(ends_epoch=batch.ends_epoch)
                    assert epochs.epoch == epoch  # the others have not ended theirs
        assert [sorted(own) for own in trained] == [list(range(r, 23, 3)) for r in range(3)]
        if ordered:
            order = shuffled(7, epoch, 23).tolist()
            assert trained == [[i for i in order if i % 3 == r] for r in range(3)]
        for epochs in ranks:
            epochs.end_epoch()
    assert sorted(np.concatenate([e.valid for e in ranks if e.valid is not None])) == [0, 1, 2, 3]


def test_another_number_of_ranks_trains_what_none_has() -> None:
    ranks = [Epochs((10, 0), 7, 2, ordered=True, rank=r, size=2) for r in range(2)]
    trained: set[int] = set()
    for rank, epochs in enumerate(ranks):
        while (request := epochs.request(4)) is not None and request.epoch == 0:
            epochs.arrived(request, request.indices)
        for _ in range(rank + 1):
            batch = epochs.take()
            assert batch is not None
            trained |= set(batch.indices)
    alone = Epochs((10, 0), 7, 2, ordered=True)
    alone.load_state_dict(merged_states([epochs.state_dict() for epochs in ranks]))
    rest = set()
    while alone.epoch == 0:
        if (request := alone.request(4)) is not None:
            alone.arrived(request, request.indices)
        if (batch := alone.take()) is not None:
            rest |= set(batch.indices)
            alone.done(ends_epoch=batch.ends_epoch)
    assert len(trained) == 6
    assert rest == set(range(10)) - trained
