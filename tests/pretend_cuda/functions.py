"""Python calls that name, query or change a tensor's device."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .blocks import CPU, GPU, Block, attach, block_of
from .dispatch import accesses, copy, tensors_in
from .machine import Machine
from .report import Kind

T = Tensor
# On CUDA these run in float32 under autocast; the CPU's autocast leaves some of them alone.
_IN_FP32 = {
    *(torch.nn.functional.layer_norm, torch.layer_norm, torch.nn.functional.group_norm),
    *(torch.nn.functional.softmax, torch.softmax, T.softmax, torch.log_softmax, T.log_softmax),
    *(torch.nn.functional.log_softmax, torch.exp, T.exp, torch.log, T.log, torch.pow, T.pow),
    *(torch.nn.functional.softplus, torch.sum, T.sum, torch.cumsum, T.cumsum, T.rsqrt),
    *(torch.nn.functional.mse_loss, torch.nn.functional.smooth_l1_loss, torch.logsumexp),
}


class Functions(TorchFunctionMode):
    """The function mode of one thread."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._special = {
            T.device.__get__: lambda x: machine.device_of(x),  # type: ignore[attr-defined]
            T.is_cuda.__get__: lambda x: machine.device_of(x) == GPU,  # type: ignore[attr-defined]
            T.is_cpu.__get__: lambda x: machine.device_of(x) == CPU,  # type: ignore[attr-defined]
            T.get_device: lambda x: 0 if machine.device_of(x) == GPU else -1,
            T.is_pinned: self._is_pinned,
            T.pin_memory: self._pin_memory,
            T.cpu: lambda x, **_: self._move(x, CPU, False),
            T.cuda: lambda x, device=None, non_blocking=False, **_: self._move(
                x, GPU, non_blocking
            ),
            T.to: self._to,
            T.tolist: self._tolist,
            T.numpy: self._numpy,
            T.__deepcopy__: self._deepcopy,
            torch._C._nn.one_hot: self._one_hot,
            T.__repr__: self._repr,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        machine = self._machine
        if machine.local.quiet:
            return func(*args, **kwargs)
        special = self._special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self._check_generator(kwargs["generator"], args, kwargs)
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_full(x) for x in args)
            kwargs = {name: _full(x) for name, x in kwargs.items()}
        if "pin_memory" in kwargs or "device" in kwargs:
            return self._make(func, args, kwargs)
        return func(*args, **kwargs)

    # --- where tensors are made ----------------------------------------------------------------

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        machine = self._machine
        given, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        like = args[0] if args and isinstance(args[0], T) else None
        if given is None:
            device = CPU if like is None else machine.device_of(like)
        else:
            device = torch.device(given)
        if device.type != "cuda":
            if like is None or machine.device_of(like) == CPU:
                out = func(*args, **kwargs)
            else:
                with machine.quiet():
                    out = func(*args, **kwargs)
            return machine.pin(out) if pinned else out
        name = getattr(func, "__name__", str(func))
        from_host = name in ("tensor", "as_tensor", "asarray", "new_tensor")
        if from_host and like is not None:  # as_tensor of a tensor
            return self._to(like, device=device, dtype=kwargs.get("dtype"))
        with machine.quiet():
            out = func(*args, **kwargs)
        self.born(func, args, kwargs, out, name, from_host=from_host)
        return out

    def born(
        self, func: Any, args: Any, kwargs: Any, out: Tensor, name: str, *, from_host: bool
    ) -> None:
        """Record a tensor made on the device by a factory function."""
        machine = self._machine
        block = machine.allocate(out)
        tape = machine.local.tape
        if tape is not None:
            tape.made(out, block)
        if name.startswith(("empty", "new_empty")):
            return
        machine.count(name)
        machine.issue(name, [], accesses([out]))
        if from_host:
            machine.host_knows(machine.lane.clock, f"copy to the device: torch.{name}")
        elif tape is not None:
            tape.record(lambda: func(*args, **kwargs), [out])

    # --- from one place to another ---------------------------------------------------------------

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copies = kwargs.pop("copy", False)
        machine = self._machine
        here = machine.device_of(x)
        if args and isinstance(args[0], T):
            other = args[0]
            device, dtype = machine.device_of(other), other.dtype
            non_blocking = args[1] if len(args) > 1 else kwargs.get("non_blocking", False)
            memory_format = None
        else:
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != here.type:
            moved = self._move(x, CPU if device.type == "cpu" else GPU, non_blocking)
            return moved if dtype in (None, moved.dtype) else moved.to(dtype)
        more = {} if memory_format is None else {"memory_format": memory_format}
        return x.to(dtype=dtype or x.dtype, copy=copies, **more)

    def _move(self, x: Tensor, to: torch.device, non_blocking: bool) -> Tensor:
        machine = self._machine
        if machine.device_of(x).type == to.type:
            return x
        with machine.quiet():
            out = x.clone() if x.requires_grad else x.detach().clone()
        if to.type == "cuda":
            block = machine.allocate(out)
            if machine.local.tape is not None:
                machine.local.tape.made(out, block)
        elif non_blocking:
            machine.pin(out)
        else:
            attach(out, Block(CPU))
        copy(machine, out, x, non_blocking)
        if to.type == "cpu" and not non_blocking:
            del out.untyped_storage()._pretended  # type: ignore[attr-defined]
        return out

    def _tolist(self, x: Tensor) -> Any:
        return self._for_host(x, "tolist").tolist()

    def _numpy(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._machine.device_of(x) == GPU:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self._for_host(x, "numpy").numpy(*args, **kwargs)

    def _repr(self, x: Tensor, **kwargs: Any) -> str:
        with self._machine.quiet():
            return x.__repr__(**kwargs)

    def _for_host(self, x: Tensor, what: str) -> Tensor:
        block = block_of(x)
        if block is None:
            return x
        machine = self._machine
        if block.device == GPU:
            machine.count("copy_")
            machine.issue(what, accesses([x]), [])
            machine.host_knows(machine.lane.clock, what)
        elif block.copies:
            machine.touch_host(x, writes=False)
        return x

    # --- what is asked of tensors -----------------------------------------------------------------

    def _is_pinned(self, x: Tensor, *_: Any, **__: Any) -> bool:
        block = block_of(x)
        return block is not None and block.pinned

    def _pin_memory(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if self._is_pinned(x):
            return x
        with self._machine.quiet():
            return self._machine.pin(x.clone())

    def _deepcopy(self, x: Tensor, memo: Any) -> Any:
        block = block_of(x)
        known = id(x) in memo
        with self._machine.quiet():
            out = x.__deepcopy__(memo)
        if block is None or known:
            return out
        if block.device == CPU:
            return self._machine.pin(out)
        self._machine.allocate(out)
        self._machine.count("clone")
        self._machine.issue("clone", accesses([x]), accesses([out]))
        return out

    def _one_hot(self, x: Tensor, num_classes: int = -1) -> Tensor:
        """As CUDA's, which reads no value if the number of classes is given; the CPU's does."""
        if self._machine.device_of(x) == CPU or num_classes < 0:
            return torch._C._nn.one_hot(x, num_classes)
        how = {"dtype": torch.long, "device": GPU}
        made: Tensor = self._make(torch.zeros, (*x.shape, num_classes), how)
        with torch.no_grad():
            return made.scatter_(-1, x.unsqueeze(-1), 1)

    def _check_generator(self, generator: Any, args: Any, kwargs: Any) -> None:
        machine = self._machine
        at = getattr(generator, "at", CPU)
        own = tensors_in(args)
        device = machine.device_of(own[0]) if own else torch.device(kwargs.get("device") or CPU)
        if at.type != device.type:
            machine.report.fault(Kind.MIX, f"a generator of {at.type} for {device.type}")
        tape = machine.local.tape
        if tape is not None and not any(g is generator for g in tape.generators):
            machine.illegal("a generator that the graph does not know")


def _full(x: Any) -> Any:
    half = isinstance(x, T) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if half else x
