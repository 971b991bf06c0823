"""`murmur check-env`: the test of an environment, in a process of its own.

An environment may hang or end its process; the caller still gets an answer.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from murmur.env_service.checks import (
    Look,
    check_environment,
    describe_environment,
    idle_options,
    look_at,
)
from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.episode_options import EpisodeOptions
from murmur.env_service.watchdog.descendants import (
    adopt_orphans,
    end_descendants,
    lead_session,
    marked,
)
from murmur.env_service.watchdog.faults import Heartbeat
from murmur.runs.settings import environment_config, environment_factory
from murmur.shared.config.episode_options import NO_ENVIRONMENT, EnvironmentConfig, Value
from murmur.shared.config.plugin_folders import look_in
from murmur.shared.process.errors import ConfigError, EnvironmentFault, MurmurError
from murmur.shared.process.process import die_with_parent, logger
from murmur.shared.wire.notices import PREFIX, Notices
from murmur.shared.wire.timestep import Array, TimeStep

HASH_SEED = "PYTHONHASHSEED"
_HASH_SEEDS = 9  # that are tried
_LOOK_EVERY_S = 0.1
_MOST_COPIES = 16  # more than any play of check_environment has
_WARM_UP_TURNS = 4  # begins and ends of the first two steps, in which an environment may load
_WARM_UP_PATIENCE = 3  # how many times longer they, and making the environment, may take
# In the heartbeat, in the place of "making": numba compiles; larger for each function.
_COMPILING = 3
_LONGEST_COMPILATION_S = 600.0  # of one function
_LONGEST_START_S = 120.0  # of the process, with the packages that it imports


@dataclass(frozen=True)
class Checked:
    """Result of the check of an environment.

    Attributes:
        problems: messages on breaches of the contract; none if it keeps the contract.
        description: description of its interface, if it keeps the contract.
        look: observations of this process, if it keeps the contract.
        notices: values that murmur changes, ignores or guesses; no failures.
    """

    problems: list[str]
    description: list[str]
    notices: list[str] = field(default_factory=list)
    look: Look | None = None


def check_apart(name: str, options: list[str], step_limit_s: float) -> Checked:
    """Check an environment in a child process, which is killed if a step takes too long.

    A second child looks at it with other hashes of strings: what depends on the order of a set
    differs there.

    Args:
        name: name that `environment_factory` takes.
        options: options that `environment_factory` takes.
        step_limit_s: longest time of a step.

    Raises:
        ConfigError: if there is no such environment or option.
        ModuleNotFoundError: if a package is missing.
    """
    first = os.environ.get(HASH_SEED, "")
    first = first if first.isdecimal() else "0"
    checked = _in_child(True, first, name, options, step_limit_s)
    if checked.look is None:
        return checked
    other = _other_hashes(checked.look.agents, first)
    second = _in_child(False, other, name, options, step_limit_s)
    problem = second.problems[0] if second.problems else ""
    if second.look is not None:
        problem = checked.look.difference(second.look)
    return replace(checked, problems=[problem], description=[]) if problem else checked


def _other_hashes(agents: tuple[str, ...], before: str) -> str:
    """Return a PYTHONHASHSEED with which a set of the agents, if there are some, has another order.

    Args:
        agents: names of the agents.
        before: PYTHONHASHSEED to differ from.
    """
    seeds = [str(seed) for seed in range(1, _HASH_SEEDS) if str(seed) != before]
    if len(agents) < 2:
        return seeds[0]
    first = _order(agents, before)
    return next((seed for seed in seeds if _order(agents, seed) != first), seeds[0])


def _order(agents: tuple[str, ...], hash_seed: str) -> bytes:
    """Return the order of a set of names in a process of this PYTHONHASHSEED."""
    command = [sys.executable, "-S", "-c", "import sys; print(list(set(sys.argv[1:])))", *agents]
    return subprocess.run(
        command, env=os.environ | {HASH_SEED: hash_seed}, capture_output=True, check=True
    ).stdout


def _in_child(
    whole: bool, hash_seed: str, name: str, options: list[str], step_limit_s: float
) -> Checked:
    """Look at an environment in a child process; if `whole`, check it there before."""
    context = get_context("spawn")
    memory = RawArray(ctypes.c_uint64, Heartbeat.size(_MOST_COPIES))
    heartbeat = Heartbeat(memory, _MOST_COPIES)
    here, there = context.Pipe(duplex=False)
    arguments = (whole, name, options, memory, there, os.getpid())
    process = context.Process(target=_work, args=arguments, name="check-env")
    adopt_orphans()
    resource_tracker.ensure_running()  # else it would bear the mark
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    with marked(mark, **{HASH_SEED: hash_seed}):
        process.start()
    assert process.pid is not None
    there.close()  # so that `here` ends with the child
    try:
        position, still_s, looked = heartbeat.position, 0.0, time.monotonic()
        while not here.poll(_LOOK_EVERY_S):
            # Time that this process does not see pass, on a stopped or full machine, is no step's.
            now = time.monotonic()
            still_s, looked = still_s + min(now - looked, 2 * _LOOK_EVERY_S), now
            if heartbeat.position != position:
                position, still_s = heartbeat.position, 0.0
            elif still_s > patience_s(heartbeat, step_limit_s):
                return Checked([_too_long(heartbeat, still_s)], [])
        result = here.recv()
    except EOFError:
        process.join()
        return Checked([_gone(heartbeat, process.exitcode or 0)], [])
    finally:
        process.kill()
        process.join()
        end_descendants(process.pid, mark)
        here.close()
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Checked)
    return result


def patience_s(heartbeat: Heartbeat, step_limit_s: float) -> float:
    """Return how long the child may stay at its position [s]."""
    turn, at, making, _ = heartbeat.position
    if making >= _COMPILING:
        return _LONGEST_COMPILATION_S
    if turn == making == 0:
        return max(_LONGEST_START_S, _WARM_UP_PATIENCE * step_limit_s)
    slow = turn % 2 == 0 or heartbeat.making or (turn < _WARM_UP_TURNS and at < 0)
    return step_limit_s * (_WARM_UP_PATIENCE if slow else 1)


def _too_long(heartbeat: Heartbeat, seconds: float) -> str:
    if heartbeat.turns % 2 == 0:
        return (
            f"the environment took longer than {seconds:.0f} s to be made: its import, factory, "
            "__init__ or first reset() hangs; or raise --step-limit"
        )
    return (
        f"a step took longer than {seconds:.0f} s, {heartbeat.where()}: it hangs; or, if steps do "
        "take so long, raise --step-limit here and env_server.step_timeout_s in training"
    )


def _gone(heartbeat: Heartbeat, code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    where = heartbeat.where() if heartbeat.turns % 2 else "while it was made"
    return (
        f"the process {how} {where}: an environment must not end its process (sys.exit, "
        "os._exit, a crash of its simulator)"
    )


def _raised(heartbeat: Heartbeat, error: Exception) -> str:
    """Return a message on an exception outside a step; the check reports those in a step."""
    last = f"; its last step was {heartbeat.where()}" if heartbeat.turns else ""
    return (
        f"raised {type(error).__name__}: {error}, while it was made or what it has and returned "
        f"was looked at{last}"
    )


def _work(
    whole: bool,
    name: str,
    options: list[str],
    memory: Any,  # noqa: ANN401 - a ctypes array
    to: Connection,
    parent: int,
) -> None:
    """Look at an environment in a child; send back the result, or the error that it raised."""
    die_with_parent(parent)
    lead_session()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which kills us
    look_in()
    heartbeat = Heartbeat(memory, _MOST_COPIES)
    result: object
    notices: list[Notices] = []
    idle: list[str] = []
    logger.addFilter(lambda record: not record.getMessage().startswith(PREFIX))  # printed below
    try:
        with compilation_shown(heartbeat):
            factory, config = environment_factory(name, options), environment_config(name, options)
            heartbeat.note_start()
            watched = partial(_Watched, factory, heartbeat, notices)
            make = partial(watched, config)
            problems = check_environment(make) if whole else []
            description = describe_environment(make) if whole and not problems else []
            if description and config.names:
                idle = idle_options(partial(watched, NO_ENVIRONMENT), config)
            result = Checked(problems, description, look=None if problems else look_at(make))
    except EnvironmentFault as fault:
        result = Checked([str(fault)], [])
    except MurmurError as error:
        result = ConfigError(str(error))  # others may carry what cannot be sent
    except ModuleNotFoundError as error:
        result = error
    except Exception as error:
        result = Checked([_raised(heartbeat, error)], [])
    if isinstance(result, Checked):
        said = {(n.kind, n.subject): n.text for some in notices for n in some.all}
        result = replace(result, notices=[*said.values(), *idle])
    with contextlib.suppress(BrokenPipeError):
        to.send(result)


@contextlib.contextmanager
def compilation_shown(heartbeat: Heartbeat) -> Iterator[None]:
    """Show in the heartbeat when numba compiles, so that no step is blamed for it."""
    if find_spec("numba") is None:
        yield
        return
    from numba.core import event

    class Marks(event.Listener):  # type: ignore[misc]
        """Callbacks of numba's compiler, under its lock; compilations nest."""

        depth = count = before = 0

        def on_start(self, _: object) -> None:
            if self.depth == 0:
                self.before = int(heartbeat.at[1])
            self.depth += 1
            self.show()

        def on_end(self, _: object) -> None:
            self.depth -= 1
            self.show()

        def show(self) -> None:
            self.count += 1
            heartbeat.at[1] = _COMPILING + self.count if self.depth else self.before

    with event.install_listener("numba:compile", Marks()):
        yield


