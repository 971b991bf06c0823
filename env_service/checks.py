"""Checks of an environment by random play, which report violations of the contract."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.environment import (
    LONGER,
    RandomPolicy,
    VectorEnvironment,
    drawn_bounds,
    num_draws,
    random_action,
    zero_actions,
)
from murmur.shared.config.episode_options import EnvironmentConfig, Value
from murmur.shared.process.errors import EnvironmentFault, SpecError
from murmur.shared.wire.codec import RowCheck, timestep_layout
from murmur.shared.wire.notices import Notices
from murmur.shared.wire.seeding import episode_seeds, uniform
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    ActionSpec,
    Continuous,
    Discrete,
    EnvSpec,
    shown_agents,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep, named_arrays

# Seeds of training have 63 bits; both of these need all 32 when folded for another library.
_LOOK_SEEDS, _LOOK_ROWS = (11, 12, 13, 14), 40
_SHOWN = 8  # choices of an action, in a description
_LARGE_SEEDS = (2**31 + 7, 2**63 - 9)
_NUMBER = re.compile(r"[-+]?\b(\d[\d.e+-]*|nan|inf)\b")


# Plays: message and hint if a row differs, seeds, and `every` of _Check.play.
_PLAYS = (
    (
        "the same seed and actions after LAST gave another episode",
        "something of an episode outlives it, or a random number is not the seed's",
        (11, 12, 13),
        0,
    ),
    (
        "the same seed and actions in a new environment gave another episode",
        "every random number must come from the episode's seed, given to reset",
        (11, 12, 13),
        0,
    ),
    (
        "a restart in the middle of an episode leaves traces",
        "reset everything in a restart, not only after LAST",
        (12, 13, 11),
        3,
    ),
    (
        "an episode depends on the other copies",
        "nothing may be shared by copies, class attributes and global random numbers included",
        (13, 99, *_LARGE_SEEDS, 11),
        7,
    ),
)
_SHORT_ROWS = 40  # of all plays but the first


def check_environment(make: Callable[[int], VectorEnvironment], max_rows: int = 500) -> list[str]:
    """Find violations of the contract by playing random episodes.

    The contents of a row must follow from its episode's seed and actions alone. So the rows of one
    episode are recorded when it is first played, and compared when it is played again: in a new
    environment, after LAST, after a restart in its middle, alone, and beside other copies.

    Args:
        make: function that builds the environment with a number of copies.
        max_rows: steps of the longest play; the rest of a longer episode is not checked.

    Returns:
        messages about the problems; empty if none was found.
    """
    try:
        check = _Check(make)
    except SpecError as error:
        return [str(error)]
    if not check.seeded:  # its notice says what cannot be promised: rows alone are checked
        check.play("", "", [11, 12, 13], max_rows, 0)
        return check.found
    limit = check.max_episode_steps
    longest = min(2 * limit + 3, max_rows) if limit else max_rows  # twice the longest episode
    for number, (if_it_differs, hint, seeds, every) in enumerate(_PLAYS):
        rows = min(longest, _SHORT_ROWS) if number else longest
        same = check.play(if_it_differs, hint, seeds, rows, every)
        if number == 0 and same and check.longer:  # it did not get to what comes after LAST
            same = check.play(if_it_differs, hint, seeds, max_rows, every)
        if check.broken or (number == 1 and not same):
            break  # what else would be found follows from this
    return check.found


def assert_environment(make: Callable[[int], VectorEnvironment], max_rows: int = 500) -> None:
    """Fail a test if `check_environment` finds problems.

    Raises:
        AssertionError: if there are problems, listing them.
    """
    problems = check_environment(make, max_rows)
    if problems:
        raise AssertionError("the environment breaks its contract:\n  " + "\n  ".join(problems))


def describe_environment(make: Callable[[int], VectorEnvironment], rows: int = 500) -> list[str]:
    """Describe agents, observations, actions and episodes of an environment in a few lines.

    Args:
        make: function that builds the environment with a number of copies.
        rows: number of steps of random play.

    Returns:
        lines of text.

    Raises:
        EnvironmentFault: if a row of this play, which has other episodes than the check's, breaks
            the contract.
    """
    check = _Check(make)
    environment = check.make(1)
    spec, policy = environment.spec, RandomPolicy(environment)
    action = spec.action
    named = f": {shown_agents(spec.agents)}" if spec.agents else ""
    lines = [f"{spec.num_agents} agent{'s' * (spec.num_agents > 1)}{named}"]
    lines += [
        f"sees {o.name}: {o.dtype} {list(o.shape)}{'' if o.per_agent else ', one for all agents'}"
        for o in spec.observations
    ]
    lines.append(f"does {_described(action)}")
    if spec.takes_turns:
        lines.append("one agent acts at a time: turn_mask says which")
    lengths: list[int] = []
    returns: list[float] = []
    length, total = 0, 0.0
    row = check.only_row(environment.reset, 0, 0)
    episode = 0
    there: tuple[list[int], list[int]] = [], []  # agents on the first rows, on those before LAST
    for seed in range(1, rows):
        if AGENT_MASK in row.observation and row.step_type[0] != StepType.LAST:
            part = there[int(row.step_type[0] != StepType.FIRST)]
            part.append(int(row.observation[AGENT_MASK].sum()))
        over = np.array(row.step_type == StepType.LAST)
        length, episode = (0, seed) if over[0] else (length + 1, episode)
        step = partial(environment.step, policy.act(row), over)
        row = check.only_row(step, episode, length)
        total = 0.0 if over[0] else total + float(row.reward.sum())
        if row.step_type[0] == StepType.LAST:
            lengths.append(length)
            returns.append(total)
    environment.close()
    if present := _presence(*there, spec.num_agents):
        lines.insert(1, f"{present}, in {rows} random steps")
    if lengths:
        lines.append(
            f"episodes of {_range(lengths)} steps and returns of {_range(returns)} in {rows} "
            "random steps"
        )
    else:
        lines.append(
            f"no episode ended in {rows} random steps: if that is not intended, end it, or set "
            "max_episode_steps"
        )
    return lines


def _presence(first: Sequence[int], later: Sequence[int], num_agents: int) -> str:
    """Say how many agents there are at a time; "" if all are there always.

    Args:
        first: numbers of agents on the first rows of episodes.
        later: numbers of agents on rows between the first and the last.
        num_agents: number of agents of the environment.
    """
    if min([*first, *later], default=num_agents) == num_agents:
        return ""
    of_them = f"{_range(first)} of them as an episode begins"
    return f"{of_them}, {_range(later)} in its course" if later else of_them


def _range(values: Sequence[float]) -> str:
    """Format the least and the largest of values: 8 to 10, or 10 if they are the same."""
    least, most = f"{min(values):.4g}", f"{max(values):.4g}"
    return least if least == most else f"{least} to {most}"


@dataclass(frozen=True)
class Look:
    """Rows of an environment in one process, for comparison with another process.

    Attributes:
        agents: names of the agents, in the order of their rows; empty if it gives none.
        rows: rows of some episodes, each a digest by the array's name.
    """

    agents: tuple[str, ...]
    rows: list[dict[str, bytes]]

    def difference(self, other: "Look") -> str:
        """Return the problem if another process's rows differ; "" if they are equal."""
        if self.agents != other.agents:
            return (
                f"the agents are {', '.join(self.agents)} here and {', '.join(other.agents)} in "
                "another process: workers would disagree about which row is whose; do not take "
                "possible_agents from a set, or sort it"
            )
        for row, (here, there) in enumerate(zip(self.rows, other.rows, strict=False)):
            names = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
            if names:
                return (
                    "the same seed and actions in another process gave another episode: "
                    f"{', '.join(names)}; take nothing from the order of a set, from hash() or "
                    f"from the process (first in row {row})"
                )
        return ""


