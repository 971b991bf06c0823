"""Captured updates equal eager ones bit for bit: networks, optimisers, random numbers, the replay.

The pretended device replays a graph by executing the operations that were recorded, as a GPU would,
with the numbers of the host as they were then.
"""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.storage.replay import ReplayStorage
from murmur.learner_service.storage.storage import Unroll
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import AugmentConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
)
from tests.pretend_cuda import Kind, pretend_cuda

GPU = torch.device("cuda", 0)
FATAL = (Kind.GRAPH, Kind.POOL, Kind.RACE, Kind.MIX)
UPDATES, RESUMED_AT = 50, 25
QUICK = ("matd3", "masac-fp16", "qmix")
DISCRETE = EnvSpec(
    "masked",
    3,
    (
        ArraySpec("view", "float32", (4,)),
        ArraySpec(ACTION_MASK, "uint8", (3,)),
        ArraySpec(AGENT_MASK, "uint8", ()),
    ),
    Discrete(3),
    (),
    8,
)
IMAGES = EnvSpec("seen", 2, (ArraySpec("image", "uint8", (1, 36, 36)),), Discrete(3), (), 8)
CONTINUOUS = EnvSpec("smooth", 2, (ArraySpec("view", "float32", (4,)),), Continuous(2), (), 8)
REPLAY = {"capacity_rows": 256, "start_rows": 64, "batch_size": 16, "update_interval": 8}
PRIORITISED: dict[str, Any] = {**REPLAY, "prioritized": True}
BURSTS: dict[str, Any] = {**PRIORITISED, "n_step": 3, "updates_per_interval": 3}
MLP: dict[str, Any] = {"name": "mlp", "hidden": (8,)}
NATURE: dict[str, Any] = {"name": "nature", "hidden": (4,), "frame_stack": 3}
NETWORKS: dict[str, dict[str, Any]] = {
    "maddpg-stacked": NATURE,
    "qmix-sequences": {**MLP, "recurrent": 4},
    "masac-sequences": {**MLP, "recurrent": 4, "recurrent_cell": "lstm"},
    "matd3-sequences": {**MLP, "recurrent": 4},
    "masac-normalised": {**MLP, "normalize_observations": True},
}
AUGMENTS = {"maddpg-stacked": AugmentConfig(preset="random-shift")}
CASES: dict[str, tuple[EnvSpec, dict[str, Any], str]] = {
    "maddpg": (DISCRETE, {"name": "maddpg", "epsilon_start": 0.3}, "fp32"),
    "matd3": (
        CONTINUOUS,
        {"name": "maddpg", "twin_critics": True, "policy_delay": 2, "target_noise": 0.2},
        "fp32",
    ),
    "masac": (CONTINUOUS, {"name": "masac", "share_parameters": False}, "fp32"),
    "masac-discrete": (DISCRETE, {"name": "masac"}, "fp32"),
    "masac-bf16": (CONTINUOUS, {"name": "masac"}, "bf16"),
    "masac-fp16": (CONTINUOUS, {"name": "masac"}, "fp16"),
    "qmix": (DISCRETE, {"name": "qmix"}, "fp32"),
    "qmix-fp16": (DISCRETE, {"name": "qmix"}, "fp16"),
    "qplex": (DISCRETE, {"name": "qplex"}, "fp32"),
    "vdn": (DISCRETE, {"name": "qmix", "mixer": "vdn"}, "fp32"),
    "maddpg-bursts": (
        DISCRETE,
        {"name": "maddpg", "replay": BURSTS, "actor_gradient": "exact"},
        "fp32",
    ),
    "masac-uniform": (CONTINUOUS, {"name": "masac", "replay": REPLAY}, "fp32"),
    "maddpg-no-prefetch": (
        DISCRETE,
        {"name": "maddpg", "replay": {**PRIORITISED, "prefetch": False}},
        "fp32",
    ),
    "maddpg-stacked": (IMAGES, {"name": "maddpg", "replay": PRIORITISED}, "fp32"),
    "masac-normalised": (CONTINUOUS, {"name": "masac", "normalize_rewards": True}, "fp32"),
    "qmix-sequences": (DISCRETE, {"name": "qmix", "replay": REPLAY}, "fp32"),
    "masac-sequences": (CONTINUOUS, {"name": "masac", "replay": REPLAY}, "bf16"),
    "matd3-sequences": (CONTINUOUS, {"name": "matd3", "replay": REPLAY}, "fp32"),
    "iql": (DISCRETE, {"name": "qmix", "mixer": "none", "share_parameters": False}, "fp32"),
}


