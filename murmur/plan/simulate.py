"""The simulation: sessions, batchers, acting, updates and all-reduce as events.

A session steps its environments on its worker, sends a message, which costs the learner's event
loop time, waits for the next batch of the inference thread, and gets its action. Unrolls that fill
up make updates due. Sessions that may not begin an unroll wait until an update makes room. Event
loop and inference thread share one interpreter; gRPC's own threads, copies and torch's own work do
not need it.
"""

import math
import random
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from typing_extensions import override

from murmur.learner_service.storage.flight import Flight
from murmur.learner_service.storage.replay import ReplayConfig, ReplayStorage
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.storage import Unroll
from murmur.plan.engine import SLICE_S, Done, Engine, Pool, Thread
from murmur.plan.model import Outcome, Replays, System
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec

# The time steps of the learner's storages hold a number of one agent: many ranks fit into memory.
_SPEC = EnvSpec("plan", 1, (ArraySpec("number", "float32", (1,)),), Discrete(2))
_CPU = torch.device("cpu")
_FEW, _MANY = 4, 2  # ranks that are simulated, with few and with many sessions each
_MANY_SESSIONS = 32
_SWITCH_S = 5e-4  # threads of an interpreter take turns of this length
_STREAM_S = 1e-4  # two streams of a device take turns of this length
_SUMS = (
    *("messages", "bytes", "batches", "batched", "acting", "turns", "turned", "blocked"),
    *("updates", "update_s", "update_rows", "lags", "peers"),
)


@dataclass
class Limits:
    """Length of a simulation.

    Attributes:
        messages: number of messages after which it ends, with the next update if there is one.
        warm: number of messages before the measurement begins, at the end of an update if there is
            one.
        least: smallest number of messages measured.
        updates: smallest number of updates measured, if the messages suffice.
    """

    messages: int = 15_000
    warm: int = 2_000
    least: int = 5_000
    updates: int = 12


class CountedReplay(ReplayStorage):
    """A replay that counts transitions and updates and keeps no transition: nothing is drawn."""

    def __init__(self, settings: Replays) -> None:
        """Make an empty replay."""
        config = ReplayConfig(
            capacity_rows=max(settings.start_rows, settings.unroll_steps),
            start_rows=settings.start_rows,
            batch_size=1,
            update_interval=settings.interval,
            updates_per_interval=settings.updates,
            unroll_steps=settings.unroll_steps,
        )
        super().__init__(config, _SPEC, 1.0, settings.ahead, _CPU, {}, 0)
        self._has_transitions = True

    @override
    def add(self, unroll: Unroll) -> None:
        self.release(unroll)
        self.inserted += unroll.num_envs * unroll.transitions

    @override
    def sample(self, version: int, timeout_s: float) -> None:
        self._updates += 1


def make_storage(settings: Flight | Replays) -> RolloutStorage | CountedReplay:
    """Build the storage of an algorithm."""
    if isinstance(settings, Replays):
        return CountedReplay(settings)
    return RolloutStorage(
        _SPEC,
        settings.unroll_steps,
        1,
        settings.max_policy_lag,
        _CPU,
        unrolls_per_update=settings.unrolls_per_update,
    )


@dataclass(slots=True, eq=False)
class _Session:
    """A share of a worker's environments."""

    rank: "_Rank"
    worker: Thread
    io: Thread  # of gRPC, on the learner's side
    unroll: Unroll | None = None
    fresh: bool = True  # the request is not stored yet
    since: float = -1.0  # when it was made to wait for the learner
    answered: float = -1.0


class _Rank:
    """One learner: its threads and its storage."""

    def __init__(self, system: System, pool: Pool, device: Pool | None) -> None:
        self.device = device
        self.interpreter, self.copies = Thread(pool), Thread(pool)
        self.policy = Thread(device or pool)
        self.learners = [Thread(device or pool)]
        if device is None:
            self.learners += [Thread(pool) for _ in range(system.costs.threads - 1)]
        self.storage = make_storage(system.learning)
        self.batch: Any = None  # of the update under way
        self.pending: deque[_Session] = deque()
        self.blocked: list[_Session] = []
        self.served: list[_Session] = []
        self.acting = False
        self.updating = False
        self.waiting = False
        self.version = 0
        self.sessions = 0
        self.left = 0  # threads of an update that are still at work
        self.began = 0.0
        self.free_at = 0.0
        self.serving = 0.0


