"""Work in flight: how long unrolls are, how many an update takes, how many updates old rows may be.

The arithmetic is that of `murmur doctor`: environments and learner are two stations that work side
by side. N environments bring N / turn_s rows a second, the learner takes 1 / learn_s; the slower
one sets the rate. Neither waits if as many environments act as the learner keeps up with: while an
update runs, `RolloutStorage.may_begin` admits max_policy_lag * unrolls_per_update of them.
"""

import math
from dataclasses import dataclass

# An unroll whose length is not configured has at least this number of steps (fewer only where
# episodes are shorter): with GAE's usual 0.95 x 0.99 less would bootstrap most of a return. And at
# most that number: then an update takes several of one environment.
LEAST_STEPS, MOST_STEPS = 16, 128
_MOST_LAG = 4  # chosen only for a number of unrolls that is configured
_MARGIN = 1.25  # environments beyond those that keep the learner busy on average
_NEARLY = 0.85  # two stations as close as this wait for each other's jitter


@dataclass(frozen=True)
class Speed:
    """Measured speeds of environments and learner.

    Attributes:
        turn_s: seconds from one row of an environment to its next, while learning is not in the
            way: step, wire, queue and acting.
        learn_s: seconds of learning for one environment row.
    """

    turn_s: float
    learn_s: float


@dataclass(frozen=True)
class Flight:
    """Amount of work in flight. Configured: 0, and None for the lag, are to be chosen.

    Attributes:
        unroll_steps: L, transitions of an unroll.
        unrolls_per_update: unrolls that an update takes, at least.
        max_policy_lag: largest policy lag of an unroll.
    """

    unroll_steps: int
    unrolls_per_update: int
    max_policy_lag: int | None


@dataclass(frozen=True)
class Demand:
    """Demands that unrolls must meet.

    Attributes:
        rows: transitions of an update, all agents in one, at least.
        environments: number of environments that train.
        session: environments of the largest session: they are admitted together.
        max_episode_steps: longest episode of the spec, steps; 0: episodes have no end.
        remembers: the policy has a memory.
    """

    rows: int
    environments: int
    session: int = 1
    max_episode_steps: int = 0
    remembers: bool = False


def transitions_in(length: int, max_episode_steps: int) -> int:
    """Transitions among L steps of the longest episodes: one step of each leads from LAST to FIRST.

    0 for max_episode_steps: they have no end.
    """
    return length - (length // (max_episode_steps + 1) if max_episode_steps else 0)


def unroll_length(
    rows: int, environments: int, max_episode_steps: int, *, remembers: bool = False
) -> int:
    """L for which one unroll of each environment makes an update, within the bounds above.

    Args:
        rows: transitions of an update, all agents in one.
        environments: those that act at once; 0 if that is not known.
        max_episode_steps: longest episode of the spec, steps.
        remembers: the policy has a memory: an unroll holds an episode if that is not too long,
            since a critic's memory begins with it.
    """
    whole = max_episode_steps + 1  # an episode with its LAST row
    if not environments:
        return whole if max_episode_steps else MOST_STEPS
    least = MOST_STEPS if remembers else LEAST_STEPS
    least = min(least, whole) if max_episode_steps else least
    length = share = -(-rows // environments)
    while length < MOST_STEPS and transitions_in(length, max_episode_steps) < share:
        length += 1
    if length == max_episode_steps:
        length = whole
    return max(least, min(length, MOST_STEPS))


def unmeasured(demand: Demand, given: Flight, connected: int) -> Flight:
    """Choose what is not configured by the number of environments alone.

    Args:
        demand: demands on the unrolls, with the environments that act at once.
        given: configured values, which stay.
        connected: environments of which an update takes an unroll each, at least, where neither
            an unroll's length nor an update's unrolls are configured.
    """
    steps = demand.max_episode_steps
    length = given.unroll_steps or unroll_length(
        demand.rows,
        given.unrolls_per_update or demand.environments,
        steps,
        remembers=demand.remembers,
    )
    unrolls = math.ceil(demand.rows / transitions_in(length, steps))
    if given.unrolls_per_update:
        unrolls = max(unrolls, given.unrolls_per_update)
    elif not given.unroll_steps:
        unrolls = max(unrolls, connected)
    return Flight(length, unrolls, given.max_policy_lag)


def useful_environments(speed: Speed, environments: int, session: int = 1) -> int:
    """Environments that bring what the learner can take, in whole sessions; all if it takes more.

    n environments bring n / turn_s rows a second, the learner takes 1 / learn_s.
    """
    wanted = math.ceil(_MARGIN * speed.turn_s / speed.learn_s)
    return min(environments, session * math.ceil(wanted / session))


def plan(speed: Speed, demand: Demand, given: Flight) -> Flight:
    """Choose work in flight so that the slower side never waits and data stays fresh.

    An update takes one unroll of each environment that is of use: fewer than all where the
    environments bring more than the learner takes. Rows may be one update old: two if both are
    about as fast, so that neither waits whenever the other is late.

    Args:
        speed: measured speeds.
        demand: demands on the unrolls.
        given: configured values, which stay.
    """
    useful = useful_environments(speed, demand.environments, demand.session)
    steps = demand.max_episode_steps
    length = given.unroll_steps or unroll_length(
        demand.rows, given.unrolls_per_update or useful, steps, remembers=demand.remembers
    )
    least = math.ceil(demand.rows / transitions_in(length, steps))
    ratio = demand.environments * speed.learn_s / speed.turn_s  # learner's load, at their full rate
    even = 2 if min(ratio, 1 / ratio) > _NEARLY else 1
    if given.unrolls_per_update:
        unrolls = max(least, given.unrolls_per_update)
        lag = min(_MOST_LAG, max(even, math.ceil(useful / unrolls)))
    else:
        among = max(1, given.max_policy_lag or 1)
        unrolls = max(least, math.ceil(useful / among), demand.session)
        lag = even
    if given.max_policy_lag is not None:
        lag = given.max_policy_lag
    return Flight(length, unrolls, lag)
