"""An on-policy update on a GPU, in graphs whose shapes do not depend on the number of environments.

1. `load` copies the small arrays of a batch, one number or a few of each row, to buffers with room
   for more rows than any batch has; what counts of them is in `numbers`, on the device.
2. `pack` feeds blocks of rows of one size to the networks, and keeps what minibatches are gathered
   from, all arrays side by side: see `packed`. One graph.
3. `prepare` computes returns, weights and the order of all passes in those buffers. One graph.
4. `gather` copies the rows of a block of minibatches to where the graphs of steps read them.

What is padded has weight 0. Room for rows and environments is a power of two, at least `_HEADROOM`
times what the first batch has; a batch with more doubles it, and what depends on it is captured
again: `prepare` alone.

Arrays lie side by side in one of float32 numbers, so that one launch gathers rows of all of them;
what are no such numbers is kept as its bits, bytes by fours.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Captured, Outputs, copy_by_type
from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.learning.minibatches import Pass, shares
from murmur.learner_service.learning.on_policy import OnPolicyAlgorithm, Round
from murmur.learner_service.storage.flight import LEAST_STEPS, MOST_STEPS
from murmur.learner_service.storage.rollout import Rollout
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, TURN_MASK, Discrete, action_factors
from murmur.shared.wire.timestep import StepType

_WORD = 4  # bytes
_HEADROOM = 4
_TEMPORARIES = 24  # arrays of `prepare` that live at once in its pool, of one number of each agent
_FLAT, _VALUE, _ROW, _BLOCK = "flat/", "value/", "row/", "block/"
_WORDS = "words"
_MASKS = (OBSERVATION + AGENT_MASK, OBSERVATION + TURN_MASK)
_SMALL = ("reward", "discount", "step_type", "log_prob", *_MASKS)
_COUNTED, _FIRST = "weight", "first"
Arrays = Mapping[str, Tensor]


class GraphedAlgorithm(OnPolicyAlgorithm):
    """Captures each stage of an update on a GPU: the steps on a block of minibatches as one graph.

    An update replays it for each block, so the graphs do not depend on the number of environments.
    Larger blocks would need fewer launches, but a longer capture. Used by the thread that learns.
    """

    # stage -> inputs and columns that its steps do not read
    _unused: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @override
    def _prepare(self) -> None:
        super()._prepare()
        self._fixed = FixedShapes(self, self._columns)
        self._steps_in_graphs = {
            name: self._fixed.capture_steps(name, step, self._unused.get(name, ()))
            for name, step in self._each_stage.items()
        }

    @override
    def _learn_in_graphs(self, arrays: dict[str, Tensor], number: int) -> None:
        fixed, rounds = self._fixed, self._rounds()
        # 1. Inputs, values, returns, weights and the order of all passes: `_rows` and `shuffled`.
        fixed.load(arrays, number)
        arrays = self._completed(arrays)
        words = fixed.pack(arrays)
        fixed.prepare(words)
        memory = arrays["memory"][0] if self.memory_size else None
        # 2. Steps, one replay for each block of minibatches.
        for names in rounds:
            seen = words
            for k in range(self._config.data_passes):
                if k and self.transforms.draws:  # each pass but the first sees other changes
                    seen = fixed.pack(arrays, again=True)
                    fixed.add_columns(seen)
                for name in names:
                    for start in range(0, number, self._block):
                        given = fixed.gather(seen, memory, k, start)
                        self._call(self._steps_in_graphs[name], given)
            if names is not rounds[-1]:
                self._after_round_in_graphs(words, memory, number, names)
                fixed.add_columns(words)

    def _completed(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arrays of a batch; an algorithm may add some."""
        return arrays

    def _after_round_in_graphs(
        self, words: Tensor, memory: Tensor | None, number: int, names: Round
    ) -> None:
        """Change the columns of FixedShapes as `_after_round` changes those of rows.

        Args:
            words: [R, A, W] rows as the first pass has them.
            memory: [B, A, Z] recurrent state of the policy before the first row, or None.
            number: number of minibatches.
            names: stages of the round that has just ended.
        """

    @override
    def graph_bytes(self, rows: int) -> float:
        return self._fixed.expected_bytes(rows)


