"""A whole run without gRPC: hand-made rows, real classes."""

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from murmur.learner_service.context import RunContext
from murmur.learner_service.run import Run
from murmur.learner_service.serving.requests import EnvSession, Request
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec
from murmur.shared.wire.spec import ACTION_MASK, AGENT_CELL, AGENT_MASK, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep
from tests.waiting import wait_until

DEADLINE_S = 120.0
_FIRST, _MID, _LAST, _ABORTED = (int(kind) for kind in StepType)
_EPISODE = 5  # steps, give or take


class Environments:
    """Random rows of environments in episodes; one environment fails now and then."""

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int) -> None:
        self.spec, self.num_envs = spec, num_envs
        self._random = np.random.default_rng(seed)
        self._age = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, np.bool_)

    def row(self) -> TimeStep:
        random, spec, n = self._random, self.spec, self.num_envs
        self._age = np.where(self._over, 0, self._age + 1)
        length = _EPISODE - np.arange(n) % 2
        kinds = np.where(self._over, _FIRST, np.where(self._age >= length, _LAST, _MID))
        if n > 2 and random.random() < 0.1 and kinds[2] == _MID:
            kinds[2] = _ABORTED
        self._over = (kinds == _LAST) | (kinds == _ABORTED)
        first = kinds == _FIRST
        reward = random.normal(size=(n, spec.num_agents)).astype(np.float32)
        reward[first] = 0
        return TimeStep(
            step_type=kinds.astype(np.uint8),
            reward=reward,
            discount=np.where(kinds == _LAST, np.arange(n) % 2, 1).astype(np.float32),
            observation={o.name: self._array(o.name) for o in spec.observations},
            metrics={m: random.random(n).astype(np.float32) for m in spec.metrics},
        )

    def _array(self, name: str) -> Array:
        found = self.spec.observation(name)
        assert found is not None
        lead = (self.num_envs, self.spec.num_agents) if found.per_agent else (self.num_envs,)
        shape = lead + tuple(found.shape)
        if name in (ACTION_MASK, AGENT_MASK):
            mask = (self._random.random(shape) < 0.7).astype(found.dtype)
            mask[..., 0] = 1  # an action is legal, an agent alive
            return mask
        if name == AGENT_CELL:
            return self._random.integers(4, size=shape).astype(found.dtype)
        if found.dtype == "uint8":
            return self._random.integers(256, size=shape).astype(found.dtype)
        return self._random.normal(size=shape).astype(found.dtype)


@dataclasses.dataclass(eq=False)
class Player:
    """A session and its environments."""

    session: EnvSession
    environments: Environments
    codec: ActionCodec
    sequence: int = 0
    rows: int = 0  # answered
    action: Array | None = None  # of the last of them
    pending: "asyncio.Future[bytes] | None" = None


class DrivenRun:
    """A run whose sessions are driven by the main thread.

    Attributes:
        run: the Run itself.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        spec: EnvSpec,
        folder: Path,
        checkpoint: tuple[Path, dict[str, Any]] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._league = config.league.on
        self._stop = threading.Event()
        self.run = Run(RunContext(config, folder, checkpoint, False, self._stop))
        self.spec = spec
        self._loop = asyncio.new_event_loop()
        self._seeds = itertools.count()
        self._players: list[Player] = []
        if self.run.spec is None:
            self.run.open(self.run.team(spec, training=True))

    def __enter__(self) -> "DrivenRun":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self.run.context.learner is not None
        self._stop.set()
        if error is None and self.run.context.learner.finished.wait(DEADLINE_S):
            for player in self._players:
                self.run.end(player.session)
            self.run.end_input()
            self.run.context.finish()
        else:
            self.run.context.learner.finished.set()
        self.run.end_input()
        self.run.context.close()
        self._loop.close()

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return self.run.policy_version

    def player(self, num_envs: int, *, evaluates: bool = False) -> Player:
        """Open a session."""
        run = self.run
        assert run.spec is not None
        if evaluates:
            session = EnvSession("eval", self.spec, num_envs, -1, np.zeros(num_envs, np.int64))

            def due() -> bool:
                session.evaluation = run.scheduler.start()
                return session.evaluation is not None

            wait_until(due, "an evaluation")
        else:
            hello = pb.Hello(worker_id=f"w{num_envs}", num_envs=num_envs)
            session = run.admit(hello, self.spec)[0]
        if self._league:
            run.pair(session)
        environments = Environments(self.spec, num_envs, next(self._seeds))
        player = Player(session, environments, ActionCodec(self.spec, num_envs))
        self._players.append(player)
        return player

    def play(self, done: Callable[[], Any], *players: Player) -> None:
        """Send each player's next row as soon as it is answered, until `done` is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"{self.updates} updates so far"
            for player in players:
                if player.pending is None:
                    self._send(player)
            waiting = [player.pending for player in players if player.pending is not None]
            some = asyncio.wait(waiting, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            self._loop.run_until_complete(some)
            for player in players:
                if player.pending is not None and player.pending.done():
                    player.action = player.codec.unpack(player.pending.result())[2]
                    player.rows, player.pending = player.rows + 1, None

    def _send(self, player: Player) -> None:
        player.sequence += 1
        row, other = player.environments.row(), None
        if player.session.pairing is not None:
            half = self.spec.num_agents // 2
            own, others = slice(half), slice(half, None)
            row, other = (player.session.of_agents(row, team) for team in (own, others))
        player.pending = self._loop.create_future()
        self.run.batcher.arrivals.put(
            [Request(player.session, player.sequence, row, player.pending, other)]
        )

    def play_rows(self, rows: int, *players: Player) -> None:
        """Play until each player has received this number of further answers."""
        wanted = {id(player): player.rows + rows for player in players}
        self.play(lambda: all(p.rows >= wanted[id(p)] for p in players), *players)

    def play_until(self, updates: int, *players: Player) -> None:
        """Play until the run has made this number of updates in all."""
        self.play(lambda: self.updates >= updates, *players)

    def end(self, player: Player) -> None:
        """Close a session; returns when the inference thread has seen it."""
        self._players.remove(player)
        self.run.end(player.session)
        turns = self.run.inference.batches_served
        wait_until(lambda: self.run.inference.batches_served > turns + 1, "a turn")
