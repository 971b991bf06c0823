"""Finite, huge observations: clipped from statistics; updates that overflow are undone and said."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.loop import LastFinite
from murmur.learner_service.report import _largest_observation
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import (
    CPU,
    FIRST,
    MID,
    random_batch,
    random_transitions,
    row,
    vector_spec,
)
from tests.waiting import wait_until
from tests.wire import Client

SIZES = (1e5, 1e12, 1e18)
CASES = [
    ("mappo", "fp32"),
    ("qmix", "fp32"),
    *(
        pytest.param(name, precision, marks=pytest.mark.long)
        for name in ("mappo", "coma", "qmix", "masac", "maddpg")
        for precision in ("bf16", "fp16", "fp32")
    ),
]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_no_overflow_is_hidden(name: str, precision: str) -> None:
    """Where weights or momenta are not finite after an update, a scalar says so."""
    spec = vector_spec()
    options: dict[str, Any] = {"name": name, "max_grad_norm": 0}
    options |= {"batch_size": 64, "batch_number": 1} if name == "mappo" else {}
    network = PluginConfig(**{"name": "mlp", "hidden": (8,)})
    algorithm = build_algorithm(
        PluginConfig(**options), spec, network, Precision(precision, CPU), CPU, 3
    )
    last = LastFinite(algorithm)
    for size in SIZES:
        on_policy = name in ("mappo", "coma")
        batch: Any = random_batch(spec, 8, 8) if on_policy else random_transitions(spec, 64)
        if name == "mappo":
            batch.arrays["log_prob"] = torch.zeros(9, 8, 2)
        view = batch.arrays[OBSERVATION + "view"]
        view.view(-1, 2, 4)[9, 1, 2] = size
        last.keep()
        scalars = [*algorithm.update(batch).values(), last.total()]
        if all(math.isfinite(float(x)) for x in scalars):
            tensors = [*last._weights(), *last._momenta()]
            assert all(t.isfinite().all() for t in tensors if t.is_floating_point()), size
        last.restore()
        tensors = [*last._weights(), *last._momenta()]
        assert all(t.isfinite().all() for t in tensors if t.is_floating_point()), size
        text = _largest_observation(batch.arrays)
        assert text.startswith(f"; its largest observation is {size:g}, in 'view' at ["), text
        assert text.endswith("1, 2]")


def test_an_outlier_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = vector_spec()
    config = experiment(
        algorithm={"name": "mappo", "batch_size": 128, "batch_number": 1, "unroll_steps": 16},
        network={"normalize_observations": True},
        run={"max_updates": 4},
    )
    random = np.random.default_rng(0)
    with running_learner(tmp_path, config) as learner, Client(learner.port, spec, 4) as client:
        client.hello()
        for step in range(70):
            timestep = row(spec, 4, MID if step else FIRST)
            view = timestep.observation["view"]
            view[...] = random.normal(size=view.shape)
            if step in (9, 30):
                view[2, 1, 3] = 1e4
            client.exchange(timestep)
        counted = lambda: learner.metric("outliers_clipped_total", of="observation")  # noqa: E731
        wait_until(lambda: counted() == 2, lambda: str(counted()), 20)
    words = "observation 'view': 10000 of agent 1 at index [3] counts as "
    assert caplog.text.count(words) == 1, caplog.text
