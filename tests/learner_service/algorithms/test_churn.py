"""Updates of a long run whose batches change shape all the time: none is eager after the first few.

A simulation by events: workers of unequal speed, sessions that come and go, unrolls that are cut
and rows that would become too old. The storage, the algorithm and its graphs are the real ones;
what is simulated is the environments, and when things happen.
"""

import heapq
import math
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.device.cuda_graph import WARM_UP_CALLS
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import algorithm_config, build_algorithm
from murmur.learner_service.learning.fixed_shapes import FixedShapes
from murmur.learner_service.learning.on_policy import OnPolicyAlgorithm
from murmur.learner_service.learning.options import OnPolicyConfig
from murmur.learner_service.storage.flight import Speed
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.storage import Unroll
from murmur.shared.config import PluginConfig
from murmur.shared.config.text import plain_data
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType
from tests.learner_service.taped_graphs import taped
from tests.learner_service.toys import CPU

__all__ = ["taped"]
EPISODE = 15
SPEC = EnvSpec("toy", 2, (ArraySpec("view", "float32", (3,)),), Discrete(3), (), EPISODE)
WORKERS, SESSIONS, ENVS = 5, 2, 4  # sessions of a worker, environments of a session
STEP_S, UPDATE_S, UNEQUAL = 0.03, 0.25, 0.3
MOST_CAPTURES, WARM_UPDATES = 6, 4
_COMA = {"name": "coma", "clip_ratio": 0.2, "entropy_weight": 0.01}
_SMALL = {"batch_size": 32, "batch_number": 4, "data_passes": 1}


def build(options: dict[str, Any], recurrent: int = 0) -> OnPolicyAlgorithm:
    """An algorithm as it is on a GPU."""
    network = PluginConfig(name="mlp", hidden=(4,), recurrent=recurrent)
    precision = Precision("fp32", CPU)
    asked = algorithm_config(PluginConfig(**options, **_SMALL))
    assert isinstance(asked, OnPolicyConfig)
    settled = asked.for_environments(
        WORKERS * SESSIONS * ENVS, SPEC.num_agents, EPISODE, remembers=recurrent > 0
    )
    config = PluginConfig(name=options["name"], **plain_data(settled))
    built = build_algorithm(config, SPEC, network, precision, CPU, 5)
    assert isinstance(built, OnPolicyAlgorithm)
    built._static = True
    built.graphs.enabled = True
    return built


@dataclass
class Player:
    """A session."""

    number: int
    worker: int
    rows: int = 0
    unrolls: int = 0
    unroll: Unroll | None = None
    ends_s: float = 0.0


