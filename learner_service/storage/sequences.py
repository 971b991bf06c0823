"""A replay of sequences, for networks that remember.

Kapturowski, Ostrovski, Quan, Munos, Dabney 2019, "Recurrent Experience Replay in Distributed
Reinforcement Learning" (R2D2), section 3: sequences of fixed length are kept together with the
recurrent state that acting had at their first step ("stored state"), and learned from as a whole.
"""

import torch

from learner_service.storage.replay import ReplayBatch, ReplayStorage
from shared.process.errors import ConfigError


class SequenceReplay(ReplayStorage):
    """Draws whole columns of the ring: unrolls, with the recurrent state at their first step.

    A batch's `arrays` are then [L + 1, S, ...], `memory` [1, S, A, H]; it has as many sequences S
    as make `batch_size` transitions. A column is drawn in proportion to its transitions.
    """

    def _require_options(self) -> None:
        """Refuse options of single transitions, beside those that ReplayStorage refuses."""
        c = self._config
        for name, value, only in (
            ("prioritized", c.prioritized, False),
            ("n_step", c.n_step, 1),
        ):
            if value != only:
                raise ConfigError(
                    f"{self._section}.{name}={str(value).lower()} is not supported with a "
                    f"recurrent network, which learns from whole sequences; set it to "
                    f"{str(only).lower()}"
                )
        if self._frames is not None:
            raise ConfigError(
                "network.frame_stack and network.recurrent cannot be combined with a replay; set "
                "one of them to its default"
            )
        super()._require_options()

    @torch.no_grad()
    def _sample(self) -> ReplayBatch:
        """Draw sequences; the lock is held."""
        sequences = max(1, round(self._config.batch_size / self.length))
        drawn, _ = self._tree.sample(sequences, self._generator)
        column = drawn // self.length
        arrays = {
            name: array.index_select(0, column).transpose(0, 1).contiguous()
            for name, array in self._arrays.items()
        }
        step = torch.arange(self.length, device=self.device).unsqueeze(1)
        index = (column * self.length + step).flatten()  # [L * S]
        age = self._age[column].repeat(self.length)
        none = index.new_zeros(0, dtype=torch.float32)
        return ReplayBatch(arrays, {}, none, none, none, index, age, largest_weight=none)