class _Watched(VectorEnvironment):
    """An environment that notes its steps in a heartbeat, and gives episodes their options."""

    def __init__(
        self,
        make: Callable[[int], VectorEnvironment],
        heartbeat: Heartbeat,
        notices: list[Notices],
        config: EnvironmentConfig,
        num_envs: int,
    ) -> None:
        self._environment = environment = make(num_envs)
        notices.append(environment.notices)
        self._options = EpisodeOptions(config, num_envs, config.values_at(0.0))
        self._options.require(environment)
        self.spec, self.num_envs = environment.spec, environment.num_envs
        self.seeded = environment.seeded
        self._part = heartbeat.part(0, self.num_envs)
        self.notices = environment.notices
        environment.watch(self._part.at)

    @override
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        self._part.seeds[restart] = seeds[restart]
        self._part.steps[:] += 1
        self._part.steps[restart] = 0
        self._part.enter()
        try:
            if self._options.any:
                self._options.give(self._environment, restart, seeds)
            timestep = self._environment.step(action, restart, seeds)
        except Exception:
            self._part.leave()
            raise
        self._part.leave()  # not after SystemExit: the heartbeat then says where it came from
        return timestep

    @override
    def set_options(self, index: int, options: Mapping[str, Value]) -> None:
        self._environment.set_options(index, options)

    @override
    def close(self) -> None:
        self._environment.close()
