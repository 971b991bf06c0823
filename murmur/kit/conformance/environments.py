"""Acts that the kit plays with a session that steps environments, in order."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.peer import Session
from murmur.kit.conformance.play import (
    GARBAGE,
    Act,
    Limits,
    Play,
    Record,
    action_message,
    encoded,
    welcome,
)
from murmur.kit.conformance.rows import RowRules, legal_action, row_digests
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ObservationCodec
from murmur.shared.wire.spec import MAX_ENVS, action_layout, first_difference, spec_from_proto
from murmur.shared.wire.timestep import StepType

_RESUMED_ROWS = 20  # compared after an episode was taken up
_LAST = int(StepType.LAST)


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
