"""Checks and counts every ATen operation: device, stream, reads, writes, synchronisation."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .blocks import CPU, GPU, Access, Block, block_of
from .machine import Machine
from .operations import (
    HEAVY,
    INDEXING,
    TRANSFERS,
    Operation,
    num_kernels,
    operation,
    takes_gradient,
)
from .report import Kind


def tensors_in(found: Any) -> list[Tensor]:
    """All tensors in arguments or results, including lists and tuples of tensors."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, list | tuple):
        return [x for part in found for x in tensors_in(part)]
    return []


class Dispatch(TorchDispatchMode):
    """The dispatch mode of one thread."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every call goes through a wrapper of torch.compile's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        machine = self._machine
        if machine.local.quiet:
            return func(*args, **kwargs)
        op = operation(func)
        if op.composite:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        inputs = tensors_in(args) + (tensors_in(list(kwargs.values())) if kwargs else [])
        blocks = [block_of(x) for x in inputs]
        on_gpu = any(b is not None and b.device == GPU for b in blocks)
        if not inputs and torch._C._current_graph_task_id() >= 0:
            on_gpu = True  # made by C++ in a backward pass
        if not on_gpu:
            return self._on_host(func, op, args, kwargs, inputs, blocks)
        if op.name in TRANSFERS and not all(b is not None and b.device == GPU for b in blocks):
            return self._transfer(func, op, args, kwargs)
        self._check_places(op, inputs, blocks)
        out = self._on_device(func, op, args, kwargs, inputs)
        if self._waits(op, args, kwargs):
            machine.host_knows(machine.lane.clock, op.name)
        return out

    def _on_host(
        self,
        func: Any,
        op: Operation,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        blocks: list[Block | None],
    ) -> Any:
        if not op.free and any(b is not None and b.copies for b in blocks):
            written = _written(op, args, kwargs)
            for x in inputs:
                self._machine.touch_host(x, writes=any(x is w for w in written))
        return func(*args, **kwargs)

    def _check_places(
        self, op: Operation, inputs: list[Tensor], blocks: list[Block | None]
    ) -> None:
        machine = self._machine
        for x, block in zip(inputs, blocks, strict=True):
            if block is not None and block.device == GPU:
                continue
            if op.name in INDEXING and x.dim():
                machine.host_knows(machine.lane.clock, f"copy of an index to the device: {op.name}")
            elif x.dim() or op.strict:
                machine.report.fault(Kind.MIX, op.name)

    def _waits(self, op: Operation, args: Any, kwargs: Any) -> bool:
        """Whether the operation makes the host wait for the device."""
        machine = self._machine
        waits = op.syncs and not (
            op.name == "repeat_interleave" and kwargs.get("output_size") is not None
        )
        if op.name in INDEXING:
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
            value = args[2] if op.name != "index" and len(args) > 2 else None
            fills = value is not None and value.numel() == 1 and machine.device_of(value) == CPU
            waits |= bool(masks) and not fills
        return waits

    def _on_device(
        self,
        func: Any,
        op: Operation,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
    ) -> Any:
        machine = self._machine
        tape = machine.local.tape
        written = _written(op, args, kwargs)
        if tape is not None and written:
            tape.save(written)
        hollow = machine.hollow and op.name in HEAVY
        out = _zeros(func, args, kwargs) if hollow else func(*args, **kwargs)
        known = {x.untyped_storage()._cdata for x in inputs}
        outs = tensors_in(out)
        made: list[Tensor] = []
        for x in outs:
            if x.untyped_storage()._cdata not in known and block_of(x) is None:
                made.append(x)
                block = machine.allocate(x)
                if tape is not None:
                    tape.made(x, block)
        if op.free:
            return out
        if not takes_gradient(op, args):
            machine.count(op.name)
            if tape is not None:
                tape.nodes.append((op.name, num_kernels(op, args, kwargs)))
        machine.issue(op.name, accesses(inputs), accesses([*written, *made]))
        if tape is not None:
            # Aliases: the shape of a tensor may be changed in place later.
            given, named = aliases(args), {k: aliases(v) for k, v in kwargs.items()}
            tape.record(lambda: func(*given, **named), aliases(outs))
        return out

    def _transfer(self, func: Any, op: Operation, args: Any, kwargs: Any) -> Any:
        """A copy between host and device."""
        if op.name == "_foreach_copy_":
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            pairs = list(zip(args[0], args[1], strict=True))
            places = {tuple(map(self._machine.device_of, pair)) for pair in pairs}
            if len(places) > 1:
                self._machine.report.fault(Kind.MIX, "a list of tensors")
            for to, source in pairs:
                self._copy(to, source, non_blocking)
            return None
        if op.name == "_to_copy":  # of C++: a tensor of the host is wanted on the host
            return func(*args, **kwargs)
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        self._copy(args[0], args[1], non_blocking)
        return args[0]

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        machine = self._machine
        copy(machine, to, source, non_blocking)


def copy(machine: Machine, to: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Copy as Tensor.copy_ does, between host and device."""
    to_block, source_block = block_of(to), block_of(source)
    here = machine.device_of(to)
    if here == machine.device_of(source):
        to.copy_(source)
        return
    host = source_block if here == GPU else to_block
    pinned = host is not None and host.pinned
    tape = machine.local.tape
    machine.count("copy_")
    if tape is not None:
        tape.nodes.append(("copy_", 1))
        tape.save([to])
    if non_blocking and pinned:
        use = machine.issue("copy_", accesses([source]), accesses([to]))
        if tape is None:
            machine.transfer(to, source, use)
            return

        def again() -> Tensor:
            assert machine.local.replaying is not None
            machine.transfer(to, source, machine.local.replaying)
            return to

        tape.record(again, [to])
        with machine.quiet(), torch.no_grad():
            to.copy_(source)
        return
    machine.issue("copy_", accesses([source]), accesses([to]))
    if pinned:
        machine.touch_host(to if here == CPU else source, writes=here == CPU)
    if here == GPU and non_blocking:
        machine.illegal("copy of pageable memory")  # it is staged: the host continues
    else:
        way = "to the device" if here == GPU else "to the host"
        machine.host_knows(machine.lane.clock, f"copy {way}")
    with machine.quiet(), torch.no_grad():
        to.detach().copy_(source.detach())


def _zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros of the shapes that an operation returns."""

    def meta(found: Any) -> Any:
        if isinstance(found, list | tuple):
            return type(found)(meta(part) for part in found)
        return found.detach().to("meta") if isinstance(found, Tensor) else found

    def zeros(found: Any) -> Any:
        if isinstance(found, list | tuple):
            return type(found)(zeros(part) for part in found)
        if not isinstance(found, Tensor):
            return found
        return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype).zero_()

    return zeros(func(*meta(args), **{name: meta(value) for name, value in kwargs.items()}))


def aliases(found: Any) -> Any:
    """The same with an alias for each tensor."""
    if isinstance(found, Tensor):
        return found.detach()
    if isinstance(found, list | tuple):
        return type(found)(aliases(part) for part in found)
    return found


def accesses(tensors: list[Tensor]) -> list[Access]:
    """Spans of tensors, without those in pageable host memory."""
    return [at for x in tensors if (at := Access.of(x)) is not None]


def _written(op: Operation, args: Any, kwargs: Any) -> list[Tensor]:
    found = [x for i in op.writes if i < len(args) for x in tensors_in(args[i])]
    for name in op.writes_named:
        if name in kwargs:
            found += tensors_in(kwargs[name])
    return found
