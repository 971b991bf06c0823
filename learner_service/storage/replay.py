"""Replay: transitions are kept in a ring on the device and learned from many times.

Unrolls are put as they fill, one column of the ring for each of their environments. A transition
(o_t, a_t, r, o_{t+k}) is made when it is sampled, k <= n steps long: it ends at the end of its
episode or of its column, whichever comes first, and is bootstrapped there unless the episode
terminated. Within it an agent's own rewards end with its life; a team's continue.

`updates_per_interval` updates are due for every `update_interval` rows put.

On CUDA a draw, and the writing of new priorities, are graphs of a pool of their own. Nothing that
they give to another graph lies in a pool: a draw ends with a copy to memory set aside for the next
batch, and another graph copies that to where the update reads it, so that the batch after it can be
drawn on a second stream meanwhile. Acting's rows wait for a draw, but never for an update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learner_service.group.group import ALONE, Group
from learner_service.runtime.cuda_graph import Captured, Graphs, Outputs
from learner_service.runtime.device import restore_generator
from learner_service.runtime.readback import to_host
from learner_service.runtime.streams import Fence
from learner_service.storage.feed import SavedPart
from learner_service.storage.frames import Frames
from learner_service.storage.replay_batch import ReplayBatch
from learner_service.storage.replay_config import ReplayConfig
from learner_service.storage.replay_memory import ReplayMemory
from learner_service.storage.replay_parts import deal
from learner_service.storage.replay_returns import ReplayReturns
from learner_service.storage.storage import OBSERVATION, Storage, Unroll
from learner_service.storage.sum_tree import SumTree
from shared.errors import ConfigError
from shared.ledger import enter
from shared.spec import AGENT_MASK, EnvSpec
from shared.timestep import StepType

_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)
_CHUNK_BYTES = 32 << 20  # what is saved as one file
_MIN_PRIORITY = 1e-5


class ReplayStorage(Storage[ReplayBatch]):
    """See the module. Uniform is prioritized with all priorities equal.

    Attributes, beside those of a Storage:
        graphs: CUDA graphs of draws and priorities.
    """

    _prefetched: ReplayBatch | None = None
    # Memory of a drawn batch and of the one that is learned from, if draws are captured.
    _drawn: ReplayBatch | None = None
    _taken: ReplayBatch | None = None

    def __init__(
        self,
        config: ReplayConfig,
        spec: EnvSpec,
        gamma: float,
        max_unrolls_ahead: int | None,
        device: torch.device,
        extras: Mapping[str, tuple[int, ...]],
        seed: int,
        *,
        team: bool = False,
        section: str = "replay",
        memory_size: int = 0,
        frames: Frames | None = None,
        group: Group = ALONE,
        cuda_graph: bool = True,
    ) -> None:
        """Make an empty replay.

        Args:
            config: its options.
            spec: the run's spec.
            gamma: discount factor, for sums over n steps.
            max_unrolls_ahead: how many unrolls of every environment acting may be ahead of the
                updates due; None: any (the caller alternates acting and learning itself).
            device: where rows live.
            extras: see Algorithm.
            seed: of the sampling.
            team: whether the team's value is learned: what the dead get is then the team's too.
            section: dotted name of the section that `config` is of, for messages.
            memory_size: see Algorithm; of each column the recurrent state at its first row is kept.
            frames: see Algorithm.
            group: of the ranks, a replay each; new rows have the largest priority of all.
            cuda_graph: whether draws and new priorities may be captured; ranks capture none.

        Raises:
            ConfigError: if the options contradict each other.
            ResourceError: if the device has not the memory.
            SpecError: if it has it for the ring, but not for a batch beside it.
        """
        super().__init__(spec, config.unroll_steps, device, extras, memory_size, frames)
        self._config = config
        self._section = section
        self._group = group
        self._ahead = max_unrolls_ahead
        self._mortal = not team and any(o.name == AGENT_MASK for o in spec.observations)
        self._returns = ReplayReturns(gamma, config.n_step, self.length, mortal=self._mortal)
        self._require_options()
        memory = ReplayMemory(config, spec, device, extras, memory_size, section, frames)
        self._arrays, self._columns = memory.arrays, memory.columns
        self._stacked, self._previous = memory.stacked, memory.previous
        self._tree = SumTree(self._columns * self.length, device)
        self._age = torch.zeros(self._columns, dtype=torch.long, device=device)
        self._max_priority = torch.ones((), device=device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._cursor = 0
        self._filled = 0
        self._updates = 0  # columns, columns, updates taken
        self._peak_open = 0  # environments with an open unroll, at most
        self._has_transitions = False  # whether there was ever a row to draw
        self._first_burst = self._rate()[0], 0  # rows put and updates taken where it is due
        self._chunk_columns = max(1, _CHUNK_BYTES // memory.bytes)
        self._changed_chunks: set[int] = set()
        self._prefetches = config.prefetch and device.type == "cuda"  # elsewhere it gains nothing
        self._stream = torch.cuda.Stream(device) if self._prefetches else None  # type: ignore[no-untyped-call]
        self._before_draw, self._after_draw = Fence(device), Fence(device)
        # Not the algorithm's: a draw may run beside an update.
        self.graphs = Graphs(device, enabled=cuda_graph and group.size == 1)
        self._beta = torch.ones((), device=device)  # the power of importance weights
        self._draw = Captured(
            "draw", self._draw_ahead, self.graphs, (self._generator,), in_place=True
        )
        self._take = Captured("take", self._take_drawn, self.graphs, in_place=True)
        self._prioritise = Captured("priorities", self._set_priorities, self.graphs, in_place=True)

    def _require_options(self) -> None:
        """Refuse options that contradict each other."""
        c = self._config
        if c.n_step > c.unroll_steps:
            raise ConfigError(
                f"{self._section}.n_step={c.n_step} is more than unroll_steps="
                f"{c.unroll_steps}, the longest stretch kept together; raise unroll_steps"
            )

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self._columns * self.length

    @override
    def begin(
        self, num_envs: int, first_slot: int, sequence: int, filled: Sequence[Unroll] = ()
    ) -> Unroll:
        unroll = super().begin(num_envs, first_slot, sequence, filled)
        open_envs = self._open_envs - sum(u.num_envs for u in filled)
        self._peak_open = max(self._peak_open, open_envs)
        return unroll

    def may_begin(self, filled: Sequence[Unroll] = ()) -> bool:
        """Whether fewer updates are due than `unrolls` unrolls of every environment bring."""
        if self._ahead is None:
            return True
        c = self._config
        with self._changed:
            bursts = math.ceil(self._ahead * self._peak_open * self.length / c.update_interval)
            new = sum(u.num_envs * u.rows for u in filled)
            return self._due(new) <= bursts * c.updates_per_interval

    def _due(self, new: int = 0) -> int:
        """Updates that the rows put so far, and new ones, ask for and that have not been begun."""
        c = self._config
        rows, updates = self._first_burst
        bursts = max(0, 1 + (self.inserted + new - rows) // c.update_interval)
        # environments that fail at once bring ABORTED rows alone
        if bursts and not self._has_transitions:
            with self.turns.take():
                self._has_transitions = bool(to_host(self._tree.total) > 0)
            if not self._has_transitions:
                return 0
        return bursts * c.updates_per_interval - (self._updates - updates)

    def add(self, unroll: Unroll) -> None:
        """Copy an unroll into the ring, over its oldest columns."""
        assert unroll.full
        n = unroll.num_envs
        with self._changed, self.turns.take():
            self._await_prefetch()
            done = 0
            while done < n:
                start = self._cursor
                count = min(n - done, self._columns - start)
                self._put_columns(unroll, done, start, count)
                self._cursor = (start + count) % self._columns
                self._filled = max(self._filled, start + count)
                done += count
            self._open_envs -= n
            self.inserted += n * unroll.rows
            self._give_back(unroll)
            self._changed.notify_all()

    def _put_columns(self, unroll: Unroll, first: int, start: int, count: int) -> None:
        """Environments first ... of an unroll, to columns start ... of the ring."""
        stop = start + count
        columns = slice(first, first + count)
        for name, kept in self._arrays.items():
            rows = unroll.arrays[name][:, columns].transpose(0, 1)
            kept[start:stop, self._previous * (name in self._stacked) :] = rows
        if self._frames is not None:
            previous = self._frames.of_memory(unroll.arrays["memory"][0, columns])
            for name, frames in previous.items():
                self._arrays[OBSERVATION + name][start:stop, : self._previous] = frames
        self._age[start:stop] += 1
        # New rows get the largest priority so far, those without a transition none.
        priority = torch.where(self._acted(start, stop), self._max_priority, 0.0)
        self._tree.set_range(start * self.length, priority)
        chunk = self._chunk_columns
        self._changed_chunks.update(range(start // chunk, (stop - 1) // chunk + 1))

    def _acted(self, start: int, stop: int) -> Tensor:
        """[rows] whether a transition begins there: not at LAST, ABORTED or what led to ABORTED."""
        step_type = self._arrays["step_type"][start:stop]
        return ((step_type[:, :-1] < _LAST) & (step_type[:, 1:] != _ABORTED)).flatten()

    @property
    @override
    def ready(self) -> bool:
        return self._due() > 0

    @property
    def ready_rows(self) -> int:
        """Rows in the ring."""
        return self._filled * self.length

    def sample(self, version: int, timeout_s: float) -> tuple[ReplayBatch | None, int]:
        """Sample, if an update is due; see Storage. Nothing is ever too old.

        On CUDA what the batch holds is overwritten by the next call.
        """
        self._draw.prepare(self._weighted_by())
        self._take.prepare({})
        with self._changed:
            if not self._changed.wait_for(lambda: self.ready, timeout_s):
                return None, 0
            enter("sample")
            with self.turns.take():
                self._await_prefetch()
                batch = self._prefetched or self._next_batch()
                if self.graphs.enabled and self._prefetches:
                    self._take({})
                    assert self._taken is not None
                    batch = self._taken
                self._updates += 1
                self._prefetched = self._prefetch() if self._prefetches else None
        return batch.fresh(), 0

    def _next_batch(self) -> ReplayBatch:
        """Draw a batch."""
        if self.device.type == "cuda" and self._config.prioritized:
            self._beta.fill_(self._beta_now)
        if not self.graphs.enabled:
            return self._sample()
        self._draw(self._weighted_by())
        assert self._drawn is not None
        return self._drawn

    def _weighted_by(self) -> dict[str, Tensor]:
        """What a captured draw reads beside the ring."""
        return {"beta": self._beta} if self._config.prioritized else {}

    @property
    def _beta_now(self) -> float:
        c = self._config
        return min(1.0, c.beta + (1 - c.beta) * self._updates / c.beta_updates)

    @torch.no_grad()
    def _draw_ahead(self, _: Mapping[str, Tensor]) -> Outputs:
        """Draw to the memory of drawn batches; captured."""
        batch = self._sample()
        if self._drawn is None:
            self._drawn = batch.lasting()
        else:
            self._drawn.copy_(batch)
        return {}

    @torch.no_grad()
    def _take_drawn(self, _: Mapping[str, Tensor]) -> Outputs:
        """Copy what was drawn to where it is learned from; captured."""
        assert self._drawn is not None
        if self._taken is None:
            self._taken = self._drawn.lasting()
        else:
            self._taken.copy_(self._drawn)
        return {}

    def _prefetch(self) -> ReplayBatch:
        """The next update's batch, drawn before this one's errors and the rows that come now."""
        if self._stream is None:
            return self._next_batch()
        self._before_draw.mark()
        with torch.cuda.stream(self._stream):
            self._before_draw.wait()
            batch = self._next_batch()
            self._after_draw.mark()
        return batch

    def _await_prefetch(self) -> None:
        """Let what the current stream does from here on come after the prefetch."""
        if self._prefetches:
            self._after_draw.wait()

    def done(self, batch: ReplayBatch) -> None:
        """Set new priorities, but for rows that were overwritten since.

        Where a row has none, no transition begins there now: it was overwritten while a checkpoint
        was written, after its batch had been saved. An error that is not finite sets none.
        """
        if self._config.prioritized:
            if batch.td_error is None:
                raise ValueError("a prioritized replay needs the algorithm to set td_error")
            error = batch.td_error.detach()
            if batch.error_memory is not None and batch.td_error is not batch.error_memory:
                error = batch.error_memory.copy_(error)
            given = {"td_error": error, "index": batch.index, "age": batch.age}
            if self._group.size > 1:
                given["largest"] = self._priorities(error)[1]
                self._group.largest_([given["largest"]])
            self._prioritise.prepare(given)
            with self._changed, self.turns.take():
                self._await_prefetch()
                self._prioritise(given)
        self.on_room()

    def _priorities(self, td_error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Priorities [B] of errors, the largest that is finite, and which ones are."""
        priority = (td_error + _MIN_PRIORITY) ** self._alpha
        finite = priority.isfinite()
        return priority, torch.where(finite, priority, 0.0).max(), finite

    @torch.no_grad()
    def _set_priorities(self, given: Mapping[str, Tensor]) -> Outputs:
        """Set those of a batch's rows; captured. The lock is held."""
        priority, largest, finite = self._priorities(given["td_error"])
        index = given["index"]
        same = self._age[index // self.length] == given["age"]
        kept = self._tree.leaves[index]
        changed = same & (kept > 0) & finite
        self._tree.set(index, torch.where(changed, priority, kept))
        largest = given.get("largest", largest)
        self._max_priority.copy_(torch.maximum(self._max_priority, largest))
        return {}

    @torch.no_grad()
    def _sample(self) -> ReplayBatch:
        """The lock is held."""
        c, length = self._config, self.length
        index, probability = self._tree.sample(c.batch_size, self._generator)
        column, t = index // length, index % length
        flat = {
            name: array.flatten(0, 1)
            for name, array in self._arrays.items()
            if name not in self._stacked
        }
        here = index + column  # columns have a row more than transitions
        reward, discount, there = self._returns(flat, here, t)
        arrays = {
            name: array.index_select(0, here)  # faster than array[here]
            for name, array in flat.items()
            if name not in ("reward", "discount", "step_type")
        }
        next_arrays = {
            name: array.index_select(0, there)
            for name, array in flat.items()
            if name.startswith(OBSERVATION)
        }
        if self._frames is not None:
            for name in self._stacked:
                image, kinds = self._arrays[name], flat["step_type"]
                arrays[name] = self._frames.stack_rows(image, kinds, here, t)
                after = t + there - here
                next_arrays[name] = self._frames.stack_rows(image, kinds, there, after)
        if c.prioritized:
            # A graph reads the power from the device.
            beta = self._beta if self.device.type == "cuda" else self._beta_now
            # (N P)^-beta over its maximum: N cancels. Schaul et al. 2016, section 3.4.
            weight = probability**-beta
            largest = weight.max()
            weight = weight / largest
        else:
            weight = torch.ones_like(probability)
            largest = weight[0]
        age = self._age[column]
        return ReplayBatch(
            arrays, next_arrays, reward, discount, weight, index, age, largest_weight=largest
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._changed, self.turns.take():
            state = {
                "columns": self._columns,
                "length": self.length,
                "inserted": self.inserted,
                "updates": self._updates,
                "rate": self._rate(),
                "first_burst": self._first_burst,
                "cursor": self._cursor,
                "filled": self._filled,
                "alpha": self._alpha,
                "priorities": self._tree.leaves[: self._filled * self.length].clone(),
                "max_priority": self._max_priority.clone(),
                "generator": self._generator.get_state(),
                "prefetched": self._saved_prefetch(),
            }
        return to_host(state)

    def _saved_prefetch(self) -> dict[str, Any] | None:
        """The batch drawn ahead: no other draw could give it again, for rows and errors came since.

        Ages restart with a resumed run: a row of the batch that was overwritten has none.
        """
        if self._prefetched is None:
            return None
        self._await_prefetch()
        batch = self._prefetched.fresh()
        same = self._age[batch.index // self.length] == batch.age
        batch.age = torch.where(same, 0, -1)
        return {name: x for name, x in vars(batch).items() if name != "error_memory"}

    def _rate(self) -> tuple[int, int, int]:
        """What the count of updates due follows from, beside the rows put."""
        c = self._config
        return max(c.start_rows, c.batch_size), c.update_interval, c.updates_per_interval

    @property
    def _alpha(self) -> float:
        """The power of errors that priorities are; without priorities 0: all rows alike."""
        return self._config.alpha if self._config.prioritized else 0.0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Storage.

        With another rate of updates a burst is due here, and the count continues from here. With
        another alpha priorities are what they would be, had it been so from the start.

        Raises:
            ConfigError: if the replay has another size than the one saved.
        """
        for name, here in (("columns", self._columns), ("length", self.length)):
            if state[name] != here:
                raise ConfigError(
                    f"the checkpoint's replay has {state[name]} {name}, this one {here}; resume "
                    "with the capacity_rows, capacity_bytes and unroll_steps it was saved with"
                )
        self.inserted, self._updates = state["inserted"], state["updates"]
        start, *_ = rate = self._rate()
        if state.get("rate", rate) == rate:  # older checkpoints lack it
            self._first_burst = state.get("first_burst", (start, 0))
        else:
            self._first_burst = max(start, self.inserted), self._updates
        self._cursor, self._filled = state["cursor"], state["filled"]
        alpha = state.get("alpha", self._alpha)  # older checkpoints lack it
        power = self._alpha / alpha if alpha else 0.0
        priorities = state["priorities"].to(self.device)
        self._tree.set_range(0, torch.where(priorities > 0, priorities**power, 0.0))
        self._max_priority.copy_(state["max_priority"] ** power)
        restore_generator(self._generator, state["generator"])
        self.graphs.reset()
        prefetched = state.get("prefetched")  # older checkpoints lack it, or have another shape
        shape = self._config.batch_size, self.spec.num_agents if self._mortal else 1
        drawn_alike = alpha == self._alpha
        if prefetched is not None and drawn_alike and prefetched["discount"].shape == shape:
            self._prefetched = ReplayBatch(**prefetched).to(self.device)
            if self.graphs.enabled:
                self._prefetched = self._drawn = self._prefetched.lasting()
        self._changed_chunks = set()

    def load_parts(self, parts: Sequence[SavedPart], rank: int, size: int) -> None:
        """See Storage: rows are dealt by age, and a burst of updates is due here."""
        state, arrays = deal(parts, rank, size, self._columns, self._chunk_columns)
        self.load_state_dict(state)
        if arrays:
            self.load_chunk(0, arrays)
        self._changed_chunks = set(range(-(-self._filled // self._chunk_columns)))

    def chunks(self) -> Mapping[int, Callable[[], dict[str, Tensor]]]:
        """See Storage: runs of columns."""
        with self._changed:
            changed, self._changed_chunks = self._changed_chunks, set()
        return {number: partial(self._chunk, number) for number in sorted(changed)}

    def _chunk(self, number: int) -> dict[str, Tensor]:
        start = number * self._chunk_columns
        with self._changed, self.turns.take():
            columns = slice(start, start + self._chunk_columns)
            copies = {name: array[columns].clone() for name, array in self._arrays.items()}
        return to_host(copies)

    @override
    def load_chunk(self, number: int, arrays: Mapping[str, Tensor]) -> None:
        start = number * self._chunk_columns
        stop = start + len(arrays["step_type"])
        for name, array in arrays.items():
            self._arrays[name][start:stop] = array.to(self.device)
        # Columns that were overwritten while the chunks were saved are newer than the priorities.
        priorities = self._tree.leaves[start * self.length : stop * self.length]
        priorities = torch.where(self._acted(start, stop), priorities, 0.0)
        self._tree.set_range(start * self.length, priorities)
