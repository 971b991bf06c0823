"""Kernels of an update by its minibatches, of presets on the pretended GPU."""

import pytest

from benchmarks._launch_counts import PRESETS, _config, count_update
from murmur.shared.config.plugins import resolve_plugin
from tests import pretend_cuda

_UPDATES = 6  # the last one is captured


@pytest.mark.parametrize(
    ("preset", "most"),
    [
        ("spread (MAPPO)", 76),
        pytest.param("snakes-greedy (MAPPO)", 77, marks=pytest.mark.long),
        pytest.param("formation (MAPPO)", 100, marks=pytest.mark.long),
        pytest.param("formation, recurrent 64 (MAPPO)", 495, marks=pytest.mark.long),
        pytest.param("terrain-reference (COMA)", 88, marks=pytest.mark.long),
        pytest.param("MASAC, formation, 2x256", 142, marks=pytest.mark.long),
    ],
)
def test_a_minibatch_takes_few_kernels(preset: str, most: int) -> None:
    name, changes = PRESETS[preset]
    config = _config(name, changes, "fp32")
    own, _ = count_update(pretend_cuda, config, _UPDATES)
    options = resolve_plugin("algorithm", config.algorithm).options
    minibatches = getattr(options, "batch_number", 1) * getattr(options, "data_passes", 1)
    assert own["kernels"] / minibatches <= most
    assert own["graphs"] > 0
