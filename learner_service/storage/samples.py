"""Samples on the device: received once each and kept, or a window of them that moves on.

The event loop puts what sessions send; the learner thread, which both pipelines have here, takes
batches. One lock guards the bookkeeping; on CUDA, turns order what the two threads' streams do to
the memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from murmur.learner_service.device.streams import Fence, stream_lock
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.epochs import TRAIN, VALID, Epochs, merged_states
from murmur.learner_service.storage.storage import Batch, SavedPart, Storage
from murmur.shared.config.class_census import ClassCensus
from murmur.shared.process.errors import SpecError
from murmur.shared.process.files import size_text
from murmur.shared.wire.sample_codec import Grant
from murmur.shared.wire.samples import IMAGE, MASK, SPLITS, SampleSpec
from murmur.shared.wire.timestep import Array

Cache = Literal["device", "stream"]
_NUM_BUFFERS = 2  # of pinned memory: one is filled while the other may be on its way
_FEW = 64  # places beyond four batches, where samples are streamed


@dataclass(frozen=True)
class CacheChoice:
    """The place of the training split's samples between epochs, and the reason.

    Attributes:
        kind: "device": each is sent once; "stream": each is sent in every epoch.
        reason: text for the log.
        places: samples of the training split that are kept at once; 0: all.
    """

    kind: Cache
    reason: str
    places: int


def choose_cache(
    wanted: Literal["auto", "device", "stream"], spec: SampleSpec, batch_size: int, free: int
) -> CacheChoice:
    """Choose what `supply.cache` asks for, or what fits.

    Args:
        wanted: supply.cache.
        spec: spec of the samples.
        batch_size: samples of an update.
        free: bytes that are free on the device.

    Raises:
        SpecError: if what is asked for does not fit, naming both figures.
    """
    both = sum(spec.sizes) * spec.sample_bytes
    places = min(spec.size("train"), 4 * batch_size + _FEW)
    window = (places + spec.size("valid")) * spec.sample_bytes
    size = f"both splits take {size_text(both)}"
    half = f"half of the {size_text(free)} that are free on the device"
    if wanted == "device" or (wanted == "auto" and both <= free / 2):
        if both > free:
            raise SpecError(
                f"supply.cache=device: {size}, {size_text(free)} are free on the device; set "
                "supply.cache=stream, or use fewer or smaller images"
            )
        why = "supply.cache=device" if wanted == "device" else f"{size}, at most {half}"
        return CacheChoice("device", why, 0)
    if window > free:
        raise SpecError(
            f"the validation split and a window of {places} samples take {size_text(window)}, "
            f"{size_text(free)} are free on the device; use a smaller validation split, smaller "
            "images, or smaller batches of the algorithm"
        )
    why = "supply.cache=stream" if wanted == "stream" else f"{size}, more than {half}"
    return CacheChoice("stream", why, places)


@dataclass(eq=False)
class SampleBatch(Batch):
    """B samples of the training split, of one epoch.

    Attributes:
        arrays: name -> [B, ...] in wire dtype, on the device: "image" uint8 [B, 3, H, W], "mask"
            uint8 [B, H, W].
        version: empty: samples have no policy version.
        index: [B] int64 indices of the samples in their split, on the device.
        epoch: epoch that they belong to, from 0 on.
        begins_epoch: whether it is the first one of its epoch.
        ends_epoch: whether it is the last one, which may have fewer samples.
    """

    index: Tensor
    epoch: int
    begins_epoch: bool
    ends_epoch: bool

    @property
    def size(self) -> int:
        """B."""
        return len(self.index)


class SampleStore(Storage[SampleBatch]):
    """Store of samples on the device; see the module.

    `request`, `add` and `give_back` belong to the event loop; `sample`, `done`, `valid` and
    `state_dict` to the learner thread.

    Attributes:
        choice: place of the samples between epochs.
        census: classes that the masks received hold.
    """

    def __init__(
        self,
        spec: SampleSpec,
        batch_size: int,
        seed: int,
        choice: CacheChoice,
        device: torch.device,
        copied: dict[str, int],
        *,
        ordered: bool,
        group: Group = ALONE,
    ) -> None:
        """Set memory aside.

        Args:
            spec: spec of the samples.
            batch_size: samples of an update.
            seed: seed of the shuffles.
            choice: place of the samples.
            device: device of the memory.
            copied: bytes copied so far, by direction; see LearnerMetrics.
            ordered: order of batches, as in Epochs.
            group: group of learners, each of which has a share of the samples.
        """
        super().__init__(device)
        self._group, size = group, group.size
        self.spec, self.choice = spec, choice
        self.census = ClassCensus(spec)
        self._batch_size, self._copied = batch_size, copied
        self._epochs = Epochs(
            spec.sizes, seed, batch_size, choice.places, ordered=ordered, rank=group.rank, size=size
        )
        self._memory_lock = stream_lock(device)
        counts = (choice.places or -(-spec.size("train") // size), -(-spec.size("valid") // size))
        self._memory = [
            {
                a.name: torch.empty((count, *a.shape), dtype=getattr(torch, a.dtype), device=device)
                for a in spec.arrays
            }
            for count in counts
        ]
        self._host = (
            [{name: t.numpy() for name, t in arrays.items()} for arrays in self._memory]
            if device.type == "cpu"
            else []
        )
        self._buffers: list[_Pinned] = []
        self._turn = 0

    # --- the event loop

    def request(self, limit: int) -> Grant | None:
        """The next samples to ask a session for; None if nothing is needed or there is no room."""
        with self._changed:
            return self._epochs.request(limit)

    def give_back(self, request: Grant) -> None:
        """A session has ended without sending these."""
        with self._changed:
            self._epochs.give_back(request)

    def add(self, request: Grant, arrays: Mapping[str, Array], broken: Sequence[int]) -> int:
        """Keep the samples of a request.

        Args:
            request: samples that were asked for.
            arrays: name -> [n, ...] of the samples that are not broken, in the request's order.
            broken: indices of the split that could not be read.

        Returns:
            how many of the broken ones were not known to be.

        Raises:
            MurmurError: if no sample of the split is left.
        """
        lost = set(broken)
        good = [index for index in request.indices if index not in lost]
        with self._changed:
            places = [self._epochs.place_of(request, index) for index in good]
        if places:
            self._write(request.split, places, arrays)
            if MASK in arrays:
                self.census.look(request.split, good, arrays[MASK])
        with self._changed:
            self._epochs.arrived(request, good)
            try:
                return sum(self._epochs.broke(request, index) for index in lost)
            finally:
                self._changed.notify_all()

    def _write(self, split: int, places: list[int], arrays: Mapping[str, Array]) -> None:
        """Copy arrays [n, ...] to n places."""
        if self._host:
            for name, array in arrays.items():
                self._host[split][name][places] = array
            return
        if len(self._buffers) < _NUM_BUFFERS:
            self._buffers.append(_Pinned(self.device))
        buffer = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1
        staged = buffer.fill(arrays)
        with self._memory_lock:
            for name, rows_there in staged.items():
                memory = self._memory[split][name]
                for row, place in enumerate(places):
                    memory[place].copy_(rows_there[row], non_blocking=True)
                self._copied["to_device"] += rows_there.nbytes
            buffer.copied.mark()

    # --- the learner thread

    @property
    def ready(self) -> bool:
        """Whether a batch could be taken."""
        with self._changed:
            return self._epochs.ready

    @property
    def ready_rows(self) -> int:
        """Samples of the current epoch that wait to be trained."""
        return self._epochs.num_ready

    def due(self, version: int, timeout_s: float) -> bool:
        """Wait until a batch is there; see Storage.

        A rank that has trained its samples continues with empty batches until all have.
        """
        with self._changed:
            epochs, many = self._epochs, self._group.size > 1
            return self._changed.wait_for(
                lambda: epochs.ready or (many and epochs.exhausted), timeout_s
            )

    def sample(self, version: int, timeout_s: float) -> SampleBatch | None:
        """Return the next batch, or None if it was not there in time; see Storage."""
        with self._changed:
            self._changed.wait_for(lambda: self._epochs.ready, timeout_s)
            chosen = self._epochs.take()
            empty = chosen is None and self._group.size > 1 and self._epochs.exhausted
        if chosen is None:
            return self._empty() if empty else None
        numbers = self._sent([chosen.places, chosen.indices])
        with self._memory_lock:
            arrays = {
                name: t.index_select(0, numbers[0]) for name, t in self._memory[TRAIN].items()
            }
        with self._changed:
            self._epochs.freed(chosen)
        self.on_room()
        return SampleBatch(arrays, numbers[1], chosen.epoch, chosen.begins_epoch, chosen.ends_epoch)

    def _empty(self) -> SampleBatch:
        """A batch of no sample: one image whose every pixel is ignored stands in."""
        arrays = {
            a.name: torch.zeros((1, *a.shape), dtype=getattr(torch, a.dtype), device=self.device)
            for a in self.spec.arrays
        }
        arrays[MASK].fill_(self.spec.ignore_index)
        index = torch.zeros(0, dtype=torch.int64, device=self.device)
        return SampleBatch(arrays, index, self._epochs.epoch, False, True)

    def end_epoch(self) -> None:
        """All ranks of a group have trained their samples of this epoch."""
        with self._changed:
            self._epochs.end_epoch()

    def done(self, batch: SampleBatch) -> None:
        """The update with a batch has ended."""
        with self._changed:
            self._epochs.done(ends_epoch=batch.ends_epoch)

    def valid_ready(self, timeout_s: float) -> bool:
        """Wait until the validation split is here; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._epochs.valid is not None, timeout_s)

    def count_unseen(self, split: int) -> int:
        """Number of this rank's samples of a split that are not broken and were not looked at."""
        with self._changed:
            return self._epochs.count_unseen(split, self.census.looked[split])

    def valid(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (image, mask) of the validation split, in its order; call when it is ready."""
        with self._changed:
            indices = self._epochs.valid
        assert indices is not None, "valid_ready() says when"
        memory = self._memory[VALID]
        ranks = self._group.size
        whole = len(indices) == len(range(self._group.rank, self.spec.size("valid"), ranks))
        for at in range(0, len(indices), self._batch_size):
            part = indices[at : at + self._batch_size]
            with self._memory_lock:
                if whole:
                    batch = {name: t[at : at + len(part)] for name, t in memory.items()}
                else:
                    places = self._sent((part // ranks).tolist())
                    batch = {name: t.index_select(0, places) for name, t in memory.items()}
            yield batch[IMAGE], batch[MASK]

    def _sent(self, numbers: list[int] | list[list[int]]) -> Tensor:
        """Numbers on the device, without waiting for it."""
        pinned = self.device.type == "cuda"
        there = torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned)
        return there.to(self.device, non_blocking=True)

    def figures(self) -> dict[str, Any]:
        """Return the state of the epoch, for the log."""
        epochs = self._epochs
        return {
            "cache": self.choice.kind,
            "epoch": epochs.epoch,
            "trained": epochs.trained,
            "remaining": epochs.remaining,
            "broken": epochs.num_broken,
        }

    @property
    def epoch(self) -> int:
        """Epochs that have been trained."""
        return self._epochs.epoch

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and which samples of it were trained: samples themselves are sent again."""
        with self._changed:
            return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a saved epoch."""
        with self._changed:
            self._epochs.load_state_dict(state)

    def load_parts(self, parts: Sequence[SavedPart], rank: int, size: int) -> None:
        """Continue where each rank trains what of its samples none has."""
        self.load_state_dict(merged_states([part.state for part in parts]))

    def split_text(self) -> str:
        """Text about the data set, for the log."""
        sizes = ", ".join(f"{self.spec.size(split)} {split}" for split in SPLITS)
        return f"{sizes} samples of {size_text(self.spec.sample_bytes)}"


class _Pinned:
    """Pinned memory for the samples of one request.

    Attributes:
        copied: marked when what is in it is on its way.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated before the first samples."""
        self.copied = Fence(device)
        self._tensors: dict[str, Tensor] = {}

    def fill(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Arrays in pinned memory, until the next call."""
        self.copied.reached()
        filled = {}
        for name, array in arrays.items():
            known = self._tensors.get(name)
            if known is None or len(known) < len(array):
                dtype = getattr(torch, array.dtype.name)
                known = torch.empty(array.shape, dtype=dtype, pin_memory=True)
                self._tensors[name] = known
            known.numpy()[: len(array)] = array
            filled[name] = known[: len(array)]
        return filled
