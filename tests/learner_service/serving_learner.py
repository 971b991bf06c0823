"""The inference loop with real parts around it, driven row by row and without a network between."""

import asyncio
import threading
from types import TracebackType

import numpy as np
import torch

from murmur.env_service.environment import VectorEnvironment
from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.learning.base import Algorithm, Policy
from murmur.learner_service.serving.evaluation import Evaluation, EvaluationScheduler
from murmur.learner_service.serving.inference import InferenceLoop, ServingStats
from murmur.learner_service.serving.league import League
from murmur.learner_service.serving.requests import DynamicBatcher, EnvSession, Request
from murmur.learner_service.serving.snapshots import Snapshots
from murmur.learner_service.serving.staging import PackedStaging, make_staging
from murmur.learner_service.storage.storage import Arena, time_step_layout
from murmur.learner_service.telemetry.device_clock import DeviceClock
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.config.experiment import LeagueConfig
from murmur.shared.config.learner import BatcherConfig
from murmur.shared.wire.codec import ActionCodec
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep
from tests.learner_service.toys import CPU
from tests.waiting import wait_until


class Serving:
    """Sessions, and one thread that acts for them and, if asked to, learns in lockstep."""

    def __init__(
        self,
        algorithm: Algorithm,
        spec: EnvSpec,
        *,
        learns: bool = False,
        records: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        """Start serving.

        Args:
            algorithm: its policy acts.
            spec: of the environments.
            learns: whether it learns in lockstep.
            records: rows are packed as for a GPU, on the CPU.
            graphs: of acting; with them packed batches are filled up, whether or not it captures.
        """
        self.algorithm, self.spec = algorithm, spec
        self.snapshots = Snapshots(algorithm.snapshot, 0, CPU)
        self.storage = algorithm.make_storage(spec, None)
        if records:
            layout = time_step_layout(spec, algorithm.extras)
            firsts = {name: ((a, h), torch.float32) for name, (a, h) in self._firsts().items()}
            outputs = ("action", *algorithm.extras)
            self.storage.arena = Arena(layout, firsts, CPU, records=outputs)
        self._events = asyncio.new_event_loop()
        self.progress = Progress()
        self._batcher = DynamicBatcher(BatcherConfig())
        generator = torch.Generator().manual_seed(0)
        self.metrics = metrics = LearnerMetrics()
        self.staging = make_staging(
            self.storage,
            self.policy.memory_size,
            generator,
            graphs or Graphs(CPU),
            metrics.copied,
        )
        if isinstance(self.staging, PackedStaging):
            self.staging._fills_up = graphs is not None
        league, scheduler = League(LeagueConfig(), 0, CPU), EvaluationScheduler(lambda _: None)
        stats = ServingStats(self.storage, self.progress, metrics, DeviceClock(CPU))
        self._loop = InferenceLoop(
            batcher=self._batcher,
            storage=self.storage,
            snapshots=self.snapshots,
            staging=self.staging,
            scheduler=scheduler,
            league=league,
            stats=stats,
        )
        self._loop.learn = self._learn if learns else None

    def _firsts(self) -> dict[str, tuple[int, int]]:
        size = self.snapshots.policy.memory_size
        return {"memory": (self.spec.num_agents, size)} if size else {}

    @property
    def policy(self) -> Policy:
        """The one that acts now."""
        return self.snapshots.policy

    def __enter__(self) -> "Serving":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._events.close()

    def session(self, n: int, first_slot: int = 0, *, evaluates: bool = False) -> EnvSession:
        session = EnvSession("w", self.spec, n, first_slot, np.zeros(n, np.int64))
        if evaluates:
            session.evaluation = Evaluation(self.algorithm.snapshot(), 0, 0)
        return session

    def exchange(self, *rows: tuple[EnvSession, TimeStep]) -> list[Array]:
        """Actions for the rows of some sessions, all in one batch."""
        requests = [Request(s, 1, row, self._events.create_future()) for s, row in rows]
        self._loop.serve(requests)
        actions = []
        for request in requests:
            reply = self._events.run_until_complete(request.reply)
            actions.append(ActionCodec(self.spec, request.session.num_envs).unpack(reply)[2])
        return actions

    def end(self, session: EnvSession, row: TimeStep) -> None:
        """Its stream ends while its last rows are on their way to the inference thread."""
        self._batcher.arrivals.put([Request(session, 1, row, self._events.create_future())])
        self._loop.end(session)
        thread = threading.Thread(target=self._loop.run)
        thread.start()
        wait_until(lambda: not self._loop._ended)
        self._batcher.close()
        thread.join()

    def play(self, session: EnvSession, game: VectorEnvironment, rows: int, seed: int = 0) -> float:
        """Let a session play; returns the mean of the game's first metric over its episodes."""
        random = np.random.default_rng(seed)
        results: list[float] = []

        def seeds() -> Array:
            return random.integers(2**62, size=game.num_envs, dtype=np.uint64)

        timestep = game.reset(seeds())
        for _ in range(rows):
            (action,) = self.exchange((session, timestep))
            last = timestep.step_type == StepType.LAST
            results += timestep.metrics[game.spec.metrics[0]][last].tolist()
            timestep = game.step(action, last, seeds())
        return float(np.mean(results))

    def _learn(self) -> bool:
        while self.storage.ready:
            batch = self.storage.sample(0, 0.0)
            assert batch is not None
            seen = self.algorithm.transforms.batch(batch)
            self.algorithm.update(seen)
            self.snapshots.publish(self.algorithm.refresh, 0)
            self.storage.done(seen)
        return True
