"""Environments that fail or hang: a fault in one ends only its episode.

A copy that raises, or returns values that its spec forbids, gets an ABORTED row: nothing is learned
from the step that led to it, and the copy starts its next episode in the following step. A fault of
one copy loses one episode; if the copy is not known (a vectorized environment that raises), all
copies are recreated. A step that hangs can only be ended with its process: the worker writes its
state to a `Heartbeat`, and its parent, which does not depend on the worker's interpreter lock,
reads it.
"""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.environment import (
    VectorEnvironment,
    blank_timestep,
    zero_actions,
)
from murmur.env_service.episode_options import EpisodeOptions
from murmur.shared.config.episode_options import NO_ENVIRONMENT
from murmur.shared.process.errors import EnvironmentFault
from murmur.shared.process.traces import error_message
from murmur.shared.wire.codec import RowCheck, timestep_layout
from murmur.shared.wire.notices import Notices
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import Array, StepType, TimeStep, named_arrays

logger = logging.getLogger("murmur")

Reason = Literal["raised", "contents"]
Position = tuple[int, int, int, int]
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)  # NumPy compares faster with ints
_MINUTE_S = 60.0
_MAKE_AGAIN_S = 0.5  # between two attempts to make an environment that failed
_ONE = np.uint64(1)


@dataclass(frozen=True)
class Fault:
    """One fault of an environment.

    Attributes:
        copies: copies with an episode that the fault ended; none if the episode was over.
        reason: "raised", or "contents" for invalid returned values.
        message: one line with environment, fault, seed and step.
        error: exception that was raised, for the log.
    """

    copies: tuple[int, ...]
    reason: Reason
    message: str
    error: BaseException | None = None


class CopiesFailed(EnvironmentFault):
    """Failure of some copies in a step that advanced all others.

    An environment with independent objects as copies raises it from `step`; it must recreate the
    failed copies when `step` restarts them.

    Attributes:
        faults: faults of the failed copies.
        timestep: rows of all copies; those of failed copies are not used.
    """

    def __init__(self, faults: list[Fault], timestep: TimeStep) -> None:
        """Take the message of the first fault."""
        super().__init__(faults[0].message)
        self.faults, self.timestep = faults, timestep


class FaultCount:
    """Counter of one process's faults, which are logged; too many end the process."""

    def __init__(self, limit_per_minute: int, dropped: Callable[[str, int], None]) -> None:
        """Allow `limit_per_minute` faults; call `dropped(reason, episodes)` for each."""
        self._limit, self._dropped = limit_per_minute, dropped
        self._times: deque[float] = deque()

    def add(self, fault: Fault) -> None:
        """Count and log a fault.

        Raises:
            EnvironmentFault: if there were more than the limit within a minute.
        """
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > _MINUTE_S:
            self._times.popleft()
        self._dropped(fault.reason, len(fault.copies))
        if len(self._times) > self._limit:
            if fault.error is not None:
                logger.error("traceback of the last fault", exc_info=fault.error)
            count = len(self._times)
            raise EnvironmentFault(
                f"{count} fault{'s' * (count > 1)} within a minute, more than "
                f"env_server.max_faults_per_minute = {self._limit} allows; the last: "
                f"{fault.message}"
            ) from fault.error
        what = "episode" if len(fault.copies) == 1 else f"{len(fault.copies)} episodes"
        logger.error("%s; %s dropped", fault.message, what, exc_info=fault.error)


def _flag(word: int, meaning: str) -> property:
    """Make a flag in one word of a heartbeat."""

    def get(heartbeat: "Heartbeat") -> bool:
        return bool(heartbeat._words[word])

    def set_(heartbeat: "Heartbeat", value: bool) -> None:
        heartbeat._words[word] = value

    return property(get, set_, doc=meaning)


