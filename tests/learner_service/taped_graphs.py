"""CUDA graphs without CUDA: a capture records operations, a replay executes them again.

As on a GPU a capture computes nothing that lasts, and a replay knows no Python: what was a number
on the host when the graph was captured is that number for ever. Collectives are exchanged by
replays alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class _Tape(TorchDispatchMode):
    """Executes operations, and remembers them and what they wrote over."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._known: dict[int, torch.UntypedStorage] = {}  # made since, or saved
        self._saved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # then operations made of others come whole
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        name, schema = func._schema.name.removeprefix("aten::"), func._schema
        if name == "_local_scalar_dense":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if func.namespace == "c10d":
            self.operations.append((func, args, kwargs, []))
            over: torch.futures.Future[None] = torch.futures.Future()
            over.set_result(None)
            return args[0], _create_work_from_future(over).boxed()
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        named = {a.name for a, w in zip(schema.arguments, written, strict=True) if w}
        changed = [a for a, w in zip(args, written, strict=False) if w]
        changed += [a for k, a in kwargs.items() if k in named]
        for tensor in _tensors(changed):
            self._save(tensor.untyped_storage())
        out = func(*args, **kwargs)
        made = [] if any(r.alias_info is not None for r in schema.returns) else _tensors(out)
        for tensor in made:
            storage = tensor.untyped_storage()
            self._known.setdefault(storage._cdata, storage)
        if name not in _ALLOCATIONS:
            self.operations.append((func, args, kwargs, made))
        return out

    def _save(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage
            self._saved.append((storage, storage.clone()))

    def undo(self) -> None:
        for storage, before in self._saved:
            storage.copy_(before)


class TapedGraph:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            out = func(*args, **kwargs)
            if func.namespace == "c10d":
                Work.unbox(out[1]).wait()
                continue
            for recorded, computed in zip(made, _tensors(out), strict=bool(made)):
                recorded.detach().copy_(computed)


class TapedCapture:
    """In place of torch.cuda.graph."""

    def __init__(self, graph: TapedGraph, **options: Any) -> None:
        self._graph, self._tape, self.options = graph, _Tape(), options

    def __enter__(self) -> Self:
        self._before = [(g, g.get_state()) for g in self._graph.generators]
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)
        self._tape.undo()
        self._graph.operations = self._tape.operations
        for generator, state in self._before:
            generator.set_state(state)


class _Stream:
    """In place of torch.cuda.Stream: everything is in order already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


@contextmanager
def taped_graphs(capture: type[TapedCapture] = TapedCapture) -> Iterator[None]:
    """Let torch.cuda's graphs be taped ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {
            "CUDAGraph": TapedGraph,
            "graph": capture,
            "graph_pool_handle": object,
            "Stream": _Stream,
            "stream": _on_stream,
            "current_stream": _Stream,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        yield


@pytest.fixture
def taped() -> Iterator[None]:
    """See taped_graphs."""
    with taped_graphs():
        yield
