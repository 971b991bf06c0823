"""Memory is asked for before it is taken."""

import pytest
import torch

from learner_service.networks.building import build_network
from learner_service.networks.inputs import InputShape
from learner_service.runtime.memory import free_bytes, limited, require_room
from shared.config import PluginConfig
from shared.errors import SpecError
from tests.learner_service.toys import CPU


def test_what_does_not_fit_is_refused_with_both_figures() -> None:
    require_room(1, "a row", "observe less", CPU)
    with pytest.raises(SpecError, match=r"a row would take .* GiB; free on cpu: .* GiB; observe"):
        require_room(2 * free_bytes(CPU) + 2**40, "a row", "observe less", CPU)
    with limited(1.0):
        require_room(2**30, "a row", "observe less", CPU)
        with pytest.raises(SpecError, match=r"2\.0 GiB; learner\.memory_limit_gib allows 1\.0 GiB"):
            require_room(2**31, "a row", "observe less", CPU)


def test_a_network_is_weighed_before_it_is_built() -> None:
    config, before = PluginConfig(name="cnn"), torch.get_rng_state()
    with pytest.raises(SpecError, match=r"network 'cnn' for images \(1, 4000, 4000\).*weights"):
        build_network(config, InputShape((1, 4000, 4000), 0), 5)
    assert torch.equal(torch.get_rng_state(), before)