class Heartbeat:
    """The state of a worker, in shared memory that its parent reads.

    Written by the worker, read by the parent; each field is one aligned word. Each session of the
    worker has its own rows, one for each copy.

    Attributes:
        head: [3] number of begins and ends of steps (odd during a step), number of the first row of
            the session that steps, and number of its rows.
        at: [2] number of the copy being stepped, or -1, and not 0 while one is being made.
    """

    _HEAD = 8
    closing = _flag(5, "All sessions are over; the environments are closed and the worker exits.")
    # An exit code would not be enough: an environment may end the process with any code.
    gave_up = _flag(6, "The log has an error that the user must fix: a restart cannot help.")
    # SIGTERM would not be enough: an environment may have replaced its handler.
    stop_asked = _flag(7, "The parent asks the worker to end.")

    def __init__(self, memory: Any, num_envs: int) -> None:  # noqa: ANN401 - a buffer
        """Map the fields on `memory`, of `size(num_envs)` words of 64 bits."""
        self._words = np.frombuffer(memory, np.uint64, self._HEAD)
        self.head, self.at = self._words[0:3], self._words[3:5].view(np.int64)
        rows = np.frombuffer(memory, np.uint64, offset=8 * self._HEAD).reshape(2, num_envs)
        self._seeds, self._steps = rows[0], rows[1].view(np.int64)

    @classmethod
    def size(cls, num_envs: int) -> int:
        """Return the number of 64-bit words of a heartbeat of `num_envs` environments."""
        return cls._HEAD + 2 * num_envs

    @classmethod
    def private(cls, num_envs: int) -> "Heartbeat":
        """Make a heartbeat in private memory, which no process watches."""
        return cls(bytearray(8 * cls.size(num_envs)), num_envs)

    def part(self, first: int, num_envs: int) -> "SessionHeartbeat":
        """Return the rows of one session."""
        rows = slice(first, first + num_envs)
        seeds, steps = self._seeds[rows], self._steps[rows]
        return SessionHeartbeat(self, (first, num_envs), seeds, steps, self.at)

    def begin_making(self) -> None:
        """Mark that environments are being imported and made; set before the worker starts."""
        self.at[1] = 1

    def note_start(self) -> None:
        """Mark that the worker has imported murmur; from now on environments take the time."""
        self.at[1] = 2

    def end_making(self) -> None:
        """Mark that the environments are made."""
        self.at[1] = 0

    @property
    def making(self) -> bool:
        """Return whether an environment is being made, at the start or after a fault."""
        return bool(self.at[1])

    @property
    def turns(self) -> int:
        """Return the number of begins and ends of steps: odd during a step."""
        return int(self.head[0])

    @property
    def position(self) -> Position:
        """Return a value that changes whenever there is progress.

        Steps begun or ended, copy being stepped, 1 or 2 while one is made, 1 while all close.
        """
        return int(self.head[0]), int(self.at[0]), int(self.at[1]), int(self.closing)

    def where(self) -> str:
        """Describe the episode of the step under way."""
        first, count, at = int(self.head[1]), int(self.head[2]), int(self.at[0])
        if count == 1 or at >= 0:
            i = first + max(at, 0)
            return f"in the episode with seed {self._seeds[i]} at step {self._steps[i]}"
        seeds, steps = self._seeds[first : first + count], self._steps[first : first + count]
        return (
            f"in one of {count} episodes (seeds {', '.join(map(str, seeds))}) "
            f"at steps {steps.min()} to {steps.max()}"
        )

    def sample(self) -> tuple[int, int]:
        """Return index and split of the sample being read, in a worker that reads samples."""
        return int(self._seeds[0]), int(self._steps[0])


@dataclass(frozen=True)
class SessionHeartbeat:
    """A session's rows in the worker's heartbeat.

    Attributes:
        whole: heartbeat of the worker.
        rows: number of the first row, and number of rows.
        seeds: [N] seeds of the episodes under way.
        steps: [N] number of steps of each episode since FIRST.
        at: [2] number of the copy being stepped, or -1 if copies are not stepped one by one; and
            not 0 while an environment is being made.
    """

    whole: Heartbeat
    rows: tuple[int, int]
    seeds: NDArray[np.uint64]
    steps: NDArray[np.int64]
    at: NDArray[np.int64]

    def enter(self) -> None:
        """Mark that the session's environment begins a step, or is read by a baseline."""
        head, at = self.whole.head, self.at
        head[1], head[2] = self.rows
        at[0], at[1] = -1, 0
        head[0] += _ONE

    def leave(self) -> None:
        """Mark that the step has ended."""
        self.whole.head[0] += _ONE