@dataclass
class Simulation:
    """Environments and a learner side by side.

    Attributes:
        shapes: of the batches, in order.
        eager: eager calls and captures so far, after each update.
    """

    algorithm: OnPolicyAlgorithm
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    eager: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        storage = self.algorithm.make_storage(SPEC, 1)
        assert isinstance(storage, RolloutStorage)
        self._storage, self._random = storage, np.random.default_rng(3)
        self._speed = [1 + UNEQUAL * i / (WORKERS - 1) for i in range(WORKERS)]
        self._now, self._version, self._learning, self._order = 0.0, 0, False, count()
        self._events: list[tuple[float, int, str, Any]] = []
        self._queues: list[list[Player]] = [[] for _ in range(WORKERS)]
        self._busy = [False] * WORKERS
        self._blocked: list[Player] = []
        self._players: set[int] = set()

    def run(self, seconds: float) -> None:
        """Simulate for this time."""
        self._storage.expect(WORKERS * SESSIONS * ENVS)
        for number in range(WORKERS * SESSIONS):
            self._after(0.5 * self._random.random(), "connect", Player(number, number // SESSIONS))
        while self._events:
            self._now, _, what, who = heapq.heappop(self._events)
            if self._now > seconds:
                return
            getattr(self, f"_{what}")(who)
            self._learn()

    def _after(self, seconds: float, what: str, who: Any) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), what, who))

    def _connect(self, player: Player) -> None:
        player.ends_s = self._now + self._random.uniform(4, 30)
        self._players.add(player.number)
        self._storage.connect(len(self._players) * ENVS)
        self._ask(player)

    def _ask(self, player: Player) -> None:
        """Its worker steps its environments, in turns with its other sessions."""
        self._queues[player.worker].append(player)
        self._start(player.worker)

    def _start(self, worker: int) -> None:
        if self._busy[worker] or not self._queues[worker]:
            return
        self._busy[worker] = True
        took = STEP_S * self._speed[worker] * max(0.3, self._random.normal(1, 0.1))
        self._after(took, "stepped", self._queues[worker].pop(0))

    def _stepped(self, player: Player) -> None:
        self._busy[player.worker] = False
        self._start(player.worker)
        if self._now > player.ends_s:
            self._end(player)
            return
        filled = []
        player.rows += 1
        if player.unroll is not None:
            self._write(player)
            if player.unroll.full:
                filled, player.unroll = [player.unroll], None
        self._serve(player, filled)

    def _serve(self, player: Player, filled: list[Unroll]) -> None:
        storage = self._storage
        begins = player.unroll is None
        admitted = not begins or storage.may_begin(filled)
        if begins and admitted:
            first = player.number * ENVS
            player.unroll = storage.begin(ENVS, first, player.unrolls, filled)
            player.unrolls += 1
            self._write(player)
        for unroll in filled:
            storage.add(unroll)
        if not admitted:
            self._blocked.append(player)
            return
        size, agents = self.algorithm.memory_size, SPEC.num_agents
        assert player.unroll is not None
        player.unroll.act(self._version, torch.zeros(ENVS, agents, size) if size else None)
        self._after(0.002, "ask", player)

    def _write(self, player: Player) -> None:
        """A row of its unroll: episodes have EPISODE steps."""
        assert player.unroll is not None
        at = player.rows % (EPISODE + 1)
        kind = StepType.FIRST if at == 0 else StepType.LAST if at == EPISODE else StepType.MID
        player.unroll.host["step_type"][player.unroll.cursor] = int(kind)
        player.unroll.host["discount"][player.unroll.cursor] = 1
        player.unroll.cursor += 1

    def _end(self, player: Player) -> None:
        """A session is lost in the middle of its unroll; another one comes later."""
        if player.unroll is not None:
            self._storage.add_open(player.unroll)
        self._players.discard(player.number)
        self._storage.connect(len(self._players) * ENVS)
        self._after(self._random.uniform(0.5, 3), "connect", Player(player.number, player.worker))

    def _learn(self) -> None:
        if self._learning or not self._storage.ready:
            return
        batch = self._storage.sample(self._version, 0.0)
        self._wake()
        if batch is None:
            return
        self._learning = True
        self.shapes.append(tuple(batch.arrays["step_type"].shape))
        self.algorithm.update(batch)
        graphs = self.algorithm.graphs
        self.eager.append((sum(graphs.eager_calls.values()), sum(graphs.captures.values())))
        self._after(UPDATE_S * self._random.uniform(0.4, 2), "learned", batch)

    def _learned(self, batch: Any) -> None:
        self._version, self._learning = self._version + 1, False
        self._storage.done(batch)
        if self._version == 8:  # the warm-up of a run chooses lengths of unrolls again
            self._storage.measured(Speed(STEP_S * SESSIONS, 1e-3), any_lag=False)
        self._wake()

    def _wake(self) -> None:
        if self._blocked and self._storage.may_begin():
            blocked, self._blocked = self._blocked, []
            for player in blocked:
                self._serve(player, [])


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize(
    "seconds", [pytest.param(20, id="20 s"), pytest.param(600, id="10 min", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("options", "recurrent"),
    [
        (_COMA, 0),
        ({"name": "mappo"}, 0),
        ({"name": "mappo"}, 4),
        ({"name": "mappo", "max_batch_size": 1000}, 0),
    ],
    ids=["coma", "mappo", "recurrent", "grown"],
)
def test_no_update_is_eager_after_the_first_few(
    options: dict[str, Any], recurrent: int, seconds: float
) -> None:
    simulation = Simulation(build(options, recurrent))
    simulation.run(seconds)
    updates = len(simulation.shapes)
    assert updates > seconds / 2
    assert len(set(simulation.shapes)) > 3
    eager, captures = simulation.eager[-1]
    assert captures <= MOST_CAPTURES
    assert eager == WARM_UP_CALLS * captures
    late = simulation.eager[WARM_UPDATES:]
    # Where minibatches grow and sessions are lost, an unroll may once be longer than the room.
    overflow = WARM_UP_CALLS + 1 if "max_batch_size" in options else 0
    assert len(set(late)) <= 1 + overflow
    assert not simulation.algorithm.graphs.fallbacks


@pytest.fixture(params=["room", "blocks"])
def leaking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants graphs whose shapes grow with the number of environments."""
    if request.param == "room":

        def exactly(self: FixedShapes, steps: int, envs: int, number: int) -> None:
            self._steps = steps
            self._envs = envs
            self._rows = steps * envs

        monkeypatch.setattr(FixedShapes, "_make_room", exactly)
    else:
        whole = property(lambda self: math.prod(self._fixed._now))
        monkeypatch.setattr(OnPolicyAlgorithm, "_rows_at_once", whole)


@pytest.mark.usefixtures("taped", "leaking")
def test_a_shape_that_grows_with_the_environments_is_found() -> None:
    simulation = Simulation(build(_COMA))
    simulation.run(20)
    eager, captures = simulation.eager[-1]
    assert (eager, captures) != simulation.eager[WARM_UPDATES]
