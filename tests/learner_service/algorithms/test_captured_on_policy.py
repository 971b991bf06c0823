"""Captured on-policy updates equal eager ones bit for bit, also where nothing counts.

One graph of each step serves batches of any number of environments.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from murmur.learner_service.algorithms.coma import Coma
from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.cuda_graph import WARM_UP_CALLS
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.transform import Transforms
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ADJACENCY, ArraySpec
from murmur.shared.wire.timestep import StepType
from tests.learner_service.algorithms.test_captured_updates import tensors
from tests.learner_service.algorithms.test_contract import AGENTS, make_spec, rollout
from tests.learner_service.taped_graphs import taped
from tests.learner_service.toys import CPU

__all__ = ["taped"]
UPDATES = 50
_MAPPO = {
    "name": "mappo",
    "batch_size": 24,
    "batch_number": 2,
    "data_passes": 2,
    "anneal_updates": 40,
}
_COMA = {**_MAPPO, "name": "coma", "epsilon_env_steps": 500, "target_every_updates": 4}
_CLIPPED = {"clip_ratio": 0.2, "normalize_advantage": True, "entropy_weight": 0.01}
CASES: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "mappo": (make_spec("continuous"), {**_MAPPO, "share_parameters": False}, 0, "fp32"),
    "mappo-discrete-recurrent": (make_spec("masked"), _MAPPO, 4, "fp32"),
    "mappo-fp16": (make_spec("masked"), _MAPPO, 0, "fp16"),
    "ippo-trunk": (
        make_spec("masked"),
        {**_MAPPO, "centralized": False, "share_trunk": True},
        0,
        "fp32",
    ),
    "mappo-vtrace": (make_spec("masked"), {**_MAPPO, "vtrace_clip": 1.0}, 4, "fp32"),
    "coma": (make_spec("masked"), {**_COMA, **_CLIPPED}, 0, "fp32"),
    "coma-recurrent": (
        make_spec("masked"),
        {**_COMA, "target_update": "soft", "advantage": "return"},
        4,
        "fp32",
    ),
    "coma-bf16": (make_spec("masked"), _COMA, 0, "bf16"),
    "happo": (make_spec("masked"), {**_MAPPO, "name": "happo"}, 0, "fp32"),
    "happo-recurrent": (make_spec("continuous"), {**_MAPPO, "name": "happo"}, 4, "fp32"),
    "happo-augmented": (make_spec("masked"), {**_MAPPO, "name": "happo"}, 0, "fp32"),
    "mappo-graph": (
        replace(
            make_spec("masked"),
            observations=(
                *make_spec("masked").observations,
                ArraySpec(ADJACENCY, "uint8", (AGENTS,)),
                ArraySpec("foes", "float32", (2, 3)),
            ),
        ),
        _MAPPO,
        0,
        "fp32",
    ),
    "mappo-augmented": (make_spec("masked"), {**_MAPPO, "data_passes": 3}, 0, "fp32"),
    "coma-augmented-recurrent": (make_spec("masked"), {**_COMA, "data_passes": 3}, 4, "fp32"),
}


LONG = CASES.keys() - {"mappo", "mappo-discrete-recurrent", "coma"}


class Rotated(Augment):
    """Rotates what is seen by a random number of places, each row for itself."""

    def __call__(
        self, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        view = batch[OBSERVATION + "view"]
        width = view.shape[-1]
        by = torch.randint(width, (len(view),), generator=generator, device=view.device)
        at = (torch.arange(width, device=view.device) + by.unsqueeze(1)) % width
        at = at.view(-1, *(1,) * (view.dim() - 2), width).expand_as(view)
        return {**batch, OBSERVATION + "view": view.gather(-1, at)}


def build(name: str, captured: bool) -> Algorithm[Any]:
    """The algorithm as it is on a GPU: no shape depends on what rows hold."""
    spec, options, width, precision = CASES[name]
    network = PluginConfig(name="mlp", hidden=(8,), recurrent=width)
    if "graph" in name:
        network = PluginConfig(
            name="attention", width=8, hidden=(8,), communication=True, recurrent=width
        )
    algorithm = build_algorithm(
        PluginConfig(**options), spec, network, Precision(precision, CPU), CPU, 5
    )
    assert isinstance(algorithm, Mappo | Coma)
    algorithm._static = True
    algorithm.graphs.enabled = captured
    if "augmented" in name:
        algorithm.transforms = Transforms((), Rotated())
    return algorithm


def wide(name: str, times: int) -> Batch:
    """A batch of other environments, and as many as `times` say: each has a shape of its own."""
    built, spec = build(name, False), CASES[name][0]
    parts = [rollout(built, spec, seed, (0, 1)) for seed in range(times, 2 * times + 1)]
    arrays = {k: torch.cat([part.arrays[k] for part in parts], 1) for k in parts[0].arrays}
    return Batch(arrays, [0] * arrays["step_type"].shape[1], times=1.0 + times)


def learned(
    name: str, captured: bool, batches: list[Batch]
) -> tuple[Algorithm[Any], list[dict[str, float]]]:
    """An algorithm after 50 updates, and what they returned."""
    algorithm, losses = build(name, captured), []
    for update in range(UPDATES):
        batch = batches[update % len(batches)]
        scalars = algorithm.update(Batch(dict(batch.arrays), batch.version, times=batch.times))
        losses.append({k: float(v) for k, v in scalars.items()})
    return algorithm, losses


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def test_fifty_captured_updates_equal_eager_ones(name: str) -> None:
    batches = [wide(name, seed) for seed in range(4)]
    batches[3].arrays["step_type"][1::2] = int(StepType.ABORTED)  # environments that fail at once
    captured, losses = learned(name, True, batches)
    eager, expected = learned(name, False, batches)
    assert losses == expected
    assert all(x == x for scalars in losses for x in scalars.values())
    ours, theirs = tensors(captured.state_dict()), tensors(eager.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert captured.counts == eager.counts
    graphs = captured.graphs
    # Of HAPPO's three agents each has steps and a ratio.
    assert sum(graphs.captures.values()) <= (9 if "happo" in name else 6)
    for step, captures in graphs.captures.items():
        assert graphs.eager_calls[step] == WARM_UP_CALLS * captures
        assert graphs.replays[step] >= UPDATES - WARM_UP_CALLS
    assert not graphs.fallbacks


@pytest.mark.parametrize("name", ["mappo", "coma"])
def test_a_static_update_in_which_nothing_counts_moves_no_weight(name: str) -> None:
    algorithm, spec = build(name, False), CASES[name][0]
    batches = [rollout(algorithm, spec, seed, (0, 1)) for seed in range(2)]
    algorithm.update(batches[0])  # momentum
    nets = [p for p in algorithm.parts.values() if isinstance(p, torch.nn.Module)]
    before = [w.clone() for net in nets for w in net.parameters()]
    batches[1].arrays["step_type"][1::2] = int(StepType.ABORTED)
    scalars = algorithm.update(batches[1])
    assert all(x.isfinite() for x in scalars.values())
    after = [w for net in nets for w in net.parameters()]
    if name == "coma":
        after = after[: len(before)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
