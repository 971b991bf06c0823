"""The learners of a worker's sessions, and the choice of a learner for each session.

A single learner's address is used as it is. If several share a run, each session connects to the
one with the fewest environments. While it plays, it compares its load with a random other one from
time to time, and moves there with probability 1 - there / here if that evens the two out: selfish
load balancing, which needs no central view of all sessions and does not oscillate (Berenbrink,
Friedetzky, Goldberg, Goldberg, Hu and Martin 2006, "Distributed selfish load balancing", SODA).
"""

import asyncio
import contextlib
import logging
import random
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

import grpc
from grpc import aio

from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.connection import Call, Connection
from murmur.env_service.sessions.reconnect import Disconnected, ReconnectPolicy
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.addresses import learner_addresses, name_and_port
from murmur.shared.process.errors import MurmurError
from murmur.shared.rpc import LOAD_METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.credentials import Role

logger = logging.getLogger("murmur")

_LOOK_UP_S = 5.0  # the longest that a first look-up of the name is waited for
_LOOK_UP_EVERY_S = 10.0
_WAITING_S = 1.0  # between two looks of a session that waits for Welcome or an answer
_ASK_S = 2.0  # a learner that does not say its load within this time is not there
_FULL_S = 10.0  # a learner that refused a session because it was full is avoided for this time


AnyStream = TypeVar("AnyStream", bound=Call)


async def look_up(name: str) -> list[str]:
    """Resolve a name to its addresses, sorted: IPv4 if there is any, else IPv6 in brackets."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    hosts: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        hosts.setdefault(family, set()).add(str(address[0]))
    four, six = hosts.get(socket.AF_INET, set()), hosts.get(socket.AF_INET6, set())
    return sorted(four) or sorted(f"[{host}]" for host in six)


def worth_moving(here: int, there: int, weight: int, chance: float) -> bool:
    """Decide whether a session moves to a learner with less load than its own.

    The probability is 1 - there / here, so that not all sessions move at once.

    Args:
        here: load of the session's own learner, this session included.
        there: load of the other learner.
        weight: load of the session.
        chance: random number, uniform in [0, 1).
    """
    return there + weight < here and chance < 1 - there / here


class Rank:
    """One of the learners. Used by one event loop.

    Attributes:
        address: host:port of the learner.
        connection: connection to the learner.
        backoff: pauses between attempts to connect.
        lost_at: time.monotonic() since which the learner is not reachable; None if it is.
    """

    def __init__(self, address: str, connection: Connection, reconnect: ReconnectPolicy) -> None:
        """Prepare; nothing is connected yet."""
        self.address = address
        self.connection = connection
        self.backoff = reconnect.backoff()
        self.lost_at: float | None = None
        self._full_until = 0.0

    @property
    def full(self) -> bool:
        """Return whether the learner has recently refused a session because it was full."""
        return time.monotonic() < self._full_until

    def refuse(self) -> None:
        """Mark the learner as full for _FULL_S."""
        self._full_until = time.monotonic() + _FULL_S

    def lose(self) -> None:
        """Mark the learner as not reachable from now on, unless it is already."""
        if self.lost_at is None:
            self.lost_at = time.monotonic()

    async def load(self) -> pb.LoadReply | None:
        """Return the learner's load, or None if it did not answer."""
        try:
            async with self.connection.channel() as channel:
                ask = channel.unary_unary(LOAD_METHOD, None, pb.LoadReply.FromString)
                reply: pb.LoadReply = await ask(b"", timeout=_ASK_S)
        except aio.AioRpcError:
            return None
        self.lost_at = None
        return reply