def fill(unroll: Unroll, spec: EnvSpec) -> None:
    """Random rows: an episode ends now and then, some agents are dead, some actions illegal."""
    for name, array in unroll.arrays.items():
        if name == "step_type":
            array.copy_((torch.rand(array.shape) < 0.1).byte() + 1)
        elif name == "action" and isinstance(spec.action, Discrete):
            array.random_(0, spec.action.num_actions)
        elif array.is_floating_point():
            array.normal_()
        else:
            array.random_(0, 2)
    if (mask := unroll.arrays.get(OBSERVATION + ACTION_MASK)) is not None:
        mask[..., 0] = 1
    unroll.arrays["discount"].fill_(1)
    unroll.cursor, unroll.first_version = unroll.length + 1, 0


def make(name: str, captured: bool) -> tuple[Algorithm[Any], ReplayStorage]:
    """The algorithm of a case, and an empty replay."""
    spec, options, precision = CASES[name]
    algorithm = build_algorithm(
        PluginConfig(**{"replay": PRIORITISED, **options}),
        spec,
        PluginConfig(**NETWORKS.get(name, MLP)),
        Precision(precision, GPU),
        GPU,
        5,
        AUGMENTS.get(name),
    )
    algorithm.graphs.enabled = captured
    storage = algorithm.make_storage(spec, None)
    assert isinstance(storage, ReplayStorage)
    return algorithm, storage


def put(storage: ReplayStorage, num_envs: int) -> None:
    """Put unrolls of this number of environments until an update is due."""
    while not storage.ready:
        unroll: Unroll = storage.begin(num_envs, 0, 0)
        fill(unroll, storage.spec)
        storage.add(unroll)


def learned(
    name: str, captured: bool
) -> tuple[Algorithm[Any], ReplayStorage, list[dict[str, float]]]:
    """An algorithm after 50 updates from a replay, that replay, and what they returned.

    The number of environments changes from unroll to unroll.
    """
    algorithm, storage = make(name, captured)
    losses: list[dict[str, float]] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        while len(losses) < UPDATES:
            put(storage, 2 + len(losses) % 4)
            batch = storage.sample(0, 0.0)
            assert batch is not None
            seen = algorithm.transforms.batch(batch)
            losses.append({k: float(v) for k, v in algorithm.update(seen).items()})
            storage.done(seen)
            if len(losses) == RESUMED_AT:  # other tensors: to be captured again
                algorithm.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    return algorithm, storage, losses


def tensors(state: Any) -> list[Tensor]:
    """All that a checkpoint of it holds."""
    found = [x for x in torch.utils._pytree.tree_leaves(state) if isinstance(x, Tensor)]
    assert found
    return found


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_fifty_captured_updates_equal_eager_ones(name: str) -> None:
    with pretend_cuda() as cuda:
        captured, replay, losses = learned(name, True)
        eager, other, expected = learned(name, False)
        ours, theirs = (
            tensors([x.state_dict() for x in pair]) for pair in ((captured, replay), (eager, other))
        )
    assert not [f for kind in FATAL for f in cuda.report.of(kind)]
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert captured.counts == eager.counts
    graphs = 2 if name.startswith("matd3") else 1
    assert captured.graphs.eager_calls["update"] == 2 * 3 * graphs
    assert captured.graphs.replays["update"] == UPDATES - 2 * 3 * graphs
    assert not captured.graphs.fallbacks
    assert eager.graphs.eager_calls["update"] == UPDATES
    prioritized = {**CASES[name][1].get("replay", PRIORITISED)}.get("prioritized", False)
    own = {"draw": 1, "take": 1, "priorities": 1}
    if not prioritized:
        del own["priorities"]
    if name.endswith("no-prefetch"):
        del own["take"]
    assert dict(replay.graphs.captures) == own
    assert set(replay.graphs.eager_calls.values()) == {3}
    assert not other.graphs.captures


@pytest.mark.parametrize("name", ["maddpg", "masac", "qmix"])
def test_an_update_launches_little_beside_its_graphs(name: str) -> None:
    with pretend_cuda() as cuda:
        algorithm, storage = make(name, True)
        for update in range(8):
            put(storage, 1 + update)
            cuda.launches.clear()
            batch = storage.sample(0, 0.0)
            assert batch is not None
            algorithm.update(batch)
            storage.done(batch)
            if update == CALLS_TO_CAPTURE:
                captures = dict(algorithm.graphs.captures + storage.graphs.captures)
    launched = cuda.launches[threading.current_thread().name]
    assert launched["graph replay"] == 4
    assert launched.total() <= 8  # more than 90 without graphs of draws and priorities
    assert algorithm.graphs.captures + storage.graphs.captures == captures
    assert sum(captures.values()) == 4
