"""A whole update as one CUDA graph: its kernels are launched together, not one by one from Python.

An update of small networks is some two hundred kernels of a few microseconds each; launched one by
one, most of the time goes by between them.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_WARM_UP_CALLS = 3  # optimiser states are made, libraries choose their kernels
CALLS_TO_CAPTURE = _WARM_UP_CALLS + 1


class CapturedUpdate:
    """Calls an update eagerly a few times, captures it, and from then on replays it.

    Every call is one real update. The update must take tensors of the same shapes each time, change
    its networks in place, and neither synchronise nor allocate anything that outlives it. Used by
    the learner thread.
    """

    def __init__(
        self,
        update: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        generator: torch.Generator,
    ) -> None:
        """Wrap an update.

        Args:
            update: from named tensors to named tensors.
            generator: on the device, where the update draws its random numbers from.
        """
        self._update, self._generator = update, generator
        self.forget()

    def forget(self) -> None:
        """Capture anew: what the update works on is not the same any more."""
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the update; the results are the caller's own."""
        self._calls += 1
        if self._calls <= _WARM_UP_CALLS:
            # On a stream of its own, as captures are: else what autograd remembers of the default
            # stream would be captured too.
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self._update(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return outputs
        if self._graph is None:
            self._capture(inputs)
        assert self._graph is not None
        torch._foreach_copy_([self._inputs[name] for name in inputs], list(inputs.values()))
        self._graph.replay()
        return {name: value.clone() for name, value in self._outputs.items()}

    def _capture(self, inputs: Mapping[str, Tensor]) -> None:
        """Record the kernels; nothing is computed yet."""
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(self._generator)
        # Other threads (acting) may use the device meanwhile; only this one must not synchronise.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = self._update(self._inputs)