class GuardedEnvironment:
    """N copies of an environment that may fail. Used by one thread.

    Attributes:
        spec, num_envs: attributes of the VectorEnvironment.
        environment: guarded environment; another object after it was recreated.
        seeds: [N] seeds of the episodes under way; the caller writes them before a restart.
        steps: [N] number of steps of each episode since FIRST.
        over: [N] bool, true if the last row was LAST or ABORTED: the next step must restart it.
        num_aborted: number of copies with an ABORTED row in the last step.
        options: options that differ between episodes.
    """

    def __init__(
        self,
        make: Callable[[], VectorEnvironment],
        faults: FaultCount,
        heartbeat: SessionHeartbeat | None = None,
        max_abs_reward: float = math.inf,
        options: EpisodeOptions | None = None,
    ) -> None:
        """Make the environment.

        Args:
            make: function that makes the environment, now and after a failure.
            faults: counter of the process's faults.
            heartbeat: heartbeat that the parent reads; None: no process watches.
            max_abs_reward: largest absolute reward that is no fault (learner.max_abs_reward).
            options: options that differ between episodes; None: there are none.
        """
        self._make, self._faults = make, faults
        self.environment = make()
        self.spec, self.num_envs = self.environment.spec, self.environment.num_envs
        n = self.num_envs
        self.options = options or EpisodeOptions(NO_ENVIRONMENT, n, {})
        self._heartbeat = heartbeat or Heartbeat.private(n).part(0, n)
        self.environment.watch(self._heartbeat.at)
        self.seeds, self.steps = self._heartbeat.seeds, self._heartbeat.steps
        self.over = np.zeros(n, np.bool_)
        self._layout = timestep_layout(self.spec, n)
        self._check = RowCheck(self.spec, n, max_abs_reward, received=False)
        self._failed: list[Fault] = []
        self.num_aborted = 0

    def step(self, action: Array, restart: NDArray[np.bool_]) -> TimeStep:
        """Step the copies; restarts use `seeds`. A fault gives ABORTED rows and does not raise.

        Raises:
            EnvironmentFault: if there were too many faults within a minute.
        """
        self._failed = []
        self.steps += 1
        self.steps[restart] = 0
        self._heartbeat.enter()
        try:
            try:
                if self.options.any:
                    self.options.give(self.environment, restart, self.seeds)
                timestep = self.environment.step(action, restart, self.seeds)
            except CopiesFailed as failure:
                self._failed += failure.faults
                timestep = failure.timestep
            usual = not self._failed and self._check.passes(timestep, restart)
            errors = () if usual else self._layout.errors(named_arrays(timestep))
            wrong = next(iter(errors), None)
        except BaseException as error:
            if not is_environments_fault(error):
                raise
            message = self._name(f"raised {error_message(error)}", self._all)
            timestep = self._anew(Fault(self._all, "raised", message, error))
        else:
            if wrong is not None:
                message = self._name(f"returned what its spec forbids: {wrong}", self._all)
                timestep = self._anew(Fault(self._all, "contents", message))
            elif not usual:
                timestep = self._without_broken(timestep, restart)
        finally:
            self._heartbeat.leave()
        self.num_aborted = 0
        for fault in self._failed:
            self.num_aborted += len(fault.copies)
            self._faults.add(fault)
        np.greater_equal(timestep.step_type, _LAST, out=self.over)
        return timestep

    def reset(self) -> TimeStep:
        """Start a new episode in every copy, from `seeds`; see `step`."""
        action = zero_actions(self.spec, self.num_envs)
        return self.step(action, np.ones(self.num_envs, np.bool_))

    def _without_broken(self, timestep: TimeStep, restart: NDArray[np.bool_]) -> TimeStep:
        """Return the rows with those of failed copies ABORTED, and of copies with invalid rows."""
        failed = {i for fault in self._failed for i in fault.copies}
        broken = self._check.broken(timestep, restart)
        broken = {i: what for i, what in broken.items() if i not in failed}
        if broken:
            failed |= broken.keys()
            message = f"returned {next(iter(broken.values()))}"
            fault = Fault(tuple(broken), "contents", self._name(message, tuple(broken)))
            self._failed.append(fault)
        return aborted_rows(timestep, sorted(failed)) if failed else timestep

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.num_envs))

    def _name(self, what: str, copies: tuple[int, ...]) -> str:
        """Return a whole sentence about a fault of some copies."""
        if len(copies) == self.num_envs:
            where = self._heartbeat.whole.where()
        else:
            i = copies[0]
            where = f"in the episode with seed {self.seeds[i]} at step {self.steps[i]}"
            where += f" and in {len(copies) - 1} others" if len(copies) > 1 else ""
        return f"environment '{self.spec.name}' {what}, {where}"

    def _anew(self, fault: Fault) -> TimeStep:
        """Recreate the whole environment; return a time step of ABORTED rows."""
        self._failed.append(fault)
        close_quietly(self.environment)
        self._heartbeat.whole.begin_making()
        self.environment = self._make_again()
        self._heartbeat.whole.end_making()
        self.environment.watch(self._heartbeat.at)
        return aborted_rows(blank_timestep(self.spec, self.num_envs), list(self._all))

    def _make_again(self) -> VectorEnvironment:
        """Make another environment; retry after a pause if that raises.

        Raises:
            EnvironmentFault: if there were too many faults within a minute.
        """
        while True:
            try:
                return self._make()
            except BaseException as error:
                if not is_environments_fault(error):
                    raise
                message = (
                    f"environment '{self.spec.name}' raised {error_message(error)} when recreated"
                )
                self._faults.add(Fault((), "raised", message, error))
                time.sleep(_MAKE_AGAIN_S)

    @property
    def notices(self) -> Notices:
        """Return the environment's notices."""
        return self.environment.notices

    @contextlib.contextmanager
    def watched(self, *, making: bool = False) -> Iterator[None]:
        """Watch code that reads the environment: a hang ends the worker, as in a step.

        Args:
            making: true to allow env_server.start_timeout_s, as for making environments.
        """
        self._heartbeat.enter()
        if making:
            self._heartbeat.whole.begin_making()
        try:
            yield
        finally:
            if making:
                self._heartbeat.whole.end_making()
            self._heartbeat.leave()

    def close(self) -> None:
        """Close the environment; log a failure, because finished episodes still count."""
        try:
            self.environment.close()
        except (Exception, SystemExit) as error:
            message = (
                f"environment '{self.spec.name}' raised {error_message(error)} when it was closed"
            )
            logger.error(message, exc_info=error)


def close_quietly(environment: Any) -> None:  # noqa: ANN401 - murmur's or another library's
    """Close an environment that has failed already; ignore further errors."""
    with contextlib.suppress(Exception, SystemExit):
        environment.close()


def is_environments_fault(error: BaseException) -> bool:
    """Return whether an exception is the environment's fault: all but the user's Ctrl-C.

    sys.exit() ends an episode, not the worker. Workers ignore SIGINT, so a KeyboardInterrupt in
    one comes from an environment.
    """
    interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
    return not interrupted or signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def aborted_rows(timestep: TimeStep, copies: list[int]) -> TimeStep:
    """Return the rows with those of some copies replaced: ABORTED, zeros, every action legal."""
    aborted = replace(
        timestep,
        step_type=timestep.step_type.copy(),
        reward=timestep.reward.copy(),
        discount=timestep.discount.copy(),
        observation={name: array.copy() for name, array in timestep.observation.items()},
        metrics={name: array.copy() for name, array in timestep.metrics.items()},
    )
    for name, array in named_arrays(aborted).items():
        array[copies] = 1 if name in ("discount", f"observation '{ACTION_MASK}'") else 0
    aborted.step_type[copies] = _ABORTED
    return aborted
