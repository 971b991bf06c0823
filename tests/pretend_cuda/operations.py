"""Properties of ATen operations: views, allocations, synchronisations, arguments written."""

from dataclasses import dataclass
from typing import Any

import torch

_ALLOCATIONS = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
}
# The host needs the size of the result, or its value.
_SYNCS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "is_nonzero"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    *("repeat_interleave", "histc", "_linalg_check_errors", "multinomial_checked"),
}
# Operations without a kernel.
_MARKS = {"lift_fresh", "lift", "detach", "alias", "_unsafe_view", "_reshape_alias", "set_"}
# These refuse even a zero-dimensional tensor on the host; element-wise operations accept it.
_STRICT = {
    *("stack", "cat", "gather", "index_select", "index_add_", "index_copy_", "scatter_"),
    *("_fused_adam_", "_fused_adamw_", "_foreach_norm"),
    *("_amp_update_scale_", "_amp_foreach_non_finite_check_and_unscale_"),
}
# Most of the arithmetic; see pretend_cuda.
HEAVY = {
    "mm",
    "addmm",
    "_addmm_activation",
    "bmm",
    "baddbmm",
    "convolution",
    "convolution_backward",
}
# Tensors that one kernel of a fused optimiser reads at most.
_TENSORS_AT_ONCE = 36
TRANSFERS = {"copy_", "_to_copy", "_foreach_copy_"}
INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}


@dataclass(frozen=True)
class Operation:
    """Properties of an ATen operation.

    Attributes:
        name: without overload.
        free: launches no kernel: a view, an allocation or a mark.
        allocates: returns uninitialised memory.
        syncs: synchronises with the device.
        strict: refuses numbers on the host.
        composite: decomposes into others; is dispatched whole if autograd is off.
        writes: positions of the arguments that it writes to.
        writes_named: their names.
    """

    name: str
    free: bool
    allocates: bool
    syncs: bool
    strict: bool
    composite: bool
    writes: tuple[int, ...]
    writes_named: frozenset[str]


_known: dict[Any, Operation] = {}


def num_kernels(op: Operation, args: Any, kwargs: Any) -> int:
    """Estimate the kernels of an operation on CUDA, by torch's source.

    Not seen: what cuDNN and cuBLAS add for a layout or for a product split along its sum.
    """
    if op.name == "convolution":  # the bias is added apart
        return 1 + (args[2] is not None)
    if op.name == "convolution_backward":
        return sum(args[-1])
    if op.name in ("baddbmm", "addmm") and not op.writes:
        joined = op.name == "addmm" and args[0].dim() == 1  # a bias, added by cuBLASLt
        return 1 if joined else 2  # else the sum's first part is copied
    if op.name == "_foreach_norm":  # zeros, parts of norms, norms
        return 3
    lists = op.name in ("_foreach_div_", "_foreach_mul_") and isinstance(args[1], list | tuple)
    if lists and any(x.shape != y.shape for x, y in zip(args[0], args[1], strict=True)):
        return len(args[0])
    if op.name == "_fused_adam_":
        return -(-len(args[0]) // _TENSORS_AT_ONCE)
    return 1


def takes_gradient(op: Operation, args: Any) -> bool:
    """Whether this is autograd's copy of a gradient that torch itself would keep as it is.

    It sees references of Python to what it would else take over.
    """
    if op.name != "copy_" or torch._C._current_graph_task_id() < 0:
        return False
    node = torch._C._current_autograd_node()
    taken = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    return bool(taken and args[0].stride() == args[1].stride())


def operation(func: Any) -> Operation:
    """Properties of an OpOverload, cached."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _describe(func)
    return found


def _describe(func: Any) -> Operation:
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    written = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    view = not written and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    marks = namespace in ("profiler", "prim") or name in _MARKS
    marks |= torch.Tag.inplace_view in func.tags  # changes a shape, no content
    allocates = name in _ALLOCATIONS
    return Operation(
        name,
        view or marks or allocates,
        allocates,
        name in _SYNCS,
        name in _STRICT,
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        tuple(i for i, _ in written),
        frozenset(name for _, name in written),
    )