class LearnerChoice:
    """The choice of a learner for one session. Used by the session's task.

    Attributes:
        weight: number of the session's environments; 1 if it supplies samples.
        rank: learner that the session connects to or plays with.
        target: learner that the session is to move to.
        call: stream of the session, while it plays.
        leaving: event that asks the session to end its stream and open another one.
    """

    def __init__(self, ranks: "Ranks", turn: int, weight: int) -> None:
        """Make a choice; `turn` is its number, by which ties of load are broken."""
        self._ranks = ranks
        self.turn = turn
        self.weight = weight
        self.rank: Rank | None = None
        self.target: Rank | None = None
        self.call: Call | None = None
        self.leaving = asyncio.Event()

    @contextlib.asynccontextmanager
    async def stream(
        self, connect: Callable[[aio.Channel], AnyStream], hello: pb.Hello
    ) -> AsyncIterator[tuple[AnyStream, pb.Welcome]]:
        """Choose a learner, open a stream, and mark the session as playing during the block.

        Args:
            connect: function that opens the stream over a channel.
            hello: first message of the session.

        Raises:
            Disconnected: if no learner can be chosen, the stream ends, or the session moves.
        """
        self.rank = rank = await self._ranks.choose(self)
        self.leaving.clear()
        looking = asyncio.create_task(self._ranks.look(self)) if self._ranks.movable else None
        try:
            async with rank.connection.channel() as channel:
                call = connect(channel)
                try:
                    welcome = await self._welcome(call.greet(hello))
                    rank.lost_at, self.call = None, call
                    with self._ranks.reconnect.session(self._ranks.called(rank), rank.backoff):
                        yield call, welcome
                finally:
                    self.call = None
                    call.cancel()
        finally:
            if looking is not None:
                looking.cancel()

    async def _welcome(self, opening: Coroutine[Any, Any, pb.Welcome]) -> pb.Welcome:
        """Await `opening`, which waits for Welcome.

        Learners of one run begin when all of them have sessions, so a session may have to move.

        Raises:
            Disconnected: if the stream ends, or the session leaves before.
        """
        if not self._ranks.movable:
            return await opening
        opened, left = asyncio.ensure_future(opening), asyncio.ensure_future(self.leaving.wait())
        try:
            await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                raise Disconnected(grpc.StatusCode.CANCELLED, "the session moves")
            return opened.result()
        finally:
            left.cancel()
            opened.cancel()
            await asyncio.gather(opened, return_exceptions=True)

    async def stays_silent(self, seconds: float) -> bool:
        """Wait; return whether the session has sent nothing meanwhile.

        If so, the learner has not answered yet. It answers no session with rows that would be too
        old, until all learners of the run have learned.
        """
        call, written = self.call, self.call.written if self.call else 0
        await asyncio.sleep(seconds)
        return self.call is call and (call is None or call.written == written)

    async def leave(self, target: Rank, *, blocked: bool) -> None:
        """Move the session to another learner, at once if it waits for an answer.

        Never returns: the session ends the task that calls this when it has left.

        Args:
            target: learner to move to.
            blocked: true if the session waits for an answer, which may never come.
        """
        self.target = target
        self.leaving.set()
        while True:
            if blocked and self.call is not None:
                self.call.cancel()
            await asyncio.sleep(_WAITING_S)
            blocked = True

    def pause_s(self, error: Disconnected) -> float:
        """Return the pause before reconnecting, s; see ReconnectPolicy.pause_s."""
        return self._ranks.pause_s(self, error)

    async def pause(self, error: Disconnected, stop: asyncio.Event) -> None:
        """Wait for `pause_s`, or until `stop` is set; not at all if the session moves."""
        if self.leaving.is_set() and error.code is grpc.StatusCode.CANCELLED:
            return
        seconds = self.pause_s(error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)


