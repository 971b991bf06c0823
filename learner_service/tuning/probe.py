"""Measure how long an update takes with other settings, on synthetic rows."""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from murmur.learner_service.checkpoint.contents import saved_spec
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE, Graphs
from murmur.learner_service.device.device import select_device
from murmur.learner_service.device.memory import limited
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.device.readback import to_host
from murmur.learner_service.learning.base import build_algorithm, grown
from murmur.learner_service.learning.supervised import build_supervised, supervised_config
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.samples import SampleBatch
from murmur.learner_service.storage.storage import Unroll, UnrollStorage
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.files import read_json
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    EXPERT_ACTION,
    TURN_MASK,
    Composite,
    Discrete,
    EnvSpec,
)
from murmur.shared.wire.timestep import StepType

_MOST_ENVS = 256  # of a synthetic unroll
T = TypeVar("T")


def checkpoint_spec(path: Path) -> EnvSpec:
    """The spec a checkpoint was made with.

    Raises:
        CheckpointError: if it cannot be read.
    """
    return saved_spec(CheckpointFolder(path.parent, 1).load(path))


def depends_on(config: ExperimentConfig, spec: EnvSpec | SampleSpec, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever JSON can say
    """Return what a measured choice depends on, as it is read back from JSON.

    Args:
        config: the experiment.
        spec: spec of its environment or source.
        more: further properties, of the device for example.
    """
    known = {
        "algorithm": [config.algorithm.name, config.algorithm.options],
        "network": config.network.model_dump(),
        "environment": repr(spec),
    }
    found: dict[str, Any] = json.loads(json.dumps(known | more, default=repr))
    return found


def kept_choice(cache: Path, name: str, found_for: dict[str, Any], find: Callable[[], T]) -> T:
    """Return the choice kept in a file if it was made for the same run, else make and keep it.

    Args:
        cache: file of the choice.
        name: key of the choice in the file.
        found_for: what the choice depends on, see `depends_on`.
        find: function that makes the choice.
    """
    saved = read_json(cache)
    if saved.get("found_for") != found_for:
        saved = {name: find(), "found_for": found_for}
        cache.write_text(json.dumps(saved))
    choice: T = saved[name]
    return choice


class Probe:
    """The algorithm of a configuration, its storage, and synthetic rows to learn from.

    Attributes:
        algorithm: the configured one.
        storage: the algorithm's.
    """

    def __init__(self, config: ExperimentConfig, spec: EnvSpec) -> None:
        """Build both, as a run would.

        Raises:
            MurmurError: if the settings do not fit each other.
        """
        device = select_device(config.learner)
        precision = Precision.of(config.learner, device)
        self._spec, config = spec, grown(config, spec)
        with limited(config.learner.memory_limit_gib):  # the run's own ask comes after it
            self.algorithm = build_algorithm(
                config.algorithm, spec, config.network, precision, device, 0, config.augment
            )
            self.algorithm.graphs.enabled &= config.learner.cuda_graph
            self.storage: UnrollStorage[Any] = self.algorithm.make_storage(spec, None)
        self._envs = _MOST_ENVS
        if isinstance(self.storage, RolloutStorage):
            self.storage.expect(config.total_envs)
            self._envs = min(self._envs, self.storage.envs_per_update)

    def fill(self) -> int:
        """Put unrolls of synthetic rows until an update is due; returns how many rows."""
        rows = 0
        while not self.storage.ready:
            unroll = self.storage.begin(self._envs, 0, 0)
            make_up(unroll, self._spec)
            self.storage.add(unroll)
            rows += unroll.num_envs * unroll.transitions
        return rows

    def update(self) -> None:
        """Make an update that is due."""
        batch = self.storage.sample(0, 0.0)
        assert batch is not None
        seen = self.algorithm.transforms.batch(batch)
        scalars = self.algorithm.update(seen)
        self.storage.done(seen)
        to_host(torch.stack([s.float() for s in scalars.values()]))  # waits for the device

    def wait(self) -> None:
        """Wait for all streams of the device; also before a probe is dropped: one may prefetch."""
        if self.storage.device.type == "cuda":
            torch.cuda.synchronize(self.storage.device)


def seconds_per_row(config: ExperimentConfig, spec: EnvSpec, repeats: int = 3) -> float:
    """Time of learning for each environment row received.

    Args:
        config: the experiment.
        spec: its environment's.
        repeats: bursts of updates timed, after one that is not.

    Raises:
        MurmurError: if the settings do not fit each other.
    """
    probe = Probe(config, spec)
    rounds: list[tuple[float, int]] = []
    for _ in range(repeats + 1):
        rows = probe.fill()
        started = time.perf_counter()
        while probe.storage.ready:
            probe.update()
        rounds.append((time.perf_counter() - started, rows))
    probe.wait()
    return sum(took for took, _ in rounds[1:]) / sum(rows for _, rows in rounds[1:])


def update_seconds(config: ExperimentConfig, spec: EnvSpec | SampleSpec, repeats: int = 7) -> float:
    """Median time of an update, once it is captured where it can be.

    Args:
        config: the experiment.
        spec: spec of its environment or source.
        repeats: updates timed.

    Returns:
        seconds; infinity if CUDA runs out of memory.

    Raises:
        MurmurError: if the settings do not fit each other.
    """
    try:
        if isinstance(spec, SampleSpec):
            return _supervised_seconds(config, spec, repeats)
        probe = Probe(config, spec)

        def prepare() -> None:
            probe.fill()
            probe.wait()

        median = _median_seconds(probe.update, prepare, repeats, probe.algorithm.graphs)
        probe.wait()
    except torch.OutOfMemoryError:
        return math.inf
    return median


def _median_seconds(
    update: Callable[[], None], prepare: Callable[[], None], repeats: int, graphs: Graphs
) -> float:
    """Median time of updates that are replayed where they can be; what prepares them is not timed.

    An update with an eager call or a capture does not count, but in the last round: where captures
    fail, that is what updates cost.
    """
    times: list[float] = []
    most = CALLS_TO_CAPTURE + 2 * repeats
    for done in range(most):
        prepare()
        before, started = graphs.unsettled, time.perf_counter()
        update()
        took, last = time.perf_counter() - started, most - done <= repeats - len(times)
        if done >= CALLS_TO_CAPTURE and (last or graphs.unsettled == before):
            times.append(took)
        if len(times) == repeats:
            break
    return statistics.median(times)


def _supervised_seconds(config: ExperimentConfig, spec: SampleSpec, repeats: int) -> float:
    """As `update_seconds`, of learning from synthetic samples of a source."""
    device = select_device(config.learner)
    precision = Precision.of(config.learner, device)
    with limited(config.learner.memory_limit_gib):
        algorithm = build_supervised(config, spec, precision, device)
    algorithm.graphs.enabled &= config.learner.cuda_graph
    size = supervised_config(config).batch_size
    arrays = {
        array.name: torch.zeros((size, *array.shape), dtype=torch.uint8, device=device)
        for array in spec.arrays
    }
    for array in arrays.values():  # images; masks of any class or of none cost the same
        array.random_(0, 256 if array.dim() == 4 else len(spec.classes))
    index = torch.arange(size, device=device)

    def update() -> None:
        scalars = algorithm.update(SampleBatch(arrays, index, 0, False, False))
        to_host(torch.stack([s.float() for s in scalars.values()]))  # waits for the device

    return _median_seconds(update, lambda: None, repeats, algorithm.graphs)


def make_up(unroll: Unroll, spec: EnvSpec) -> None:
    """Fill an unroll: random numbers in the middle of an episode."""
    for name, array in unroll.arrays.items():
        if name == "step_type":
            array.fill_(int(StepType.MID))
        elif name in ("discount", OBSERVATION + ACTION_MASK, OBSERVATION + AGENT_MASK):
            array.fill_(1)
        elif name == OBSERVATION + TURN_MASK:
            array.zero_()
            for step, turn in enumerate(array):
                turn[:, step % spec.num_agents] = 1
        elif name in ("action", OBSERVATION + EXPERT_ACTION) and isinstance(spec.action, Discrete):
            array.random_(0, spec.action.num_actions)
        elif name in ("action", "raw_action") and isinstance(spec.action, Composite):
            array.normal_() if spec.action.size else array.zero_()
            for i, count in enumerate(spec.action.factors):
                array[..., i].random_(0, count)
        elif array.is_floating_point():
            array.normal_()
        else:
            array.zero_()
    unroll.cursor, unroll.first_version = unroll.length + 1, 0
