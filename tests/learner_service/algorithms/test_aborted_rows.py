"""Nothing is learned from the step into an aborted row, nor from the row itself."""

import pytest
import torch

from murmur.learner_service.algorithms.coma import Coma
from murmur.learner_service.algorithms.coma import Config as ComaConfig
from murmur.learner_service.algorithms.mappo import Config as MappoConfig
from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from tests.learner_service.toys import ABORTED, CPU, FIRST, clone, random_batch, vector_spec

SPEC = vector_spec()


def algorithm(name: str) -> Algorithm:
    network, precision = PluginConfig(name="mlp", hidden=(8,)), Precision("fp32", CPU)
    if name == "coma":
        return Coma(ComaConfig(), SPEC, network, precision, CPU, 3)
    return Mappo(MappoConfig(), SPEC, network, precision, CPU, 3)


def with_failures() -> tuple[Batch, torch.Tensor]:
    """A batch with an aborted row in each environment; [L + 1, B] where they are."""
    batch = random_batch(SPEC, 9, 4)
    kinds = batch.arrays["step_type"]
    aborted = torch.zeros_like(kinds, dtype=torch.bool)
    for env, t in enumerate((3, 4, 5, 9)):
        kinds[t, env] = ABORTED
        aborted[t, env] = True
        if t < 9:
            kinds[t + 1, env] = FIRST
    kinds[6:, 1] = ABORTED  # of a session that ended
    aborted[6:, 1] = True
    batch.arrays["log_prob"] = torch.zeros(10, 4, 2)
    return batch, aborted


@pytest.mark.parametrize("name", ["coma", "mappo"])
def test_what_aborted_rows_hold_changes_nothing(name: str) -> None:
    plain, aborted = with_failures()
    other = clone(plain)
    for key, array in other.arrays.items():
        if key.startswith(OBSERVATION) or key in ("reward", "discount"):
            array[aborted] = 0 if key == "discount" else 7
        elif key == "action":
            array[aborted] = 2
    assert not torch.equal(plain.arrays["reward"], other.arrays["reward"])
    losses = []
    for batch in (plain, other):
        losses.append(algorithm(name).update(batch))
    assert losses[0].keys() == losses[1].keys()
    for key, value in losses[0].items():
        torch.testing.assert_close(value, losses[1][key], rtol=0, atol=0, msg=key)