class Ranks:
    """The learners of one worker's sessions. Used by one event loop.

    A session reconnects to a lost learner with growing pauses for env_server.move_after_s; then the
    learner's sessions move to others, and return one after another when it is back.

    Attributes:
        reconnect: policy of pauses and of giving up.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        metrics: WorkerMetrics,
        *roles: Role,
        first_turn: int = 0,
        number: int | None = None,
    ) -> None:
        """Prepare to connect to env_server.learner; nothing is connected or looked up yet.

        Args:
            config: configuration of the experiment.
            metrics: counts of the worker.
            roles: roles of the token, the preferred one first.
            first_turn: number of this worker's first session among those of its server; sessions
                take turns among learners of equal load.
            number: number of the learner that all sessions stay with, modulo their number; None:
                sessions are balanced.

        Raises:
            ConfigError: if the addresses or the credentials cannot be used; see Connection.
        """
        self._config = config
        self._server = config.env_server
        self._metrics = metrics
        self._roles = roles
        self._number = number
        self.reconnect = ReconnectPolicy(config.env_server, metrics)
        addresses = learner_addresses(config.env_server.learner)
        names = [name_and_port(address) for address in addresses]
        alike = names[0] is not None and len({n and n[0] for n in names}) == 1
        # Of the machines; each has a learner at every port.
        self._name = names[0][0] if alike and names[0] else ""
        self._ports = [found[1] for found in names if found]
        self._looked_up = False  # the addresses are those that were found for the name
        self._turn = first_turn + zlib.crc32(socket.gethostname().encode())
        self._choices: list[LearnerChoice] = []
        self._known: dict[str, Rank] = {}  # also those that are only still played with
        self._ranks = [self._rank(address) for address in addresses]
        self._looking_up: asyncio.Task[None] | None = None
        self._random = random.random

    async def __aenter__(self) -> Self:
        """Resolve the name, if the address is one, now and every few seconds."""
        if self._name:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._refresh(), _LOOK_UP_S)
            self._looking_up = asyncio.create_task(self._keep_refreshing())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        if self._looking_up is not None:
            self._looking_up.cancel()
        for rank in self._known.values():
            await rank.connection.aclose()

    @property
    def addresses(self) -> list[str]:
        """Return the addresses of the learners that are known now."""
        return [rank.address for rank in self._ranks]

    @property
    def movable(self) -> bool:
        """Return whether sessions may move: there are several learners, or may be later."""
        several = bool(self._name) or len(self._ranks) > 1
        return several and self._number is None and self._server.balance_every_s > 0

    def choice(self, weight: int) -> LearnerChoice:
        """Make the choice of one more session with this number of environments."""
        choice = LearnerChoice(self, self._turn + len(self._choices), weight)
        self._choices.append(choice)
        return choice

    def called(self, rank: Rank | None) -> str:
        """Return a learner's address for messages."""
        return rank.address if rank is not None and len(self._ranks) > 1 else self._server.learner

    async def choose(self, choice: LearnerChoice) -> Rank:
        """Choose the learner that a session connects to next.

        Raises:
            Disconnected: if it must be a certain learner that is not reachable.
        """
        target, choice.target = choice.target, None
        if len(self._ranks) == 1:
            return self._ranks[0]
        if self._number is not None:
            return await self._numbered(self._number)
        if target in self._ranks:
            assert target is not None
            return target
        old = choice.rank
        if old in self._ranks and old is not None and not self._given_up(old):
            return old
        chosen = await self._least_loaded(choice)
        if old is not None and chosen is not old:
            reason = "full" if old.full else "lost"
            self._metrics.counts[f"sessions_moved/{reason}"] += 1
            logger.info(
                "learner at %s is %s: a session goes to %s", old.address, reason, chosen.address
            )
        return chosen

    async def look(self, choice: LearnerChoice) -> None:
        """Compare loads with another learner from time to time, and move if it has less."""
        while True:
            blocked = await self._next_look(choice)
            here, there = choice.rank, self._ranks[int(self._random() * len(self._ranks))]
            if here is None or here is there:
                continue
            try:
                mine, its = await asyncio.gather(here.load(), there.load())
            except MurmurError as error:  # of the credentials
                logger.warning("%s", error)
                continue
            if mine is None or its is None or not its.free_sessions:
                continue
            more, less = self._amount(mine), self._amount(its)
            if worth_moving(more, less, choice.weight, self._random()):
                self._metrics.counts["sessions_moved/balance"] += 1
                logger.info(
                    "a session moves from learner %s (load %d) to %s (load %d)",
                    here.address,
                    more,
                    there.address,
                    less,
                )
                await choice.leave(there, blocked=blocked)

    async def _next_look(self, choice: LearnerChoice) -> bool:
        """Wait for the next comparison, which comes early if the session waits for its learner.

        A move loses nothing then, and the learner may wait for another one without a session.

        Returns:
            true if the session waits for an answer.
        """
        every = self._server.balance_every_s
        due = time.monotonic() + every * (0.5 + self._random())
        while True:
            silent = await choice.stays_silent(min(every, _WAITING_S) * (0.5 + self._random()))
            if silent or time.monotonic() >= due:
                return silent

    def pause_s(self, choice: LearnerChoice, error: Disconnected) -> float:
        """Return the pause before a session reconnects, s, and mark its learner lost or full."""
        rank = choice.rank
        backoff = rank.backoff if rank is not None else self._ranks[0].backoff
        pause = self.reconnect.pause_s(self.called(rank), backoff, error)
        if rank is None or len(self._ranks) == 1:
            return pause
        if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            rank.lose()
            return pause
        rank.refuse()
        others = any(not self._given_up(other) for other in self._ranks)
        return self._server.reconnect_min_s * self._random() if others else pause

    def _rank(self, address: str) -> Rank:
        """Return the learner at an address, and remember it."""
        if address not in self._known:
            connection = Connection(self._config, *self._roles, address=address, name=self._name)
            self._known[address] = Rank(address, connection, self.reconnect)
        return self._known[address]

    def _given_up(self, rank: Rank) -> bool:
        """Return whether sessions must choose another learner: it is full or lost for long."""
        if rank.full or rank.lost_at is None:
            return rank.full
        return time.monotonic() - rank.lost_at > self._server.move_after_s

    def _amount(self, load: pb.LoadReply) -> int:
        return load.supply_sessions if self._config.supervised else load.environments

    async def _least_loaded(self, choice: LearnerChoice) -> Rank:
        """Find the learner with the fewest environments, including sessions that connect to it.

        A learner that does not answer counts as one of mean load: it may be about to start. A
        session that has lost its learner prefers one that answers.
        """
        ranks = list(self._ranks)
        loads = await asyncio.gather(*(rank.load() for rank in ranks))
        amounts = [self._amount(load) for load in loads if load is not None]
        usual = sum(amounts) / max(len(amounts), 1)

        def order(index: int) -> tuple[bool, bool, float, int]:
            rank, load = ranks[index], loads[index]
            coming = sum(
                other.weight
                for other in self._choices
                if other.rank is rank and other is not choice and other.call is None
            )
            amount = usual if load is None else self._amount(load)
            full = load is not None and not load.free_sessions
            silent = load is None and choice.rank is not None
            turn = (index - choice.turn) % len(ranks)
            # Available learners first, then those that answer, then the least loaded, then turns.
            return self._given_up(rank) or full, silent, amount + coming, turn

        return ranks[min(range(len(ranks)), key=order)]

    async def _numbered(self, number: int) -> Rank:
        """Find the learner with a number, modulo the number of learners.

        Configured addresses are in order; a name's addresses are in any order.

        Raises:
            Disconnected: if no address is that learner's.
        """
        ranks = list(self._ranks)
        if not self._looked_up:
            return ranks[number % len(ranks)]
        loads = await asyncio.gather(*(rank.load() for rank in ranks))
        there = [(rank, load) for rank, load in zip(ranks, loads, strict=True) if load is not None]
        for rank, load in there:
            if load.size > 1 and load.rank == number % load.size:
                return rank
        if len(there) == len(ranks) and all(load.size < 2 for _, load in there):
            return ranks[number % len(ranks)]  # learners that know nothing of one another
        raise Disconnected(
            grpc.StatusCode.UNAVAILABLE,
            f"none of the {len(ranks)} addresses of {self._name} is this worker's learner",
        )

    async def _refresh(self) -> None:
        """Resolve the name; a failure changes nothing."""
        try:
            hosts = await look_up(self._name)
        except OSError:
            return
        if len(hosts) > 1 or (hosts and self._looked_up):
            self._looked_up = True
            addresses = [f"{host}:{port}" for host in hosts for port in self._ports]
            await self._replace([self._rank(address) for address in addresses])

    async def _replace(self, ranks: Sequence[Rank]) -> None:
        """Choose between these learners from now on; close unused connections."""
        if list(ranks) == self._ranks:
            return
        self._ranks = list(ranks)
        logger.info(
            "%s has %d learners: %s", self._server.learner, len(ranks), ", ".join(self.addresses)
        )
        used = {id(choice.rank) for choice in self._choices}
        for rank in [r for r in self._known.values() if r not in ranks and id(r) not in used]:
            del self._known[rank.address]
            await rank.connection.aclose()

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_UP_EVERY_S * (0.5 + self._random()))
            await self._refresh()
