"""Samples on the device: right bytes in right places, in a cache and in a window."""

import numpy as np
import pytest
import torch

from murmur.learner_service.storage.samples import CacheChoice, SampleStore, choose_cache
from murmur.shared.process.errors import SpecError
from murmur.shared.wire.samples import SPLITS
from murmur.shared.wire.timestep import Array
from tests.supply.toy_source import ToySource

SOURCE = ToySource(train=20, valid=5)
SPEC = SOURCE.spec  # 256 bytes a sample
MIB = 2**20


def store(places: int = 0, *, ordered: bool = False) -> SampleStore:
    choice = CacheChoice("stream" if places else "device", "", places)
    cpu = torch.device("cpu")
    return SampleStore(SPEC, 4, 1, choice, cpu, {"to_device": 0}, ordered=ordered)


def answer(samples: SampleStore, limit: int = 3, broken: tuple[int, ...] = ()) -> bool:
    """Send what is asked for; whether something was."""
    request = samples.request(limit)
    if request is None:
        return False
    split = SPLITS[request.split]
    lost = [i for i in request.indices if split == "train" and i in broken]
    good = [SOURCE.read(split, i) for i in request.indices if i not in lost]
    arrays: dict[str, Array] = {}
    if good:
        arrays = {name: np.stack([s[name] for s in good]) for name in ("image", "mask")}
    samples.add(request, arrays, lost)
    return True


@pytest.mark.parametrize("places", [0, 9])
def test_batches_hold_the_samples_that_they_name(places: int) -> None:
    samples, seen = store(places), []
    while samples.epoch < 2:
        answer(samples, broken=(7,))
        batch = samples.sample(0, 0.0)
        if batch is None:
            continue
        index = batch.index.tolist()
        assert batch.arrays["image"][:, 1, 2, 3].tolist() == index
        assert batch.arrays["mask"][:, 0, 0].tolist() == [i % 3 for i in index]
        assert batch.size == len(index)
        samples.done(batch)
        seen += index
    assert sorted(seen) == sorted([i for i in range(20) if i != 7] * 2)


def test_validation_batches_are_ordered_without_broken_samples() -> None:
    samples = store()
    while answer(samples):
        pass
    assert samples.valid_ready(0.0)
    batches = list(samples.valid())
    assert [len(image) for image, _ in batches] == [4, 1]
    assert torch.cat([image[:, 0, 0, 0] for image, _ in batches]).tolist() == [0, 1, 2, 3, 4]
    assert batches[0][1].shape == (4, 8, 8)


def test_what_an_ended_session_owes_is_asked_for_again() -> None:
    samples = store()
    lost = samples.request(4)
    assert lost is not None
    asked = []
    while (request := samples.request(4)) is not None:
        asked.append(request)
    samples.give_back(lost)
    assert samples.request(4) == lost
    assert samples.request(4) is None


def test_a_checkpoint_names_what_was_trained() -> None:
    first, second = store(ordered=True), store(ordered=True)
    while answer(first):
        pass
    batch = first.sample(0, 0.0)
    assert batch is not None
    first.done(batch)
    second.load_state_dict(first.state_dict())
    assert second.figures()["trained"] == 4
    while answer(second):
        pass
    ours = first.sample(0, 0.0)
    theirs = second.sample(0, 0.0)
    assert ours is not None
    assert theirs is not None
    assert ours.index.tolist() == theirs.index.tolist()
    assert torch.equal(ours.arrays["image"], theirs.arrays["image"])


def test_auto_keeps_what_takes_at_most_half_of_the_free_memory() -> None:
    both = 25 * 256  # bytes of both splits
    on_device = choose_cache("auto", SPEC, 4, 2 * both)
    assert (on_device.kind, on_device.places) == ("device", 0)
    assert "at most half of the 12.5 KiB that are free" in on_device.reason
    streamed = choose_cache("auto", SPEC, 4, 2 * both - 1)
    assert (streamed.kind, streamed.places) == ("stream", 20)
    assert "both splits take 6.2 KiB, more than half of" in streamed.reason
    assert choose_cache("device", SPEC, 4, both).kind == "device"
    assert choose_cache("stream", SPEC, 4, MIB).kind == "stream"


@pytest.mark.parametrize(
    ("wanted", "free", "words"),
    [
        ("device", 6399, "supply.cache=device: both splits take 6.2 KiB, 6.2 KiB are free"),
        ("stream", 6000, "a window of 20 samples take 6.2 KiB, 5.9 KiB are free"),
    ],
)
def test_what_does_not_fit_is_refused(wanted: str, free: int, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        choose_cache(wanted, SPEC, 4, free)  # type: ignore[arg-type]
