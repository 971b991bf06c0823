"""On-policy updates on a GPU: each stage is one CUDA graph of the steps on a block of minibatches.

An update replays it for each block, so the graphs do not depend on the number of environments.
Larger blocks would need fewer launches, but a longer capture. FixedShapes fills the buffers that
the graphs read.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor
from typing_extensions import override

from murmur.learner_service.learning.fixed_shapes import FixedShapes
from murmur.learner_service.learning.on_policy import OnPolicyAlgorithm, Round


class GraphedAlgorithm(OnPolicyAlgorithm):
    """Captures the updates of an OnPolicyAlgorithm on a GPU. Used by the thread that learns."""

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
