"""Acts that the kit plays with a session that steps environments, and what its rows must be."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.checks import digests, episode_breaches
from murmur.env_service.environment import LONGER, random_action
from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.peer import Session
from murmur.kit.conformance.play import GARBAGE, VERSION, Act, Limits, Stream, welcome
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec, ObservationCodec, RowCheck, varint
from murmur.shared.wire.spec import (
    ACTION_MASK,
    MAX_ENVS,
    EnvSpec,
    action_layout,
    first_difference,
    spec_from_proto,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep, named_arrays

_RESUMED_ROWS = 20  # compared after an episode was taken up
_FIRST, _LAST, _ABORTED = int(StepType.FIRST), int(StepType.LAST), int(StepType.ABORTED)


@dataclass
class Record:
    """The first play, to compare others with; row r is the r-th message.

    Attributes:
        rows: digests of every array, by row and environment.
        step_types: [N] step types by row.
        actions: answers to the rows.
    """

    rows: list[list[dict[str, bytes]]] = field(default_factory=list)
    step_types: list[Array] = field(default_factory=list)
    actions: list[Array] = field(default_factory=list)

    def ends(self, i: int) -> list[int]:
        """Return the rows in which an episode of environment i has ended."""
        return [r for r, kinds in enumerate(self.step_types) if kinds[i] == _LAST]

    def known(self, i: int) -> int:
        """Return the number of rows of environment i before its first failure."""
        failed = (r for r, kinds in enumerate(self.step_types) if kinds[i] == _ABORTED)
        return next(failed, len(self.rows))

    def points(self, i: int) -> list[tuple[int, int, int]]:
        """Return resumption points of environment i: (episode, its first row, the row to reach)."""
        known, ends = self.known(i), self.ends(i)
        end = ends[0] if ends else known - 1
        points = [(0, 0, min(max(1, end // 2), known - 1))]
        if ends and end + 1 < known:
            points.append((0, 0, end + 1))  # the last action answered LAST
            last = ends[1] if len(ends) > 1 else known - 1
            points.append((1, end + 1, end + 1 + (last - end) // 2))
        if ends and end < known:
            points.append((0, 0, end))
        points.append((0, 0, 0))
        return [(e, b, t) for e, b, t in points if 0 <= t < known] or [(0, 0, 0)]


class RowRules:
    """Checks of the rows of one stream by the contract, one message after another.

    Attributes:
        spec: specification of its environments.
        num_envs: number of environments, N.
        checklist: checklist that receives the findings.
        longer: True if a notice said that episodes exceed max_episode_steps.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, checklist: Checklist, fresh: bool) -> None:
        """Begin a stream.

        Args:
            spec: specification of its environments.
            num_envs: number of environments, N.
            checklist: checklist that receives the findings.
            fresh: True if all episodes begin here; else Welcome says that some are under way.
        """
        self.spec = spec
        self.num_envs = num_envs
        self.checklist = checklist
        self._check = RowCheck(spec, num_envs)  # a learner's
        self._row, self.longer = 0, False
        # [N] by the last row; None: not known
        self._ended: NDArray[np.bool_] | None = np.ones(num_envs, np.bool_) if fresh else None
        # [N] decisions since FIRST; negative: not known
        self._age = np.full(num_envs, -1 if fresh else -(1 << 40))

    def examine(self, t: TimeStep) -> None:
        """Check N rows by every rule."""
        self._row += 1
        self._age = np.where(t.step_type == _FIRST, 0, self._age + 1)
        broken = self._check.broken(t, self._ended).items()
        self._hold("rows", next((f"environment {i} returned {what}" for i, what in broken), None))
        limit = 0 if self.longer else self.spec.max_episode_steps
        breaches = episode_breaches(t, self._age, limit)
        self._hold("length", breaches.get("length"))
        self._hold("discount", breaches.get("discount"))
        if (t.step_type == _ABORTED).any():
            self._hold("aborted", _aborted(t))
        self._ended = t.step_type >= _LAST

    def _hold(self, key: str, problem: str | None) -> None:
        self.checklist.note(key, problem and f"row {self._row}: {problem}")