class Part(NamedTuple):
    """Position of an array in a row.

    Attributes:
        name: name of the array.
        start: first number.
        stop: last number + 1.
        shape: shape of one agent's row.
        dtype: data type of the array.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = tuple[Part, ...]


def packed(arrays: Mapping[str, Tensor], spare: int = 0) -> tuple[Layout, Tensor]:
    """Lay arrays side by side.

    Args:
        arrays: name -> [R, A, ...].
        spare: numbers of each agent's row to leave free at the end.

    Returns:
        where each is, and [R, A, W + spare].
    """
    parts: list[Tensor] = []
    layout, start = [], 0
    for name, x in arrays.items():
        part = _as_words(x)
        stop = start + part.shape[-1]
        layout.append(Part(name, start, stop, tuple(x.shape[2:]), x.dtype))
        parts.append(part)
        start = stop
    if spare:
        parts.append(parts[0].new_zeros((*parts[0].shape[:2], spare)))
    return tuple(layout), torch.cat(parts, -1)


def unpacked(layout: Layout, words: Tensor) -> dict[str, Tensor]:
    """Take apart what `packed` laid side by side: name -> [R, A, ...], of integers copies."""
    found = {}
    for name, start, stop, shape, dtype in layout:
        x = words[..., start:stop]
        if dtype.itemsize == 1:
            x = x.view(torch.uint8)[..., : math.prod(shape)].view(dtype)
        elif not dtype.is_floating_point:
            x = x.view(torch.int32).to(dtype)
        found[name] = x.reshape(*x.shape[:2], *shape).to(dtype)
    return found


def _as_words(x: Tensor) -> Tensor:
    """[R, A, F] float32."""
    numbers = x.unsqueeze(-1).flatten(2)
    if x.dtype.is_floating_point:
        return numbers.float()
    if x.element_size() > 1:
        return numbers.to(torch.int32).view(torch.float32)
    missing = -numbers.shape[-1] % _WORD
    numbers = numbers.view(torch.uint8)
    numbers = F.pad(numbers, (0, missing)) if missing else numbers.contiguous()
    return numbers.view(torch.float32)


class FixedShapes:
    """Buffers and graphs of one algorithm. Used by the thread that learns.

    Attributes:
        columns: names of the numbers that `prepare` finds for each row of an agent.
    """

    def __init__(self, algorithm: OnPolicyAlgorithm, columns: tuple[str, ...]) -> None:
        """Make and capture nothing yet.

        Args:
            algorithm: algorithm with the updates to capture.
            columns: names of the columns that its `_learnable` returns, in any order.
        """
        self._algorithm = algorithm
        remembers = (_FIRST,) if algorithm.memory_size else ()
        self.columns = (*columns, _COUNTED, *remembers)
        self._pack = algorithm._capture("rows", self._of_rows, in_place=True)
        self._prepare = algorithm._capture("prepare", self._prepared, in_place=True)
        self._buffers: dict[str, Tensor] = {}
        self._layout: Layout = ()
        self._layout_of_last: Layout = ()
        self._steps = 0
        self._envs = 0
        self._rows = 0  # there is room for
        self._now = (0, 0)  # rows of the unrolls, and environments, of the batch
        self._numbers = (0, 0, 0, 0)  # what the buffer holds
        self._loaded: object = None  # which block is in the buffers

    def capture_steps(
        self, name: str, step: Callable[[Pass], None], without: Container[str] = ()
    ) -> Captured:
        """Capture steps on the minibatches of a block, gathered by `gather`; see `of_block`."""

        def on_block(given: Arrays) -> Outputs:
            step(self.of_block(given, without))
            return {}

        return self._algorithm._capture(name, on_block, in_place=True)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer of this name; a graph may read it until its shape changes."""
        found = self._buffers.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            found = torch.zeros(shape, dtype=dtype, device=self._algorithm._device)
            self._buffers[name] = found
        return found

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the buffers with names that begin with `prefix`."""
        return {name: x for name, x in self._buffers.items() if name.startswith(prefix)}

    def expected_bytes(self, rows: int) -> float:
        """Estimate the memory of buffers, of packed rows and of the graphs' pool, bytes.

        Args:
            rows: joint rows of an update, unrolls' last ones included.
        """
        algorithm, agents = self._algorithm, self._algorithm._spec.num_agents
        seen = sum(
            math.prod(o.shape) * (agents if o.per_agent else 1) * np.dtype(o.dtype).itemsize
            for o in algorithm._spec.observations
        )
        fed = algorithm._actor_inputs, algorithm._critic_inputs
        numbers = sum(math.prod(of.shape.image or (0,)) + of.shape.vector for of in fed)
        spec = algorithm._spec.action
        # Of a mask what follows from it: two numbers of each action.
        actions = 8 * sum(action_factors(spec))
        if not isinstance(spec, Discrete):
            actions += 4 * spec.size
        packed_row = agents * (4 * (numbers + len(self.columns)) + actions)
        minibatch = algorithm._config.batch_size / algorithm._spec.acting_agents * (1 + 1 / 16)
        in_block = minibatch * algorithm._block
        at_once = 2 * minibatch if algorithm.memory_size else algorithm._rows_at_once
        # Arrays of one number of each agent: columns and values; order of the passes; in the pool.
        passes = algorithm._config.data_passes
        small = agents * (4 * (len(self.columns) + 4) + 16 * passes + 4 * _TEMPORARIES)
        found = small * _room_for(rows) + packed_row * rows
        # What a graph of steps or of rows is fed is there twice more: unpacked, and as inputs.
        return found + 3 * packed_row * in_block + (seen + 3 * packed_row) * at_once

    # --- 1. small arrays ----------------------------------------------------------------------

    def load(self, arrays: Arrays, number: int) -> None:
        """Copy the small arrays of a batch.

        Args:
            arrays: arrays of the batch by name, [T, B, ...].
            number: number of minibatches in each pass.
        """
        steps, envs = arrays["step_type"].shape
        self._now = steps, envs
        self._make_room(steps, envs, number)
        group = self._algorithm._group
        skipped = group.rank * number // group.size
        numbers, before = (steps, envs, number, skipped), self._numbers
        # One launch: their values are arguments of its kernel.
        torch._foreach_add_(
            self.buffer("numbers", (len(numbers),), torch.int64).unbind(),
            [now - then for now, then in zip(numbers, before, strict=True)],
        )
        self._numbers = numbers
        small = {_FLAT + k: arrays[k].flatten(0, 1) for k in _SMALL if k in arrays}
        targets = {}
        for name, x in small.items():
            targets[name] = self.buffer(name, (self._rows, *x.shape[1:]), x.dtype)[: len(x)]
        copy_by_type(targets, small)
        self._loaded = None

    def _make_room(self, steps: int, envs: int, number: int) -> None:
        """Let the buffers hold a batch; ranks have the same room."""
        algorithm = self._algorithm
        dealt = number * algorithm._width  # places in minibatches, of units
        own = {"steps": steps, "rows": steps * envs, "envs": envs}
        if algorithm.memory_size:
            own["envs"] = max(envs, dealt // 2)
        else:
            own["rows"] = max(steps * envs, -(-dealt // (2 * self._spread)))
        wanted = {k: round(v) for k, v in algorithm._group.agree(own, "max").items()}
        if wanted["steps"] > self._steps:
            self._steps = self._most_steps(wanted["steps"])
        if wanted["rows"] > self._rows:
            self._rows = _room_for(wanted["rows"])
        if wanted["envs"] > self._envs:
            self._envs = _room_for(wanted["envs"])

    def _most_steps(self, steps: int) -> int:
        """Return the expected number of rows of the longest unroll, its last one included."""
        if self._algorithm.memory_size:  # `lengthened` has made it the longest
            return steps
        if configured := self._algorithm._config.unroll_steps:
            return max(steps, configured + 1)
        longest = min(MOST_STEPS, self._algorithm._spec.max_episode_steps or MOST_STEPS) + 1
        # Unrolls get longer when sessions are lost: others fill what an update wants.
        return max(2 * steps, longest + 1)

    @property
    def _spread(self) -> int:
        """Units of minibatches in a joint row."""
        return self._algorithm._spec.num_agents if self._algorithm._single else 1

    # --- 2. rows ------------------------------------------------------------------------------

    def pack(self, arrays: Arrays, *, again: bool = False) -> Tensor:
        """Pack the data of all rows, [R, A, W], to gather minibatches from; values go to buffers.

        Args:
            arrays: [T, B, ...] observations, actions, and what networks remembered.
            again: whether the pass is a later one: its rows are augmented, and their values known.
        """
        steps, envs = self._now
        words: Tensor | None = None
        for start, stop in self.blocks(_ROW, arrays, self._algorithm._rows_at_once):
            out = self._algorithm._call(self._pack, self.under(_ROW), again=again)
            targets = {}
            if words is None:
                words = out[_WORDS].new_empty((steps * envs, *out[_WORDS].shape[1:]))
            for name, x in out.items():
                whole = words
                if name != _WORDS:
                    shape = (self._rows, *x.shape[1:])
                    whole = self.buffer(name, shape, x.dtype)[: steps * envs]
                targets[name], out[name] = self._part_of(whole, x, start, stop)
            copy_by_type(targets, out)
        assert words is not None
        return words

    def _part_of(self, whole: Tensor, x: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the place of a block's rows in the whole, and the rows without padding."""
        if not self._algorithm.memory_size:
            return whole[start:stop], x[: stop - start]
        steps, envs = self._now
        own = x.view(steps, -1, *x.shape[1:])[:, : stop - start]
        return whole.view(steps, envs, *x.shape[1:])[:, start:stop], own

    def blocks(self, prefix: str, arrays: Arrays, size: int) -> Iterator[tuple[int, int]]:
        """Copy rows to buffers, block by block; what is beyond the last ones stays as it was.

        Args:
            prefix: prefix of the buffers' names.
            arrays: [T, B, ...], "memory" [1, B, ...].
            size: joint rows of a block, or environments with memory.

        Yields:
            where the block begins, and ends, among rows, or environments with memory.
        """
        remembers = bool(self._algorithm.memory_size)
        own: tuple[str, ...] = ("memory", "step_type") if remembers else ()
        own += ("raw_action" if "raw_action" in arrays else "action",)
        given = {prefix + k: x for k, x in arrays.items() if k in own or k.startswith(OBSERVATION)}
        if not remembers:
            given = {k: x.flatten(0, 1) for k, x in given.items()}
        axis = int(remembers)  # 0: rows; 1: environments, after time
        count = next(iter(given.values())).shape[axis]
        for start in range(0, count, size):
            stop = min(start + size, count)
            targets, sources = {}, {}
            for name, x in given.items():
                shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
                targets[name] = self.buffer(name, shape, x.dtype).narrow(axis, 0, stop - start)
                sources[name] = x.narrow(axis, start, stop - start)
            copy_by_type(targets, sources)
            yield start, stop

    def fed(self, given: Arrays) -> tuple[dict[str, Tensor], Tensor, RecurrentState | None]:
        """Return a block's observations [R, A, ...], actions and the policy's recurrent state."""
        flat = {k.partition("/")[2]: x for k, x in given.items()}
        memory, state = flat.pop("memory", None), None
        if memory is not None:
            state = RecurrentState(memory[0], flat["step_type"] == int(StepType.FIRST))
            flat = {k: x.flatten(0, 1) for k, x in flat.items()}
        obs = {k.removeprefix(OBSERVATION): x for k, x in flat.items() if k.startswith(OBSERVATION)}
        action = flat["raw_action" if "raw_action" in flat else "action"]
        return obs, action if action.is_floating_point() else action.long(), state

    def last_rows(self, prefix: str, arrays: Arrays, last: Tensor) -> Iterator[tuple[int, int]]:
        """Copy what unrolls' last rows show to buffers, block by block; see `blocks`.

        Args:
            prefix: prefix of the buffers' names.
            arrays: arrays by name, as `pack` takes them.
            last: [B] numbers of the rows, time outermost; with memory all rows are fed.
        """
        if self._algorithm.memory_size:
            yield from self.blocks(prefix, arrays, self._algorithm._width)
            return
        seen = {k: x.flatten(0, 1) for k, x in arrays.items() if k.startswith(OBSERVATION)}
        self._layout_of_last, words = packed({k: x.unsqueeze(1) for k, x in seen.items()})
        size = -(-self._algorithm._rows_at_once // LEAST_STEPS)
        for start in range(0, len(last), size):
            index = last[start : start + size]
            self.select(prefix + _WORDS, words, index, size)
            yield start, start + len(index)

    def fed_last(self, given: Arrays) -> tuple[dict[str, Tensor], RecurrentState | None]:
        """Return observations of a block of `last_rows`, and the policy's recurrent state."""
        if self._algorithm.memory_size:
            obs, _, state = self.fed(given)
            return obs, state
        (words,) = given.values()
        rows = unpacked(self._layout_of_last, words)
        return {k.removeprefix(OBSERVATION): x.squeeze(1) for k, x in rows.items()}, None

    @torch.no_grad()
    def _of_rows(self, given: Arrays, *, again: bool) -> Outputs:
        """Feed a block of `pack` to the networks and pack its rows; may be captured."""
        algorithm = self._algorithm
        obs, action, state = self.fed(given)
        values = {}
        if again:
            obs, action = algorithm.redrawn(obs, action, state)
        inputs, columns = algorithm._inputs_and_columns(obs, action)
        if not again:
            values = algorithm._values_of_rows(inputs, _both(state), action, obs)
        arrays = _named_inputs("actor", inputs[0])
        if inputs[1] is not inputs[0]:
            arrays |= _named_inputs("critic", inputs[1])
        self._layout, words = packed(arrays | columns, len(self.columns))
        return {_WORDS: words} | {_VALUE + name: x for name, x in values.items()}

    # --- 3. returns, weights, order ---------------------------------------------------------------

    def prepare(self, words: Tensor) -> None:
        """Find returns, weights and the order of all passes; what `pack` gave gets the columns."""
        algorithm = self._algorithm
        places = 2 * (self._envs if algorithm.memory_size else self._rows * self._spread)
        width = algorithm._width
        places = (-(-places // width) + algorithm._block) * width
        passes, agents = algorithm._config.data_passes, algorithm._spec.num_agents
        self.buffer("order", (passes, places), torch.int64)
        if algorithm.memory_size:
            of_envs = passes, places * (self._steps - 1)
            self.buffer("rows", of_envs, torch.int64)
        self.buffer("columns", (self._rows, agents, len(self.columns)), torch.float32)
        given = self.under(_FLAT) | self.under(_VALUE)
        given |= {
            k: x for k, x in self._buffers.items() if k in ("numbers", "order", "rows", "columns")
        }
        algorithm._call(self._prepare, given, steps=self._steps, envs=self._envs)
        self.add_columns(words)

    def add_columns(self, words: Tensor) -> None:
        """Copy the columns of `prepare` to where rows are gathered from."""
        words[..., -len(self.columns) :].copy_(self._buffers["columns"][: len(words)])
        self._loaded = None

    def scale_column(self, name: str, start: int, factor: Tensor) -> None:
        """Multiply a column of `prepare`, in the rows of a block of the first pass's minibatches.

        Args:
            name: name of the column.
            start: first minibatch of the block.
            factor: [rows of the block, 1] numbers to multiply by, 1 in rows of padding.
        """
        index = self._index(0, start)[0]
        column = self._buffers["columns"][..., self.columns.index(name)]
        column.index_copy_(0, index, column.index_select(0, index) * factor)

    @torch.no_grad()
    def _prepared(self, given: Arrays, *, steps: int, envs: int) -> Outputs:
        """Find returns, weights and orders for `prepare`; may be captured."""
        algorithm, device = self._algorithm, self._algorithm._device
        t1, b, _, _ = numbers = given["numbers"].unbind()
        # Rows [steps, envs] of rows as they come, one behind the other, time outermost.
        t, e = torch.arange(steps, device=device).unsqueeze(1), torch.arange(envs, device=device)
        inside = (t < t1) & (e < b)
        at = (t * b + e).where(inside, 0).flatten()

        def spread(x: Tensor, fill: int = 0) -> Tensor:
            x = x.index_select(0, at).view(steps, envs, *x.shape[1:])
            return x.where(inside.view(steps, envs, *(1,) * (x.dim() - 2)), fill)

        arrays = {
            k.removeprefix(_FLAT): spread(x, int(StepType.ABORTED) if "step_type" in k else 0)
            for k, x in given.items()
            if k.startswith(_FLAT)
        }
        values = {
            k.removeprefix(_VALUE): spread(x) for k, x in given.items() if k.startswith(_VALUE)
        }
        columns, weight, batch_scalars = algorithm._learnable(
            Rollout(arrays, []), values, (t1 - 1) * b
        )
        algorithm._batch_scalars.copy_(batch_scalars)
        algorithm._total.zero_()
        columns = {**columns, _COUNTED: weight}
        if _FIRST in self.columns:
            first = (arrays["step_type"][:-1] == int(StepType.FIRST)).float()
            columns[_FIRST] = first.unsqueeze(-1).expand_as(weight)
        found = torch.stack([columns[name] for name in self.columns], -1)  # [T - 1, B, A, C]
        # Back to rows as they come; those of the last time have no transition: weight 0.
        rows = len(given["columns"])
        q = torch.arange(rows, device=device)
        t_of = q // b
        at = (t_of * envs + q - t_of * b).clamp_max((steps - 1) * envs - 1)
        compact = found.flatten(0, 1).index_select(0, at)
        compact = compact.where((q < (t1 - 1) * b).view(-1, 1, 1), 0.0)
        given["columns"].copy_(compact)
        if algorithm.memory_size:
            counted = weight.amax((0, 2)) > 0
        else:
            of_rows = compact[..., self.columns.index(_COUNTED)]
            counted = of_rows.flatten() > 0 if algorithm._single else of_rows.amax(1) > 0
        self._draw_order(given, numbers, counted, steps)
        return {}

    def _draw_order(
        self, given: Arrays, numbers: tuple[Tensor, ...], counted: Tensor, steps: int
    ) -> None:
        """Deal the units of each pass to minibatches like cards, those that count first.

        Places that get none have the row of weight 0 behind the last transition.

        Args:
            given: "order" [passes, places] of rows, or of environments with memory; "rows"
                [passes, places * L] then, of rows.
            numbers: time steps with the last, environments, minibatches, those without a unit of
                this rank in the first round.
            counted: [units] whether a unit counts.
            steps: number of time steps of the padded rows, as in `_prepared`.
        """
        t1, b, number, skipped = numbers
        device, width = counted.device, self._algorithm._width
        remembers, generator = bool(self._algorithm.memory_size), self._algorithm._generator
        place = torch.arange(given["order"].shape[1], device=device)
        dealt = dealt_to(place, width, number, skipped)
        known = (dealt >= 0) & (dealt < len(counted))
        dealt = dealt.clamp(0, len(counted) - 1)
        hidden = (~counted).to(torch.uint8)
        last = (t1 - 1) * b * self._spread
        units = b if remembers else last
        for k in range(len(given["order"])):
            order = torch.randperm(len(counted), device=device, generator=generator)
            order = order.index_select(0, hidden.index_select(0, order).sort(stable=True).indices)
            unit = order.index_select(0, dealt)
            of_this = known & (unit < units)
            given["order"][k].copy_(unit.where(of_this, 0 if remembers else last))
            if remembers:
                t = torch.arange(steps - 1, device=device).view(1, -1, 1)
                row = t * b + unit.view(-1, 1, width)  # [minibatches, L, width]
                given["rows"][k].copy_(row.where(of_this.view(-1, 1, width), last).flatten())

    # --- 4. minibatches -----------------------------------------------------------------------

    def gather(
        self, words: Tensor, memory: Tensor | None, number: int, start: int
    ) -> dict[str, Tensor]:
        """Copy the rows of a block of minibatches to where graphs of steps read them.

        Args:
            words: [R, A, W] result of `pack`.
            memory: [B, A, Z] recurrent state of the policy before the first row; None: it has none.
            number: index of the pass.
            start: first minibatch of the block.
        """
        algorithm = self._algorithm
        if self._loaded != (number, start):
            self._loaded = number, start
            index, units = self._index(number, start)
            if memory is not None:
                self.select(_BLOCK + "memory", memory, units)
            if algorithm._single:
                words = words.flatten(0, 1).unsqueeze(1)
            self.select(_BLOCK + _WORDS, words, index)
        return self.under(_BLOCK)

    def _index(self, number: int, start: int) -> tuple[Tensor, Tensor]:
        """Return the rows and the units of a block of minibatches; see `gather`."""
        width, block = self._algorithm._width, self._algorithm._block
        units = self._buffers["order"][number, start * width : (start + block) * width]
        if not self._algorithm.memory_size:
            return units, units
        length = self._steps - 1
        places = slice(start * width * length, (start + block) * width * length)
        return self._buffers["rows"][number, places], units

    def select(self, name: str, x: Tensor, index: Tensor, size: int = 0) -> None:
        """Copy some rows to the buffer of this name, of `size` rows; 0: as many as there are."""
        out = self.buffer(name, (size or len(index), *x.shape[1:]), x.dtype)
        torch.index_select(x, 0, index, out=out[: len(index)])

    def of_block(self, given: Arrays, without: Container[str] = ()) -> Pass:
        """Take the minibatches that were gathered as a pass of their own; may be captured.

        Args:
            given: buffers of the block by name.
            without: names of inputs and columns that are not needed.
        """
        algorithm = self._algorithm
        words, memory = given[_BLOCK + _WORDS], given.get(_BLOCK + "memory")
        found = unpacked(tuple(part for part in self._layout if part.name not in without), words)
        prepared = words[..., -len(self.columns) :]
        found |= {k: prepared[..., i] for i, k in enumerate(self.columns) if k not in without}
        weight, number = found.pop(_COUNTED), algorithm._block
        sharing = algorithm._sharing[:, :1] if algorithm._single else algorithm._sharing
        share, counts = shares(weight.view(number, -1, weight.shape[1]), sharing, algorithm._group)
        actor, critic = _inputs("actor", found), _inputs("critic", found)
        if critic.stored is None and critic.vector is None:
            critic = actor
        state = None
        if memory is not None:
            first = found.pop(_FIRST)  # [n * L * m, A]
            length = self._steps - 1
            begins = first[:, 0].view(number, length, -1).transpose(0, 1).flatten(1) > 0
            state = RecurrentState(memory, begins)
        rates = algorithm._schedule.rates(counts)
        return Pass(
            number, actor, critic, found, share, -share, counts, sharing, *_both(state), rates=rates
        )


def dealt_to(place: Tensor, width: int, number: Tensor | int, skipped: Tensor | int) -> Tensor:
    """Return the number in the pack of the unit that a place gets; less than 0: none.

    Args:
        place: number of the place; minibatches have theirs one behind the other.
        width: places of a minibatch.
        number: minibatches.
        skipped: minibatches, the first ones, that get nothing in the first round.
    """
    minibatch = place // width
    dealt = (place - minibatch * width) * number + minibatch - skipped
    return dealt.where(minibatch < number, -1)


def _both(state: RecurrentState | None) -> tuple[RecurrentState | None, RecurrentState | None]:
    """Return the recurrent states of policy and critic; see `recurrent_states`."""
    if state is None:
        return None, None
    return state, RecurrentState(torch.zeros_like(state.memory), state.first)


def _room_for(count: int) -> int:
    """Return the power of two that is at least `_HEADROOM` times `count`."""
    return 1 << math.ceil(math.log2(_HEADROOM * count))


def _inputs(name: str, found: dict[str, Tensor]) -> Inputs:
    """Take what `_named_inputs` named out of arrays; a layer reads it as it lies in memory."""
    stored, vector = (found.pop(f"{name}/{part}", None) for part in ("stored", "vector"))
    return Inputs(stored, vector).each(Tensor.contiguous)


def _named_inputs(name: str, inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs of a network by name."""
    parts = {f"{name}/stored": inputs.stored, f"{name}/vector": inputs.vector}
    return {k: x for k, x in parts.items() if x is not None}
