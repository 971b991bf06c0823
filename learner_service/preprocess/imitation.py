"""The end of imitation: later updates do not see what experts say."""

from typing import TypeVar

from typing_extensions import override

from learner_service.preprocess.transform import Transform
from learner_service.storage.rollout import Rollout
from learner_service.storage.storage import OBSERVATION, Batch
from shared.wire.spec import EXPERT_ACTION

B = TypeVar("B", bound=Batch)
_NOT_ASKED = -1


class EndImitation(Transform):
    """Hides experts' actions from updates after those of imitation: older rows may have some."""

    def __init__(self, updates: int) -> None:
        """Keep when imitation ends.

        Args:
            updates: number of updates that imitate.
        """
        self._updates = updates

    @override
    def batch(self, batch: B, updates: int) -> B:
        if updates >= self._updates and isinstance(batch, Rollout):
            batch.arrays[OBSERVATION + EXPERT_ACTION].fill_(_NOT_ASKED)
        return batch