class Play(Stream):
    """Rows and answers of one stream of environments."""

    def __init__(self, rules: RowRules, session: Session, patience_s: float) -> None:
        """Begin a stream.

        Args:
            rules: rules of its rows.
            session: session of the stream.
            patience_s: longest wait for one message.
        """
        super().__init__(session, rules.checklist, patience_s)
        self._rules, self.sequence = rules, 0
        self._observations = ObservationCodec(rules.spec, rules.num_envs)
        self._actions = ActionCodec(rules.spec, rules.num_envs)

    async def row(self) -> TimeStep:
        """Read the next Observation and check it by the rules.

        Raises:
            Ended: if the stream ends.
            Silent: if nothing comes in time.
            Unplayable: if it cannot be read.
        """
        self.sequence += 1
        name, read = f"message {self.sequence}", self._observations.receive
        sequence, timestep = await self.receive("size", name, read)
        wrong = f"message {self.sequence} of a stream has the number {sequence}"
        self.checklist.note("sequence", wrong if sequence != self.sequence else None)
        self.sequence = sequence  # continue from there: once is enough to know
        if any((n.kind, n.subject) == LONGER for n in self.session.notices):
            self._rules.longer = True
        self._rules.examine(timestep)
        return timestep

    async def answer(self, action: Array, encoding: int = 0) -> None:
        """Send an Action: 0 as murmur writes it, 1 without zero fields, 2 in another order."""
        early = f"message {self.sequence + 1} came before {self.sequence} was answered"
        self.checklist.note("lockstep", early if self.session.unread else None)
        if encoding == 0:
            message = self._actions.pack(self.sequence, VERSION, action)
        else:
            message = action_message(self.sequence, encoded(action))
        if encoding == 2:
            arrays = pb.Action(arrays=encoded(action)).SerializeToString()
            counters = pb.Action(sequence=self.sequence, policy_version=7).SerializeToString()
            inner = arrays + counters
            message = b"\x12" + varint(len(inner)) + inner
        await self.session.write(message)


