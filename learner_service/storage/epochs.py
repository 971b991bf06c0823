"""Bookkeeping of epochs: samples still needed, samples to request, and the next batch.

It runs on the host and holds no sample. Every sample of the training split is requested,
received and trained once in an epoch; one that was requested of a session that ended is requested
again. With a cache, each is requested once for all epochs.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from murmur.shared.process.errors import MurmurError
from murmur.shared.wire.sample_codec import Grant
from murmur.shared.wire.samples import SPLITS
from murmur.shared.wire.seeding import shuffled

TRAIN, VALID = 0, 1  # positions in SPLITS
_MISSING, _ARRIVED, _TAKEN, _BROKEN = range(4)  # state of a sample in the current epoch


class Chosen(NamedTuple):
    """Samples of one batch.

    Attributes:
        epoch: epoch that they belong to.
        indices: indices within the training split.
        places: place in memory of each of them.
        begins_epoch, ends_epoch: whether it is the epoch's first or last batch.
    """

    epoch: int
    indices: list[int]
    places: list[int]
    begins_epoch: bool
    ends_epoch: bool


class Epochs:
    """Order of samples in epochs; see the module. The caller's lock guards it.

    Attributes:
        epoch: number of the epoch that batches are of, from 0 on.
        num_ready: samples of this epoch that have arrived and wait.
        trained: samples of this epoch that were trained.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        seed: int,
        batch_size: int,
        places: int = 0,
        *,
        ordered: bool,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Begin with epoch 0.

        Args:
            sizes: samples of each split.
            seed: seed of the shuffles.
            batch_size: samples of a batch; the last one of an epoch may have fewer.
            places: samples of the training split that can be kept at once; 0: all of them, which
                is a cache.
            ordered: batch k of an epoch is permutation[k * B : (k + 1) * B], broken samples left
                out, whatever arrives first; else what arrived first is taken first.
            rank: number of one of several learners, which has every size-th sample of both splits,
                in the order of the whole permutation.
            size: number of learners; more than one begin each epoch together, see `end_epoch`.
        """
        self._rank, self._ranks = rank, size
        self._own = [np.arange(count) % size == rank for count in sizes]
        self._sizes = sizes
        self._seed = seed
        self._batch_size = batch_size
        self._cached, self._ordered = places == 0, ordered
        self._free = list(range(places - 1, -1, -1))
        self._place: dict[tuple[int, int], int] = {}  # streaming: (epoch, index) -> place
        self._early: dict[int, list[int]] = {}  # streaming: arrived, by later epoch
        self._have = [np.zeros(size, np.bool_) for size in sizes]  # kept for good
        self._broken = [np.zeros(size, np.bool_) for size in sizes]
        self.epoch = 0
        self._returned: deque[Grant] = deque()
        self._upcoming: Grant | None = None
        self._restart(np.zeros(sizes[TRAIN], np.bool_))

    # --- what to request

    def request(self, limit: int) -> Grant | None:
        """The next samples to ask for, at most `limit`; None if there is nothing or no place."""
        if self._returned:
            first = self._returned.popleft()
            if len(first.indices) > limit:
                self._returned.appendleft(first._replace(indices=first.indices[limit:]))
            return first._replace(indices=first.indices[:limit])
        while True:
            if self._upcoming is None or not self._upcoming.indices:
                self._upcoming = next(self._requests, None)
                if self._upcoming is None:
                    return None
            _, epoch, split, indices = self._upcoming
            count = limit
            if split == TRAIN and not self._cached:
                count = min(limit, len(self._free))
                if not count:
                    return None
            self._upcoming = self._upcoming._replace(indices=indices[count:])
            wanted = tuple(i for i in indices[:count] if not self._broken[split][i])
            if not wanted:
                if self._broken[split].all():  # no epoch has anything to ask for
                    return None
                continue
            if split == TRAIN and not self._cached:
                for index in wanted:
                    self._place[epoch, index] = self._free.pop()
            return Grant(0, epoch, split, wanted)

    def give_back(self, request: Grant) -> None:
        """Samples that were requested will not come: another session is to send them."""
        self._returned.appendleft(request)

    def _restart(self, done: NDArray[np.bool_]) -> None:
        """Begin `self.epoch`, of which some samples were trained by an earlier process."""
        self._requests = self._all_requests(self.epoch, done)
        self._upcoming = None
        self._begin(done)

    def _all_requests(self, epoch: int, done: NDArray[np.bool_]) -> Iterator[Grant]:
        """Everything that will be needed, in the order in which it will."""
        order = self._order(epoch)
        yield from _in_pieces(TRAIN, epoch, order[~done[order]])
        yield from _in_pieces(VALID, epoch, np.flatnonzero(self._own[VALID]))
        if self._cached:
            order = self._order(epoch + 1)
            yield from _in_pieces(TRAIN, epoch + 1, order[done[order]])
            return
        while True:
            epoch += 1
            yield from _in_pieces(TRAIN, epoch, self._order(epoch))

    # --- what comes

    def place_of(self, request: Grant, index: int) -> int:
        """Return the place of a requested sample in the memory of its split."""
        if request.split == VALID or self._cached:
            return index // self._ranks
        return self._place[request.epoch, index]

    def arrived(self, request: Grant, indices: Sequence[int]) -> None:
        """Requested samples are in their places."""
        for index in indices:
            if request.split == VALID or self._cached:
                self._have[request.split][index] = True
            if request.split == TRAIN:
                self._note(request.epoch, index)

    def _note(self, epoch: int, index: int) -> None:
        """A sample of the training split is there."""
        if self._broken[TRAIN][index]:  # it was broken on another server
            self._free_place(epoch, index)
        elif epoch == self.epoch or self._cached:
            if self._status[index] == _MISSING:
                self._set(index, _ARRIVED)
                self._queue.append(index)
        else:
            self._early.setdefault(epoch, []).append(index)

    def broke(self, request: Grant, index: int) -> bool:
        """A requested sample cannot be read: it leaves this epoch and all later ones.

        Returns:
            whether that was not known yet.

        Raises:
            MurmurError: if no sample of the split is left.
        """
        split = request.split
        known = bool(self._broken[split][index])
        self._broken[split][index] = True
        if split == TRAIN:
            self._free_place(request.epoch, index)
            if self._status[index] == _MISSING:
                self._set(index, _BROKEN)
        own = self._own[split]
        if self._broken[split][own].all():
            raise MurmurError(
                f"every sample of split '{SPLITS[split]}' is broken ({own.sum()}): see "
                "the log for the first ones, and fix the source"
            )
        return not known

    def _free_place(self, epoch: int, index: int) -> None:
        place = self._place.pop((epoch, index), None)
        if place is not None:
            self._free.append(place)

    # --- what is trained

    def _order(self, epoch: int) -> NDArray[np.int32]:
        """The permutation of an epoch, as far as it is this rank's."""
        order = shuffled(self._seed, epoch, self._sizes[TRAIN])
        own: NDArray[np.int32] = order[self._own[TRAIN][order]]
        return own

    def _begin(self, done: NDArray[np.bool_]) -> None:
        """Begin `self.epoch`, of which some samples may have been trained before."""
        self._permutation = self._order(self.epoch)
        own = self._own[TRAIN]
        done = done & own
        self._status = np.where(done | ~own, np.uint8(_TAKEN), np.uint8(_MISSING))
        if self._cached:
            self._status[self._have[TRAIN] & ~done] = _ARRIVED
        early = self._early.pop(self.epoch, [])
        for index in early:
            if self._broken[TRAIN][index]:  # found out after it had come from another server
                self._free_place(self.epoch, index)
        early = [index for index in early if not self._broken[TRAIN][index]]
        self._status[early] = _ARRIVED
        self._status[self._broken[TRAIN] & ~done & own] = _BROKEN
        self._num_missing = int(np.count_nonzero(self._status == _MISSING))
        self.num_ready = int(np.count_nonzero(self._status == _ARRIVED))
        self._ending = False  # the last batch has been taken
        self.trained = int(np.count_nonzero(done))
        self._cursor = 0
        there = self._permutation[self._status[self._permutation] == _ARRIVED].tolist()
        self._queue: deque[int] = deque(there if self._cached else early)

    def _set(self, index: int, status: int) -> None:
        """A sample that was missing is not any more."""
        self._num_missing -= 1
        self.num_ready += int(status == _ARRIVED)
        self._status[index] = status

    def _next(self) -> list[int] | None:
        """The samples of the next batch and one more, or all that are left; None if not there.

        One more, so that the last batch of an epoch is known to be the last: samples that are
        still missing may turn out to be broken.
        """
        wanted = self._batch_size + 1
        if self.exhausted and not self._ending and self._ranks == 1:
            self.done(ends_epoch=True)  # all that was left of a resumed epoch is broken now
        if not self._ordered:
            if len(self._queue) < wanted and self._num_missing:
                return None
            return [self._queue[i] for i in range(min(wanted, len(self._queue)))]
        found: list[int] = []
        order, status = self._permutation, self._status
        for at in range(self._cursor, len(order)):
            index = int(order[at])
            if status[index] == _MISSING:
                return None
            if status[index] == _ARRIVED:
                found.append(index)
                if len(found) == wanted:
                    break
        return found

    @property
    def ready(self) -> bool:
        """Whether a batch could be taken."""
        return bool(self._next())

    @property
    def exhausted(self) -> bool:
        """Whether no sample of the current epoch is left to be trained."""
        return not self._num_missing and not self.num_ready

    @property
    def remaining(self) -> int:
        """Samples of the current epoch that are neither trained nor broken."""
        return self._num_missing + self.num_ready

    def take(self) -> Chosen | None:
        """The next batch, if it is there; its samples count as trained."""
        found = self._next()
        if not found:
            return None
        indices = found[: self._batch_size]
        if self._cached:
            places = [index // self._ranks for index in indices]
        else:
            places = [self._place.pop((self.epoch, index)) for index in indices]
        chosen = Chosen(self.epoch, indices, places, self.trained == 0, len(found) == len(indices))
        self._status[indices] = _TAKEN
        self.trained += len(indices)
        self.num_ready -= len(indices)
        self._ending = chosen.ends_epoch
        if not self._ordered:
            for _ in indices:
                self._queue.popleft()
        else:
            while self._cursor < len(self._permutation) and self._status[
                self._permutation[self._cursor]
            ] in (_TAKEN, _BROKEN):
                self._cursor += 1
        return chosen

    def freed(self, chosen: Chosen) -> None:
        """The samples of a batch have been copied: their places may be used again."""
        if not self._cached:
            self._free += reversed(chosen.places)

    def done(self, *, ends_epoch: bool) -> None:
        """The update with the latest batch has ended."""
        if ends_epoch and self._ranks == 1:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Begin the next epoch; of several learners, once all have trained their samples."""
        self.epoch += 1
        self._begin(np.zeros(self._sizes[TRAIN], np.bool_))

    @property
    def num_broken(self) -> int:
        """Broken samples known, of both splits."""
        return sum(int(np.count_nonzero(broken)) for broken in self._broken)

    def count_unseen(self, split: int, seen: NDArray[np.bool_]) -> int:
        """Number of this rank's samples of a split that are neither broken nor marked in `seen`."""
        return int(np.count_nonzero(self._own[split] & ~self._broken[split] & ~seen))

    @property
    def valid(self) -> NDArray[np.intp] | None:
        """The validation split without its broken samples; None while some are to come."""
        if not (self._have[VALID] | self._broken[VALID])[self._own[VALID]].all():
            return None
        return np.flatnonzero(self._have[VALID])

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The epoch, which of its samples were trained, and which samples are broken."""
        return {
            "epoch": self.epoch,
            "trained": _packed((self._status == _TAKEN) & self._own[TRAIN]),
            "broken": [_packed(broken) for broken in self._broken],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a saved epoch; nothing has been requested yet."""
        self.epoch = state["epoch"]
        sizes = self._sizes
        self._broken = [
            _unpacked(bits, size) for bits, size in zip(state["broken"], sizes, strict=True)
        ]
        self._restart(_unpacked(state["trained"], sizes[TRAIN]))


def _in_pieces(split: int, epoch: int, indices: NDArray[np.integer]) -> Iterator[Grant]:
    """Requests for indices, no more of them in one than is cheap to slice."""
    for at in range(0, len(indices), 64):
        yield Grant(0, epoch, split, tuple(indices[at : at + 64].tolist()))


def _packed(flags: NDArray[np.bool_]) -> torch.Tensor:
    return torch.from_numpy(np.packbits(flags))


def _unpacked(bits: torch.Tensor, size: int) -> NDArray[np.bool_]:
    return np.unpackbits(bits.numpy(), count=size).astype(np.bool_)


def merged_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what several learners saved: each takes its own samples out of it."""
    first = states[0]
    trained, broken = first["trained"].clone(), [bits.clone() for bits in first["broken"]]
    for state in states[1:]:
        trained |= state["trained"]
        for bits, more in zip(broken, state["broken"], strict=True):
            bits |= more
    return {"epoch": first["epoch"], "trained": trained, "broken": broken}