class Simulation:
    """One run of the model. Of many equal ranks it simulates some, which stand for all."""

    def __init__(self, system: System, limits: Limits | None = None) -> None:
        """Set up the simulation."""
        self.system, self.limits = system, limits or Limits()
        self.engine = Engine()
        ranks = system.ranks
        many = system.workers * system.sessions > _MANY_SESSIONS * ranks
        self.together = min(ranks, _MANY if many else _FEW)
        share = self.together / ranks
        whole = math.floor(system.others)  # processors that other programs never leave
        self.pool = Pool(self.engine, max(1, round((system.cores - whole) * share)))
        if part := system.others - whole:
            self._continue((Thread(self.pool), SLICE_S / part, 0.0))
        self._random = random.Random(1)  # noqa: S311 - reproducible, not secret
        self._sigma = math.sqrt(math.log(1 + system.costs.jitter**2))
        self.ranks = []
        for _ in range(self.together):
            device = Pool(self.engine, 1, _STREAM_S) if system.costs.device else None
            self.ranks.append(_Rank(system, self.pool, device))
        self.sessions: list[_Session] = []
        self.workers: list[Thread] = []
        for i in range(max(self.together, round(system.workers * share))):
            worker = Thread(self.pool)
            self.workers.append(worker)
            rank = self.ranks[i % self.together]
            rank.sessions += system.sessions
            self.sessions += [
                _Session(rank, worker, Thread(self.pool)) for _ in range(system.sessions)
            ]
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._eager = 0.0  # updates that are to be eager and were not yet
        self._start: dict[str, float] | None = None

    def _continue(self, other: tuple[Thread, float, float]) -> None:
        """Use a slice for another program, and again after its period or, if late, at once."""
        thread, period, due = other
        following = thread, period, due + period

        def rest(_: object) -> None:
            late = self.engine.now - following[2]
            self.engine.after(max(0.0, -late), self._continue, following)

        thread.add(SLICE_S, rest)

    def run(self) -> Outcome:
        """Simulate the system and return the outcome."""
        system, engine = self.system, self.engine
        for session in self.sessions:
            self._step(session)
        engine.run()
        # Differences to the counters at the end of the warm-up, as rates and shares of the span.
        start = self._start or {}
        counts = {name: value - start.get(name, 0.0) for name, value in self._counts().items()}
        span = max(counts["seconds"], 1e-12)
        ranks, together = system.ranks, self.together
        rows = counts["messages"] * system.envs * ranks / together
        # Seconds of work in a second, at most.
        most = {"cores": self.pool.size, "workers": len(self.workers), "interpreter": together}
        most |= {"acting": together, "learning": together}
        if system.costs.device:
            most["device"] = together
        busy = {name: counts[name] / span / number for name, number in most.items()}
        if system.link_bytes_per_s:
            rate = counts["bytes"] / span / together
            busy["network"] = rate / system.link_bytes_per_s
        updates = counts["updates"]
        return Outcome(
            seconds=span,
            rows=rows / span,
            updates=updates / span / together,
            busy=busy,
            blocked=counts["blocked"] / span / len(self.sessions),
            peers=counts["peers"] / span / together,
            lag=counts["lags"] / max(updates, 1),
            batch=counts["batched"] / max(counts["batches"], 1),
            turn_s=counts["turned"] / max(counts["turns"], 1),
            update_s=counts["update_s"] / max(updates, 1),
            update_rows=counts["update_rows"] / max(updates, 1),
        )

    def _counts(self) -> dict[str, float]:
        """Read all counters now."""
        now, sums, ranks = self.engine.now, self._sums, self.ranks
        return sums | {
            "seconds": now,
            "cores": self.pool.used_s,
            "workers": sum(w.busy_s for w in self.workers),
            "interpreter": sum(r.interpreter.busy_s for r in ranks),
            "acting": sums["acting"] + sum(now - r.serving for r in ranks if r.acting),
            "learning": sums["update_s"] + sum(now - r.began for r in ranks if r.updating),
            "device": sum(r.device.used_s for r in ranks if r.device),
            "blocked": sums["blocked"] + sum(now - s.since for s in self.sessions if s.since >= 0),
        }

    def _look(self, *, updated: bool) -> None:
        """Begin or end the measurement; with learning under way both at the end of an update."""
        limits = self.limits
        if self._start is None:
            if self._sums["messages"] >= (limits.warm if updated else limits.messages):
                self._start = self._counts()
            return
        messages = self._sums["messages"] - self._start["messages"]
        updates = self._sums["updates"] - self._start["updates"]
        enough = updates >= limits.updates * self.together and messages >= limits.least
        enough |= messages >= limits.messages
        at_last = messages >= (2 * limits.messages if updates else limits.messages)
        self.engine.stopped = at_last or (updated and enough)

    def _jitter(self) -> float:
        """Draw a log-normal factor of mean 1."""
        return self._random.lognormvariate(-(self._sigma**2) / 2, self._sigma)

    # --- a session ----------------------------------------------------------------------------

    def _step(self, session: _Session) -> None:
        """Step the session's environments as soon as their worker is free."""
        costs = self.system.costs
        work = (costs.step_s + costs.step_row_s * self.system.envs) * self._jitter()
        session.worker.add(work, self._send, session)

    def _send(self, session: _Session) -> None:
        """Send the session's observations."""
        costs, link, now = self.system.costs, self.system.link_bytes_per_s, self.engine.now
        delay = costs.hop_s
        if link:
            rank = session.rank
            rank.free_at = max(rank.free_at, now) + costs.message_bytes / link
            delay += rank.free_at - now
        self._sums["bytes"] += costs.message_bytes
        self.engine.after(delay, self._arrive, session)

    def _arrive(self, session: _Session) -> None:
        """Receive the observations by gRPC."""
        self._run(session.io, self.system.costs.io_message_s, self._received, session)

    def _run(self, thread: Thread, work: float, done: Done, argument: object) -> None:
        """Queue work that may be none at all: then `done` is called at once."""
        if work:
            thread.add(work * self._jitter(), done, argument)
        else:
            done(argument)

    def _received(self, session: _Session) -> None:
        """Read the observations by the event loop."""
        work = self.system.costs.message_s * self._jitter()
        session.rank.interpreter.add(work, self._submit, session)

    def _submit(self, session: _Session) -> None:
        """Submit the session to the batcher."""
        self._sums["messages"] += 1
        session.rank.pending.append(session)
        self._serve(session.rank)
        self._look(updated=False)

    # --- acting -------------------------------------------------------------------------------

    def _serve(self, rank: _Rank) -> None:
        """Wake the inference thread, if it is free and there is a batch."""
        pending, system = rank.pending, self.system
        if rank.acting or not pending:
            return
        if system.sync and len(pending) < rank.sessions:
            return
        rank.acting, rank.serving = True, self.engine.now
        rank.interpreter.add(0.0, self._take, rank)

    def _take(self, rank: _Rank) -> None:
        """Take the pending sessions as a batch when the thread runs, and store their rows."""
        pending, system = rank.pending, self.system
        most = max(1, system.max_batch_envs // system.envs)
        batch = [pending.popleft() for _ in range(min(most, len(pending)))]
        filled = self._admit(rank, batch)
        for unroll in filled:
            rank.storage.add(unroll)
        costs = system.costs
        self._sums["batches"] += 1
        self._sums["batched"] += len(batch)
        work = (costs.batch_s + costs.batch_message_s * len(batch)) * self._jitter()
        rank.interpreter.add(work, self._copy, (rank, costs.copy_message_s * len(batch)))

    def _copy(self, what: tuple[_Rank, float]) -> None:
        """Copy a batch's observations, beside the interpreter."""
        rank, work = what
        self._run(rank.copies, work, self._learn_or_act, rank)

    def _admit(self, rank: _Rank, batch: list[_Session]) -> list[Unroll]:
        """Write rows; who may act is put into `served`, the others wait for the learner."""
        storage, envs, now = rank.storage, self.system.envs, self.engine.now
        filled: list[Unroll] = []
        rank.served = []
        for session in batch:
            unroll = session.unroll
            if session.fresh and unroll is not None:
                unroll.cursor += 1
                if unroll.full:
                    filled.append(unroll)
                    session.unroll = unroll = None
            session.fresh = False
            if unroll is None:
                if not storage.may_begin(filled):
                    rank.blocked.append(session)
                    if session.since < 0:
                        session.since = now
                    continue
                session.unroll = unroll = storage.begin(envs, 0, 0, filled)
                unroll.cursor = 1
            rank.served.append(session)
        return filled

    def _learn_or_act(self, rank: _Rank) -> None:
        """Learn, first if the two take turns, then act."""
        if rank.storage.ready:
            self._learn(rank)
            if self.system.sync:
                return
        self._act(rank)

    def _act(self, rank: _Rank) -> None:
        if not rank.served:
            self._acted(rank)
            return
        costs = self.system.costs
        work = (costs.act_s + costs.act_message_s * len(rank.served)) * self._jitter()
        rank.policy.add(work, self._acted, rank)

    def _acted(self, rank: _Rank) -> None:
        """Send the actions."""
        now, hop = self.engine.now, self.system.costs.hop_s
        for session in rank.served:
            assert session.unroll is not None
            session.unroll.act(rank.version, None)
            if session.since >= 0:
                self._sums["blocked"] += now - session.since
                session.since = -1.0
            elif session.answered >= 0:
                self._sums["turned"] += now - session.answered
                self._sums["turns"] += 1
            session.answered, session.fresh = now, True
            self.engine.after(hop, self._step, session)
        rank.served = []
        rank.acting = False
        self._sums["acting"] += now - rank.serving
        self._serve(rank)

    def _wake(self, rank: _Rank) -> None:
        """Wake blocked sessions of a rank that may continue."""
        if rank.blocked and rank.storage.may_begin():
            rank.pending.extend(rank.blocked)
            rank.blocked = []
            self._serve(rank)

    # --- learning -----------------------------------------------------------------------------

    def _learn(self, rank: _Rank) -> None:
        """Join the group's next update, if an update is due here and none is under way."""
        if rank.updating or rank.waiting or not rank.storage.ready:
            return
        dropped = rank.storage.dropped
        due = rank.storage.due(rank.version, 0.0)
        if rank.storage.dropped > dropped:  # rows that were too old made room
            self._wake(rank)
        if not due:
            return
        now = self.engine.now
        rank.waiting = True
        rank.began = now
        if all(r.waiting for r in self.ranks):
            self._begin_update()

    def _begin_update(self) -> None:
        """Begin an update on all ranks."""
        now, costs = self.engine.now, self.system.costs
        # An update is eager each time that the share of eager updates adds up to 1.
        self._eager += costs.eager
        eager = self._eager >= 1
        self._eager -= eager
        for rank in self.ranks:
            self._sums["peers"] += now - rank.began
            rank.waiting = False
            rank.updating = True
            rank.began = now
            rows = self._sample(rank)
            self._sums["update_rows"] += rows
            # More rows than the update is measured for: in proportion more minibatches.
            least = costs.update_rows / self.system.ranks
            times = max(1.0, rows / least) if least else 1.0
            work = costs.update_s * times + costs.update_row_s * rows
            launches = costs.update_eager_s if eager else costs.update_replays_s
            host = costs.update_host_s + launches * times
            rank.left = len(rank.learners) + bool(host)
            for thread in rank.learners:
                thread.add(work / len(rank.learners), self._learned, rank)
            if host:
                self._launch((rank, host))
            if not self.system.sync:
                self._wake(rank)

    def _sample(self, rank: _Rank) -> float:
        """Take an update's batch from the storage, note its lag, and return its rows."""
        rank.batch = rank.storage.sample(rank.version, 0.0)
        if isinstance(self.system.learning, Replays):
            return self.system.learning.batch_rows
        self._sums["lags"] += rank.version - fmean(rank.batch.version)
        return float(rank.batch.size)

    def _launch(self, left: tuple[_Rank, float]) -> None:
        """Use the interpreter for an update, in turns with the threads that serve."""
        rank, host = left
        if host <= _SWITCH_S:
            rank.interpreter.add(host, self._learned, rank)
        else:
            rank.interpreter.add(_SWITCH_S, self._launch, (rank, host - _SWITCH_S))

    def _learned(self, rank: _Rank) -> None:
        rank.left -= 1
        if not any(r.left for r in self.ranks):
            exchange = self.system.exchange_s
            self._sums["peers"] += exchange * self.together
            self.engine.after(exchange, self._end_update)

    def _end_update(self, _: object) -> None:
        now = self.engine.now
        for rank in self.ranks:
            rank.version += 1
            rank.updating = False
            rank.storage.done(rank.batch)
            self._sums["update_s"] += now - rank.began
            self._sums["updates"] += 1
        for rank in self.ranks:
            if self.system.sync:
                self._learn_or_act(rank)
            else:
                self._wake(rank)
                self._learn(rank)
        self._look(updated=True)