def episode_breaches(t: TimeStep, ages: NDArray[np.int64], limit: int) -> dict[str, str]:
    """Find breaches of what a discount and the length of an episode must be.

    Args:
        t: N rows.
        ages: [N] decisions since FIRST.
        limit: longest episode, decisions; 0: none.

    Returns:
        "discount" and "length" -> the first breach.
    """
    found: dict[str, str] = {}
    last = t.step_type == StepType.LAST
    for i in np.flatnonzero((t.discount != 1) & ~(last & (t.discount == 0))).tolist():
        kind, must = int(t.step_type[i]), "0 or 1" if last[i] else "1"
        name = StepType(kind).name if kind <= StepType.ABORTED else f"step_type {kind}"
        found.setdefault(
            "discount",
            f"environment {i} has discount {t.discount[i]:g} on {name}, where {must} must be",
        )
    for i in np.flatnonzero((limit > 0) & (ages >= limit) & (t.step_type < StepType.LAST)).tolist():
        found.setdefault(
            "length",
            f"environment {i} continues after {ages[i]} decisions, its spec says that {limit} is "
            "the longest",
        )
    return found


def digests(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    """Return the digest of each array, by its name."""
    return {k: blake2b(a.tobytes(), digest_size=8).digest() for k, a in arrays.items()}


def look_at(make: Callable[[int], VectorEnvironment]) -> Look:
    """Play some steps at random, for a comparison with another process.

    Args:
        make: function that builds the environment with a number of copies.
    """
    environment = make(len(_LOOK_SEEDS))
    rows = [
        digests({name: a for name, a in arrays.items() if not name.startswith("metric")})
        for arrays in (_random_rows(environment, {}) if environment.seeded else ())
    ]
    environment.close()
    return Look(environment.spec.agents, rows)


def _random_rows(
    environment: VectorEnvironment, options: Mapping[str, Value]
) -> Iterator[dict[str, Array]]:
    """Yield the arrays of rows of random play in which every episode has these options."""
    seeds = np.array(_LOOK_SEEDS, np.uint64)
    policy = RandomPolicy(environment)
    policy.seed(seeds)
    over = np.ones(len(seeds), np.bool_)
    action = zero_actions(environment.spec, len(seeds))
    for _ in range(_LOOK_ROWS):
        for i in np.flatnonzero(over).tolist() if options else ():
            environment.set_options(i, options)
        timestep = environment.step(action, over, seeds)
        yield named_arrays(timestep)
        action = policy.act(timestep)
        over = np.array(timestep.step_type >= StepType.LAST)


def idle_options(make: Callable[[int], VectorEnvironment], config: EnvironmentConfig) -> list[str]:
    """Find options of episodes that change nothing, by random play with two values of each.

    Args:
        make: function that builds the environment with a number of copies.
        config: configuration with the options.

    Returns:
        a sentence about each option that is without effect.
    """
    low, high = (
        config.values_at(share) | {name: x.draw(chance) for name, x in config.ranges.items()}
        for share, chance in ((0.0, 0.0), (1.0, np.nextafter(1.0, 0.0)))
    )
    usual, found = _played_with(make, low), []
    for name in config.names:
        if low[name] != high[name] and _played_with(make, {**low, name: high[name]}) == usual:
            both = [f"{x:g}" if isinstance(x, float) else str(x) for x in (low[name], high[name])]
            found.append(
                f"option '{name}' of an episode changes nothing in {_LOOK_ROWS} random steps: "
                f"{' and '.join(both)} give the same rows; use it in reset(), from options, or in "
                "set_options()"
            )
    return found


def _played_with(
    make: Callable[[int], VectorEnvironment], options: Mapping[str, Value]
) -> list[bytes]:
    """Return the rows of random play in which every episode has these options."""
    environment = make(len(_LOOK_SEEDS))
    arrays = (array for row in _random_rows(environment, options) for array in row.values())
    rows = [array.tobytes() for array in arrays]
    environment.close()
    return rows


class _Check:
    """The plays of one `check_environment`.

    Attributes:
        problems: message -> row in which the problem was first seen.
        broken: true if a play could not be continued.
        max_episode_steps: longest episode that the spec allows, steps.
        seeded: whether the environment's episodes follow from their seeds.
    """

    def __init__(self, make: Callable[[int], VectorEnvironment]) -> None:
        """Make one copy and read its spec."""
        self._make, self._notices = make, list[Notices]()
        self._seen: dict[tuple[int, int], dict[str, Array]] = {}  # (seed, age) -> row
        self._breaches: set[str] = set()  # kinds that are reported: messages without numbers
        self.problems: dict[str, int] = {}
        self.broken = False
        environment = self.make(1)
        self.spec = environment.spec
        self.max_episode_steps = self.spec.max_episode_steps
        self.seeded = environment.seeded
        self._close(environment)

    def make(self, num_envs: int) -> VectorEnvironment:
        """Make the environment with this number of copies."""
        environment = self._make(num_envs)
        self._notices.append(environment.notices)
        return environment

    @property
    def longer(self) -> bool:
        """Return whether episodes exceeded max_episode_steps, which then is only a hint."""
        return any(notices.said(*LONGER) for notices in self._notices)

    @property
    def found(self) -> list[str]:
        """Return the problems, each with the row in which it was first seen."""
        return [f"{problem} (first in row {row})" for problem, row in self.problems.items()]

    def play(
        self, if_it_differs: str, hint: str, seeds: Sequence[int], rows: int, every: int
    ) -> bool:
        """Play in a new environment of one copy per seed; each copy repeats its one seed.

        Args:
            if_it_differs: message if a row differs from the first play of its episode.
            hint: possible reason of a difference.
            seeds: [N] seeds of the copies.
            rows: number of steps.
            every: restart interval: copy i restarts in every (every + i)th row; 0: only after LAST.

        Returns:
            true if no row differed.
        """
        environment = self.make(len(seeds))
        try:
            different = self._play(environment, seeds, rows, every)
        finally:
            self._close(environment)
        if different is None:
            return True
        row, names = different
        self.problems.setdefault(f"{if_it_differs}: {', '.join(names)}; {hint}", row)
        return False

    def _close(self, environment: VectorEnvironment) -> None:
        try:
            environment.close()
        except Exception as error:
            self.problems.setdefault(f"close raises {type(error).__name__}: {error}", 0)

    def _stop(self, text: str, row: int) -> None:
        """Record a problem that ends the play."""
        self.problems.setdefault(text, row)
        self.broken = True

    def _play(
        self, environment: VectorEnvironment, seeds: Sequence[int], rows: int, every: int
    ) -> tuple[int, list[str]] | None:
        """Play in an environment; return the first row that differed and the arrays' names."""
        n = len(seeds)
        if environment.num_envs != n:
            self._stop(f"num_envs is {environment.num_envs} where {n} were asked for", 0)
            return None
        if environment.spec != self.spec:
            self.problems.setdefault("spec depends on the number of copies", 0)
        ages = np.zeros(n, np.int64)
        restart = np.ones(n, np.bool_)
        previous: TimeStep | None = None
        seeds_array = np.array(seeds, np.uint64)
        different = None
        for row in range(rows):
            garbage = episode_seeds(n + every, np.arange(n), np.full(n, row))
            draws = np.where(restart, garbage, episode_seeds(0, seeds_array, ages))
            mask = None if previous is None else previous.observation.get(ACTION_MASK)
            action = _with_ends(self.spec, draws, random_action(self.spec, draws, mask))
            for array in (action, restart, seeds_array):
                array.flags.writeable = False
            try:
                timestep = environment.step(action, restart, seeds_array)
            except EnvironmentFault as fault:
                self._stop(str(fault), row)
                return different
            except Exception as error:
                self._stop(f"step raises {type(error).__name__}: {error}", row)
                return different
            ages = np.where(restart, 0, ages + 1)
            if not self._check_arrays(timestep, n, row):
                self.broken = True
                return different
            self._check_rows(timestep, restart, ages, row)
            names = self._compare(timestep, seeds, ages) if self.seeded else []
            if names and different is None:
                different = row, names
            previous = timestep
            restart = np.array(timestep.step_type == StepType.LAST)
            if every:
                restart |= (row + 1) % (every + np.arange(n)) == 0
        return different

    def only_row(
        self, step: Callable[[NDArray[np.uint64]], TimeStep], seed: int, age: int
    ) -> TimeStep:
        """Step an environment of one copy, and check its row.

        Args:
            step: function from the seed to the next row.
            seed: seed of the episode under way.
            age: number of the row in its episode, 0 for FIRST.

        Raises:
            EnvironmentFault: for the first problem of the row.
        """
        where = f"in the episode with seed {seed} at step {age}"
        try:
            timestep = step(np.array([seed], np.uint64))
        except EnvironmentFault:
            raise  # says where
        except Exception as error:
            raise EnvironmentFault(
                f"step raises {type(error).__name__}: {error}, {where}"
            ) from error
        if self._check_arrays(timestep, 1, age):
            self._check_rows(timestep, np.array([age == 0]), np.array([age]), age)
        for problem in self.problems:
            raise EnvironmentFault(f"{problem}, {where}")
        return timestep

    def _check_arrays(self, timestep: TimeStep, n: int, row: int) -> bool:
        """Check names, shapes and dtypes; return whether they fit the spec."""
        layout = timestep_layout(self.spec, n)
        before = len(self.problems)
        arrays = named_arrays(timestep)
        for problem in layout.errors(arrays):
            self.problems.setdefault(problem, row)
        for name in arrays.keys() - set(layout.labels):
            self.problems.setdefault(f"{name} is not in the spec", row)
        return len(self.problems) == before

    def _check_rows(
        self, timestep: TimeStep, restart: NDArray[np.bool_], ages: NDArray[np.int64], row: int
    ) -> None:
        """Check the values of one row; report each kind of breach once."""
        breaches = RowCheck(self.spec, len(ages), received=False).broken(timestep, restart)
        limit = 0 if self.longer else self.max_episode_steps
        problems = [f"step returned {what}" for what in breaches.values()]
        for problem in (*problems, *episode_breaches(timestep, ages, limit).values()):
            kind = _NUMBER.sub("", problem)
            if kind not in self._breaches:
                self._breaches.add(kind)
                self.problems.setdefault(problem, row)

    def _compare(
        self, timestep: TimeStep, seeds: Sequence[int], ages: NDArray[np.int64]
    ) -> list[str]:
        """Compare each copy's row with the same row of the same episode, or record it.

        Returns:
            names of the arrays that differ in a copy.
        """
        arrays = named_arrays(timestep)
        differing: set[str] = set()
        for i, key in enumerate(zip(seeds, ages.tolist(), strict=True)):
            now = {
                name: array[i].copy()
                for name, array in arrays.items()
                if timestep.step_type[i] == StepType.LAST or not name.startswith("metric")
            }
            before = self._seen.setdefault(key, now)
            differing |= {
                name
                for name in before.keys() | now.keys()
                if name not in before
                or name not in now
                or not np.array_equal(
                    before[name], now[name], equal_nan=now[name].dtype.kind == "f"
                )
            }
        return sorted(differing)


def _described(action: ActionSpec) -> str:
    """Describe an agent's action, as in "one of 5 actions"."""
    if isinstance(action, Discrete):
        return f"one of {action.num_actions} actions"
    if isinstance(action, Continuous):
        return f"{action.size} numbers from {action.low:g} to {action.high:g}"
    choices = ", ".join(map(str, action.factors[:_SHOWN]))
    more = f" and {len(action.factors) - _SHOWN} more" if len(action.factors) > _SHOWN else ""
    several = "one" if len(action.factors) == 1 else "a choice each, one"
    parts = [f"{several} of {choices}{more} actions"] if action.factors else []
    bounds = Counter(zip(action.low, action.high, strict=True)).items()
    parts += [f"{count} numbers from {low:g} to {high:g}" for (low, high), count in bounds]
    return " and ".join(parts)


def _with_ends(spec: EnvSpec, draws: NDArray[np.uint64], action: Array) -> Array:
    """Move a quarter of the numbers of random actions to a bound of what is drawn.

    Rounding may exceed a bound there, and uniform draws almost never reach it.
    """
    if isinstance(spec.action, Discrete) or not spec.action.size:
        return action
    numbers = action[..., -spec.action.size :]
    drawn = num_draws(spec)  # the first gave `action`
    chance = uniform(draws, drawn + numbers[0].size)[drawn:].T.reshape(numbers.shape)
    low, high = drawn_bounds(spec.action)
    ends = np.where(chance < 1 / 2, low, high).astype(action.dtype)
    numbers[...] = np.where(abs(chance - 1 / 2) > 3 / 8, ends, numbers)
    return action
