"""On-policy updates on a GPU: CUDA graphs of the steps on a few minibatches each.

Their number does not depend on that of environments. Of larger graphs there would be fewer to
launch, and to capture one would take longer.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor
from typing_extensions import override

from murmur.learner_service.learning.fixed_shapes import FixedShapes
from murmur.learner_service.learning.on_policy import OnPolicyAlgorithm, Round


class GraphedAlgorithm(OnPolicyAlgorithm):
    """OnPolicyAlgorithm that captures its updates on a GPU. Used by the thread that learns."""

    # Of a stage: inputs and columns that it does not need.
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
        fixed.load(arrays, number)
        arrays = self._completed(arrays)
        words = fixed.pack(arrays)
        fixed.prepare(words)
        memory = arrays["memory"][0] if self.memory_size else None
        for names in rounds:
            seen = words
            for k in range(self._config.data_passes):
                if k and self.transforms.draws:
                    seen = fixed.pack(arrays, again=True)
                    fixed.add_columns(seen)
                for name in names:
                    for start in range(0, number, self._block):
                        given = fixed.gather(seen, memory, k, start)
                        self._call(self._steps_in_graphs[name], given)
            if names is not rounds[-1]:
                self._after_round_in_graphs(words, memory, number, names)
                fixed.add_columns(words)

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