class EnvironmentPlayer:
    """Player of the environments that a session's first Hello announces.

    Attributes:
        acts: acts in order, one for each stream.
        wrong_answers: messages by what is wrong in the last one, which must end the server.
    """

    def __init__(self, hello: pb.Hello, checklist: Checklist, limits: Limits) -> None:
        """Prepare to play.

        Raises:
            SpecError: if there can be no such environments.
        """
        self._spec, self._num_envs = spec_from_proto(hello.spec), hello.num_envs
        ObservationCodec(self._spec, self._num_envs)
        self._checklist, self._limits = checklist, limits
        self._random = np.random.default_rng(0)
        self._record = Record()
        self.acts = (
            Act("first play", self._first_play),
            Act("another play", self._another_play, "encodings"),
            Act("episodes under way", lambda session: self._resume(session, 0)),
            Act("episodes under way, elsewhere", lambda session: self._resume(session, 1)),
            Act("episodes under way, a third time", lambda session: self._resume(session, 2)),
            Act("a few rows", self._few_rows),
        )
        self.wrong_answers = self._wrong_answers()

    def check_hello(self, hello: pb.Hello) -> str | None:
        """Return the error in a Hello of this session; None: there is none.

        Raises:
            SpecError: if there can be no such environments.
        """
        if not 1 <= hello.num_envs <= MAX_ENVS:
            return f"num_envs is {hello.num_envs}, not 1 to {MAX_ENVS}"
        spec = spec_from_proto(hello.spec)
        if (spec, hello.num_envs) != (self._spec, self._num_envs):
            difference = first_difference(self._spec, spec)
            return "spec or num_envs differ from those of the session's first Hello" + (
                f": {difference} (here: the first Hello)" if difference else ""
            )
        return None

    async def until_ended(self, session: Session, stop: Callable[[], None]) -> None:
        """Play until the server ends the stream, as `stop` asks it after the first row.

        Raises:
            Ended: when it does.
            Silent: if it does not, and says no more.
        """
        play = await self._begin(session)
        await self._step(play)
        stop()
        while True:
            await self._step(play)

    def _wrong_answers(self) -> dict[str, tuple[bytes, ...]]:
        n = self._num_envs
        dtype, shape = action_layout(self._spec.action)
        zeros = encoded(np.zeros((n, self._spec.num_agents, *shape), dtype))
        right, torn = welcome(n), pb.SlotStart(actions=bytes(len(zeros) // n + 1))
        return {
            "an Action with another sequence number": (right, action_message(2, zeros)),
            "an Action with a byte too few": (right, action_message(1, zeros[:-1])),
            "a Welcome for another number of environments": (welcome(n + 1),),
            "a Welcome whose actions are no whole number of actions": (welcome(n, [torn] * n),),
            "an Action instead of Welcome": (action_message(0, zeros),),
            "bytes that are no message": (GARBAGE,),
        }

    async def _first_play(self, session: Session) -> None:
        """Play episodes from their beginning, without faults."""
        await asyncio.sleep(self._limits.delay_s)  # Welcome keeps it waiting
        if session.unread:
            self._checklist.note("lockstep", "an Observation came before Welcome was sent")
        play = await self._begin(session)
        limits, record = self._limits, self._record
        enough = time.monotonic() + limits.play_s
        ends = np.zeros(self._num_envs, np.int64)
        while len(record.rows) < limits.rows:
            timestep = await play.row()
            record.rows.append(row_digests(timestep))
            record.step_types.append(timestep.step_type.copy())
            ends += timestep.step_type >= _LAST
            record.actions.append(legal_action(self._spec, timestep, self._random))
            if (ends.min() >= 2 or time.monotonic() > enough) and len(record.rows) >= 20:
                break
            if len(record.rows) == 10:
                await asyncio.sleep(limits.delay_s)
                self._checklist.note("patient")
            elif len(record.rows) % 8 == 0:
                await asyncio.sleep(0.02)  # time for a message that must not come
            await play.answer(record.actions[-1])

    async def _another_play(self, session: Session) -> None:
        """Repeat the play with other encodings; actions after LAST and ABORTED are arbitrary."""
        play = await self._begin(session)
        await self._compare(play, [0] * self._num_envs, "repeats", other_encodings=True)

    async def _resume(self, session: Session, variant: int) -> None:
        """Resume episodes under way, each environment at another point of the first play."""
        starts, targets = [], []
        for i in range(self._num_envs):
            choices = self._record.points(i)
            episode, begin, target = choices[(variant + i) % len(choices)]
            actions = self._record.actions[begin:target]
            done = b"".join(encoded(a[i]) for a in actions)
            starts.append(pb.SlotStart(episode=episode, actions=done))
            targets.append(target)
        await self._compare(await self._begin(session, starts), targets, "resumes")

    async def _compare(
        self, play: Play, targets: list[int], key: str, *, other_encodings: bool = False
    ) -> None:
        """Play on from these rows of the record with its actions, and compare what comes."""
        record = self._record
        problem, compared = None, 0
        for step in range(len(record.rows) if key == "repeats" else _RESUMED_ROWS):
            timestep = await play.row()
            found = row_digests(timestep)
            action = legal_action(self._spec, timestep, self._random)
            for i, target in enumerate(targets):
                at = target + step
                if at >= record.known(i):
                    continue
                compared += 1
                different = [k for k, v in record.rows[at][i].items() if found[i].get(k) != v]
                if different and problem is None:
                    problem = (
                        f"environment {i}, {step} rows after its start, which is row {target} of "
                        f"the first play: {different[0]} differs"
                    )
                if record.step_types[at][i] < _LAST:
                    action[i] = record.actions[at][i] if at < len(record.actions) else action[i]
            if all(t + step + 1 >= len(record.rows) for t in targets):
                break
            encoding = step % 3 if other_encodings else 0
            await play.answer(action, encoding)
        if other_encodings:
            self._checklist.note("encodings")
        if compared:
            self._checklist.note(key, problem)

    async def _few_rows(self, session: Session) -> None:
        """Play three rows, so that episodes are under way."""
        play = await self._begin(session)
        for _ in range(3):
            await self._step(play)

    async def _step(self, play: Play) -> None:
        await play.answer(legal_action(self._spec, await play.row(), self._random))

    async def _begin(self, session: Session, starts: Sequence[pb.SlotStart] = ()) -> Play:
        """Welcome the stream, to its first episodes or to those under way that `starts` says."""
        rules = RowRules(self._spec, self._num_envs, self._checklist, fresh=not starts)
        await session.write(welcome(self._num_envs, starts))
        return Play(rules, session, self._limits.patience_s)


def _aborted(t: TimeStep) -> str | None:
    for i in np.flatnonzero(t.step_type == _ABORTED).tolist():
        for label, array in named_arrays(t).items():
            if label == "step_type" or label.startswith("metric"):
                continue
            wanted = 1 if label in ("discount", f"observation '{ACTION_MASK}'") else 0
            if (array[i] != wanted).any():
                return f"environment {i} is ABORTED, but its {label} is not {wanted}"
    return None


def row_digests(t: TimeStep) -> list[dict[str, bytes]]:
    """Return for each of N rows: label -> digest of the array; metrics on LAST rows only."""
    arrays = named_arrays(t).items()
    return [
        digests({k: a[i] for k, a in arrays if kind == _LAST or not k.startswith("metric")})
        for i, kind in enumerate(t.step_type)
    ]


def legal_action(spec: EnvSpec, t: TimeStep, random: np.random.Generator) -> Array:
    """Draw a random action for every agent: [N, A] int32 or [N, A, U] float32."""
    draws = random.integers(2**63, size=len(t.step_type), dtype=np.uint64)
    return random_action(spec, draws, t.observation.get(ACTION_MASK))


def encoded(action: Array) -> bytes:
    """Encode an action for the wire: C order, little-endian."""
    return np.ascontiguousarray(action, action.dtype.newbyteorder("<")).tobytes()


def action_message(sequence: int, arrays: bytes) -> bytes:
    """Return an Action without a policy version."""
    action = pb.Action(sequence=sequence, arrays=arrays)
    return pb.LearnerMessage(action=action).SerializeToString()
