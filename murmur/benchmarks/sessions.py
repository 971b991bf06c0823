"""Many sessions at once on one learner: is any starved, is one too many refused, what do storms do?

The learner is a real process. The sessions are those of the environment server's own code, with a
TCP connection each, in this process; they play `spread` and connect over loopback. Row counts
compare sessions within one stretch of time, so a busy machine disturbs all of them alike.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import numpy as np
import psutil
from grpc import aio
from prometheus_client import CollectorRegistry

from murmur.benchmarks._processes import Processes
from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import make_environment
from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.env_service.sessions.worker import Stream, hello_of
from murmur.shared.config import PluginConfig
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import channel_options
from murmur.shared.wire.timestep import StepType

DESCRIPTION = (
    "256 sessions at once, at equal speed (target: max/min rows ≤ 1.5) and slow ones among fast, "
    "the 257th refused, a storm of connections"
)

SESSIONS, ENVS = 256, 2
_NOTICED_S = 5.0  # until the learner must have noticed sessions that ended
_SLOW_S = 0.5  # pause of a slow session between messages
_ALONE = ("grpc.use_local_subchannel_pool", 1)  # else the channels of a process share connections


def experiment(sessions: int) -> dict[str, Any]:
    """Return `spread` with small networks.

    Rows may be any number of updates old: else sessions wait for each other's rows, which is the
    algorithm's doing, and hides what the server does. Nothing is learned from rows that old: at an
    ordinary learning rate the weights would turn infinite.
    """
    return {
        "environment": {"name": "spread"},
        "env_server": {"num_workers": 1, "envs_per_worker": ENVS, "sessions_per_worker": 1},
        "algorithm": {
            "name": "mappo",
            "batch_size": sessions * ENVS,
            "batch_number": 4,
            "data_passes": 1,
            **{"actor_lr": 1e-9, "critic_lr": 1e-9},
        },
        "network": {"name": "mlp", "hidden": [32]},
        "learner": {
            "device": "cpu",
            "max_sessions": sessions,
            "max_policy_lag": 1000,
            "checkpoint_every_updates": 1000,
        },
    }


class Player:
    """One session, as fast as it is answered or with a pause before each message.

    Attributes:
        rows: number of messages answered.
        spec: spec of the environments.
    """

    def __init__(self, address: str, number: int, pause_s: float = 0.0) -> None:
        """Prepare to connect."""
        self._address = address
        self._number = number
        self._pause_s = pause_s
        self._environment = make_environment(PluginConfig(name="spread"), ENVS)
        self.spec = self._environment.spec
        self.rows = 0

    async def play(self, welcomed: asyncio.Event) -> None:
        """Play until canceled.

        Raises:
            Disconnected: if the learner refuses the session or ends it.
        """
        environment, seeds = self._environment, np.arange(ENVS, dtype=np.uint64)
        async with self.stream() as stream:
            name = f"player-{self._number}"
            await stream.greet(hello_of(self.spec, ENVS, name, pb.MODE_TRAIN))
            welcomed.set()
            timestep = environment.reset(seeds)
            while True:
                action = await stream.exchange(timestep)
                self.rows += 1
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
                timestep = environment.step(action, timestep.step_type == StepType.LAST, seeds)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        """Open a stream over a connection of its own, dropped at the end without a status."""
        metrics = WorkerMetrics("train", CollectorRegistry())
        options = [*channel_options(self._address), _ALONE]
        async with aio.insecure_channel(self._address, options) as channel:
            stream = Stream(channel, self.spec, ENVS, metrics)
            try:
                yield stream
            finally:
                stream.cancel()


@contextlib.asynccontextmanager
async def playing(players: Iterable[Player]) -> AsyncIterator[None]:
    """Play with all at once; return when all are welcomed, cut them off at the end."""
    events, tasks = [], []
    for player in players:
        events.append(asyncio.Event())
        tasks.append(asyncio.create_task(player.play(events[-1])))
    try:
        for event, task in zip(events, tasks, strict=True):
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done():
                task.result()
        yield
        for task in tasks:
            if task.done():
                task.result()  # raises: no session ends by itself
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(1)  # for the learner to notice that they are gone


async def count(players: list[Player], seconds: float) -> list[int]:
    """Count rows of each player within this time in seconds."""
    before = [p.rows for p in players]
    await asyncio.sleep(seconds)
    return [p.rows - b for p, b in zip(players, before, strict=True)]


def spread_of(rows: list[int], seconds: float) -> dict[str, float]:
    """Return the spread of rates of one group of sessions."""
    return {
        "sessions": len(rows),
        "messages_per_s": sum(rows) / seconds,
        "min_rows": min(rows),
        "max_rows": max(rows),
        "max/min": max(rows) / max(1, min(rows)),
    }


async def equal_and_mixed(address: str, sessions: int, seconds: float) -> dict[str, Any]:
    """Measure sessions at full speed, with one more, then with three quarters of them slow."""
    result: dict[str, Any] = {}
    players = [Player(address, i) for i in range(sessions)]
    async with playing(players):
        await asyncio.sleep(seconds / 4)
        result["equal speed"] = spread_of(await count(players, seconds), seconds)
        try:
            await asyncio.wait_for(Player(address, sessions).play(asyncio.Event()), 30)
        except Disconnected as refused:
            result["one more"] = str(refused)
    players = [Player(address, i, _SLOW_S * (i % 4 > 0)) for i in range(sessions)]
    async with playing(players):
        await asyncio.sleep(seconds / 4)
        rows = await count(players, seconds)
    result["mixed: fast"] = spread_of(rows[::4], seconds)
    result["mixed: slow"] = spread_of([r for i, r in enumerate(rows) if i % 4], seconds)
    result["mixed: slow"]["rows_without_waiting"] = seconds / _SLOW_S
    return result


async def storm(
    address: str, learner: psutil.Process, connections: int, at_once: int
) -> dict[str, Any]:
    """Open short-lived sessions, several at a time, beside as many that play."""
    players = [Player(address, i) for i in range(at_once)]
    waiting = asyncio.Semaphore(at_once)
    played = refused = 0

    async def come_and_go(number: int) -> None:
        nonlocal played
        async with waiting:
            until = time.monotonic() + _NOTICED_S
            while not await welcomed(number, until):
                await asyncio.sleep(0.01)
        played += 1

    async def welcomed(number: int, until: float) -> bool:
        nonlocal refused
        player = Player(address, 1000 + number)
        async with player.stream() as stream:
            try:
                await stream.greet(hello_of(player.spec, ENVS, "storm", pb.MODE_TRAIN))
            except Disconnected as error:
                full = error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
                if not full or time.monotonic() > until:
                    raise
                refused += 1
                return False
        return True

    async with playing(players):
        await asyncio.gather(*(come_and_go(i) for i in range(2 * at_once)))  # whatever is made once
        await asyncio.sleep(1)
        before = (learner.num_fds(), learner.num_threads(), learner.memory_full_info().uss)
        rows = [p.rows for p in players]
        began = time.monotonic()
        await asyncio.gather(*(come_and_go(i) for i in range(connections)))
        seconds = time.monotonic() - began
        rows = [p.rows - r for p, r in zip(players, rows, strict=True)]
        await asyncio.sleep(1)
        after = (learner.num_fds(), learner.num_threads(), learner.memory_full_info().uss)
    return {
        "connections": played - 2 * at_once,
        "refused": refused,
        "per_s": connections / seconds,
        "descriptors": [before[0], after[0]],
        "threads": [before[1], after[1]],
        "own_mb": [before[2] / 1e6, after[2] / 1e6],
        **{f"players: {k}": v for k, v in spread_of(rows, seconds).items()},
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure rates of sessions, and the storm of short ones."""
    seconds, connections = effort.choose((0.5, 16), (10.0, 200), (40.0, 2000))
    sessions, at_once = effort.choose((8, 4), (SESSIONS, 32), (SESSIONS, 32))
    with Processes(experiment(sessions), servers=()) as processes:
        address, learner = processes.address, processes.learner
        with asyncio.Runner() as runner:  # gRPC complains once a second loop runs in a process
            result = runner.run(equal_and_mixed(address, sessions, seconds))
            result["storm"] = runner.run(storm(address, learner, connections, at_once))
    result["load_average"] = psutil.getloadavg()[0]
    return result
