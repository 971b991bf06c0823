"""Stagnation: returns that stay where an untrained policy's were, with the likeliest causes.

Returns alone do not tell a slow start from a mistake. So a run counts as stagnant only if, beside
its returns, a second sign agrees: a setting, a loss or a batch that would explain it. All of it is
a function of figures; the learner asks once a third of the budget is spent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from murmur.learner_service.telemetry.statistics import FEWEST, Statistics, number_text

KIND = "not_learning"  # of the notice
SHARE = 1 / 3  # of the budget, after which a run is judged
UPDATES, EPISODES = 500, 2000  # after which a run without a budget is judged, both
_SIGN = 40  # least weight of a cause that counts as a second sign
_MOST = 3  # causes that are named
_EXPLORED = 0.25  # of the way that epsilon has to fall, at which acting shows what was learned
_WAIT = 2 / 3  # of the budget: no schedule of exploration that lasts longer is waited for


class Cause(NamedTuple):
    """A cause that the figures speak for.

    Attributes:
        weight: likelihood, 0 to 100; from 40 on it is a sign of its own.
        found: figures that speak for it.
        key: configuration key that it hangs on.
        remedy: change to try, with the key.
    """

    weight: float
    found: str
    key: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """Figures of a run under way.

    Attributes:
        record: newest record of progress: counts, "losses".
        options: options of the algorithm, resolved.
        untrained: returns of episodes that began before the first update.
        recent: returns of the latest episodes that began later.
        done: share of the budget that is spent; None: there is no budget.
        budget: the budget, as it is configured.
        first: losses of the first update.
        losses: losses of the latest updates; means.
        lengths: steps of the latest episodes; None: the environment does not tell.
        evaluated: (first, latest) results of greedy evaluations, higher is better: of each metric
            that counts.
        competing: whether agents are rewarded at each other's expense.
        fine_tuned: whether the run began with a trained policy.
        frozen: whether no weight is trained.
        at_bounds: share of actions' numbers at their bounds; None: actions hold no numbers.
        constant: whether all observations of an update were the same.
    """

    record: Mapping[str, Any]
    options: Mapping[str, Any]
    untrained: Statistics
    recent: Statistics
    done: float | None = None
    budget: str = ""
    first: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    lengths: Statistics | None = None
    evaluated: tuple[tuple[Statistics, Statistics], ...] = ()
    competing: bool = False
    fine_tuned: bool = False
    frozen: bool = False
    at_bounds: float | None = None
    constant: bool = False

    @property
    def replay(self) -> Mapping[str, Any]:
        """Options of the replay; empty without one."""
        return self.options.get("replay") or MappingProxyType({})

    @property
    def length(self) -> float:
        """Mean steps of an episode."""
        if self.lengths is not None:
            return max(1.0, self.lengths.mean)
        steps: int = self.record.get("env_steps_received", 0)
        episodes: int = self.record.get("episodes", 1)
        return max(1.0, steps / max(1, episodes))

    @property
    def reward(self) -> float:
        """Absolute mean reward of a step: the larger one of untrained and latest episodes."""
        return max(abs(self.recent.mean), abs(self.untrained.mean)) / self.length

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates by key."""
        known = ("lr", "actor_lr", "critic_lr")
        return {name: self.options[name] for name in known if name in self.options}

    def option(self, *names: str) -> str:
        """Return the first of some options that the algorithm has, as a key; "" if none."""
        for name in names:
            if name.partition(".")[0] in self.options:
                return f"algorithm.{name}"
        return ""


@dataclass(frozen=True)
class Stagnation:
    """A run that does not learn.

    Attributes:
        what: one sentence on its returns.
        causes: likeliest causes, the first one most likely.
    """

    what: str
    causes: tuple[Cause, ...]

    @property
    def text(self) -> str:
        """All of it in one line."""
        causes = "; ".join(f"({i}) {c.found}: {c.remedy}" for i, c in enumerate(self.causes, 1))
        return f"{self.what}. Likeliest causes: {causes}"


def stagnation(e: Evidence) -> Stagnation | None:
    """Return what keeps a run from learning; None if it learns, or nothing says why it does not."""
    if not due(e.record, e.done, e.recent.episodes) or _explores(e) or _learned(e):
        return None
    causes = sorted(_causes(e), key=lambda cause: -cause.weight)
    if not causes or causes[0].weight < _SIGN:
        return None
    keys: dict[str, Cause] = {}
    for cause in causes:
        keys.setdefault(cause.key, cause)
    after = f"{number_text(e.record.get('updates', 0))} updates"
    if e.done is not None:
        after = f"{100 * e.done:.0f} % of {e.budget}"
    than = "the policy that it started from" if e.fine_tuned else "an untrained policy"
    what = (
        f"after {after} this run is no better than {than}: its last {e.recent.episodes} episodes "
        f"return {e.recent}, {e.untrained.episodes} that began before the first update "
        f"{e.untrained}"
    )
    return Stagnation(what, tuple(keys.values())[:_MOST])


def due(record: Mapping[str, Any], done: float | None, trained: int) -> bool:
    """Return whether a run is far enough to be judged.

    Args:
        record: newest record of progress.
        done: share of the budget that is spent; None: there is no budget.
        trained: episodes that began after the first update.
    """
    if trained < FEWEST:
        return False
    if done is None:
        return bool(record.get("updates", 0) >= UPDATES and record.get("episodes", 0) >= EPISODES)
    return done >= SHARE


def _learned(e: Evidence) -> bool:
    """Return whether returns, or evaluations, tell that the policy is better, or cannot tell."""
    if e.competing:
        return True  # one agent's gain is another's loss: the sum of both says nothing
    if e.fine_tuned:  # a good policy may stay as it is
        return not e.untrained.above(e.recent)
    return e.recent.above(e.untrained) or any(last.above(first) for first, last in e.evaluated)


def _explores(e: Evidence) -> bool:
    """Return whether acting is still mostly random, by a schedule that ends well before the run."""
    start, end, over = _epsilon(e)
    epsilon = e.losses.get("epsilon")
    if epsilon is None or e.done is None or epsilon <= end + _EXPLORED * (start - end):
        return False
    return bool(over <= _WAIT * e.record.get("env_steps", 0) / max(e.done, 1e-9))


def _epsilon(e: Evidence) -> tuple[float, float, float]:
    """Return epsilon at the start, at the end, and the rows over which it falls."""
    o = e.options
    over = o.get("epsilon_env_steps") or o.get("exploration_env_steps") or 1
    return o.get("epsilon_start", 0.0), o.get("epsilon_end", 0.0), over


def _causes(e: Evidence) -> Iterator[Cause]:
    """Yield all causes that anything speaks for."""
    yield from _of_learning_rates(e)
    yield from _of_updates(e)
    yield from _of_values(e)
    yield from _of_exploration(e)
    yield from _of_actions(e)
    yield from _of_environment(e)
    yield from _usual(e)


def _of_learning_rates(e: Evidence) -> Iterator[Cause]:
    o, updates = e.options, e.record.get("updates", 0)
    # Adam moves a weight by about its rate in a step, whatever the gradient.
    steps = updates * o.get("batch_number", 1) * o.get("data_passes", 1)
    for name, rate in e.rates.items():
        key = f"algorithm.{name}"
        if rate * steps < 0.01 and rate < 5e-5:
            yield Cause(
                96,
                f"{number_text(steps)} steps at {key}={rate:g} move a weight by {rate * steps:.1g} "
                "at most",
                key,
                f"set {key} to 0.0003 or so",
            )
        elif rate >= 0.01:
            yield Cause(
                94 if rate >= 0.03 else 60,
                f"{key}={rate:g} is far above the usual 0.0001 to 0.003",
                key,
                f"set {key}=0.0003",
            )
    over, final = o.get("anneal_updates", 0), o.get("final_lr_fraction", 1.0)
    if over and final <= 0.1 and updates >= 0.9 * over and (e.done or 0) < 0.9:
        yield Cause(
            92,
            f"learning rates have fallen to {final:g} of themselves after "
            f"algorithm.anneal_updates={over}, long before the end",
            "algorithm.anneal_updates",
            "let algorithm.anneal_updates last as long as the run, or set 0",
        )
    skipped = e.record.get("updates_skipped", 0)
    jumps = e.losses.get("kl", 0.0) > 0.2 or e.losses.get("clip_fraction", 0.0) > 0.5
    if e.rates and (skipped > 0.02 * updates or jumps):
        key = f"algorithm.{next(iter(e.rates))}"
        found = f"{skipped} updates were skipped" if not jumps else "the policy jumps in an update"
        yield Cause(86, f"{found} ({_of(e, 'kl', 'clip_fraction')})", key, f"lower {key} 10 times")


def _of_updates(e: Evidence) -> Iterator[Cause]:
    updates, rows = e.record.get("updates", 0), e.record.get("env_steps", 0)
    if e.frozen:
        key = "algorithm.frozen_agents"
        yield Cause(99, "no agent is trained", key, f"leave an agent out of {key}")
    norms = [x for name, x in e.losses.items() if name.endswith("grad_norm")]
    if norms and max(norms) == 0:
        yield Cause(
            80,
            "all gradients are 0",
            "network.name",
            "see whether rewards ever differ and network.name reaches the actions",
        )
    if not e.replay:
        return
    rate = updates / max(1, rows - e.replay.get("start_rows", 0))
    if rate < 1 / 3:
        key = "algorithm.replay.update_interval"
        yield Cause(
            91 if rate < 1 / 200 else 84 if rate < 1 / 24 else 45 if rate < 1 / 10 else 25,
            f"{number_text(updates)} updates for {number_text(rows)} rows, "
            f"{key}={e.replay.get('update_interval')}",
            key,
            f"set {key}=1, an update a row",
        )


def _of_values(e: Evidence) -> Iterator[Cause]:
    o, losses, gamma = e.options, e.losses, e.options.get("gamma")
    if gamma is not None:
        horizon = 1 / max(1 - gamma, 1e-9)
        if horizon <= 5 and e.length >= 3 * horizon:
            yield Cause(
                95 if gamma <= 0.5 else 70,
                f"algorithm.gamma={gamma:g} counts {horizon:.2g} steps ahead of {e.length:.0f}",
                "algorithm.gamma",
                "set algorithm.gamma=0.99",
            )
    explained = losses.get("explained_variance")
    if explained is not None and explained < -0.1 and e.recent.std > 0:
        key = e.option("critic_lr", "lr") or "algorithm.gamma"
        yield Cause(
            50,
            f"the critic explains returns worse than their mean (explained variance "
            f"{max(explained, -99):.2g})",
            key,
            f"try {key} 3 times higher and lower",
        )
    largest = max(abs(x) for x in (*e.recent, *e.untrained))
    each = e.reward
    rewards = e.option("normalize_rewards")
    units = o.get("normalize_rewards", False)
    if rewards and not units and (each > 300 or 0 < each < 1e-5):
        yield Cause(
            93,
            f"rewards are about {number_text(each)} a step",
            rewards,
            f"set {rewards}=true, or scale them to about 1",
        )
    if gamma is None or units:
        return
    bonus = losses.get("temperature", 0.0) * abs(losses.get("entropy", 0.0))
    bound = max(largest, (each + bonus) / max(1 - gamma, 1e-3), 1e-6)
    names = ("q_mean", "target_mean", "return_mean")
    values = max((abs(losses[name]) for name in names if name in losses), default=0.0)
    beyond = losses.get("beyond_rewards", 0.0)
    if values > 5 * bound or beyond > 0.5:
        key = e.option("target_tau", "critic_lr", "lr") or "algorithm.gamma"
        found = (
            f"values of {number_text(values)} where an episode returns {number_text(e.recent.mean)}"
        )
        yield Cause(88, f"values diverge: {found}", key, f"lower {key}, or the learning rates")


def _of_exploration(e: Evidence) -> Iterator[Cause]:
    o, losses, first = e.options, e.losses, e.first
    epsilon, (start, _, over) = losses.get("epsilon", 0.0), _epsilon(e)
    if epsilon >= 0.6:
        name = "epsilon_env_steps" if "epsilon_env_steps" in o else "exploration_env_steps"
        key = f"algorithm.{name}"
        if epsilon > 0.95 * start and o.get("epsilon_end", 0.0) > 0.6:
            key = "algorithm.epsilon_end"
        yield Cause(
            97,
            f"{100 * epsilon:.0f} % of the actions are still random ({key}="
            f"{number_text(over) if key.endswith('steps') else o.get('epsilon_end')})",
            key,
            f"lower {key}",
        )
    entropy, before = losses.get("entropy"), first.get("entropy")
    if entropy is None or before is None:
        return
    if "initial_temperature" in o:
        yield from _of_temperature(e, entropy, before)
        return
    key, weight = "algorithm.entropy_weight", o.get("entropy_weight")
    if weight is None:
        return
    discrete = e.at_bounds is None
    stays = f"the policy stays as random as at first (entropy {entropy:.3g}, then {before:.3g})"
    if weight >= 0.1 and entropy > (0.9 * before if discrete else before + 0.2):
        yield Cause(95, f"{stays} with {key}={weight:g}", key, f"set {key}=0.01")
    elif discrete and entropy >= 0.985 * before:
        key = e.option("actor_lr", "lr") or key
        yield Cause(42, stays, key, f"raise {key} 3 times")
    elif (before > 0 and entropy < 0.1 * before) or entropy < before - 3:
        yield Cause(
            90,
            f"the policy explores no more (entropy {entropy:.2g}, at first {before:.3g}) with "
            f"{key}={weight:g}",
            key,
            f"set {key}=0.01 to 0.05" if weight < 0.01 else f"set {key}={3 * weight:g}",
        )


def _of_temperature(e: Evidence, entropy: float, before: float) -> Iterator[Cause]:
    """Yield causes of a soft actor-critic, whose temperature sets its entropy."""
    o, temperature = e.options, e.losses.get("temperature", 0.0)
    first, each = o["initial_temperature"], e.reward
    target = o.get("target_entropy", -1.0)
    key = "algorithm.initial_temperature"
    if first >= 1 and temperature * max(abs(entropy), 0.1) > 3 * each:
        yield Cause(
            95,
            f"entropy counts more than rewards: temperature {temperature:.3g}, {each:.3g} of "
            f"reward a step ({key}={first:g})",
            key,
            f"set {key}=0.1 and algorithm.learn_temperature=true",
        )
    elif target >= 0.4 or o.get("target_entropy_share", 0.2) >= 0.9:
        key = "algorithm.target_entropy" if target >= 0.4 else "algorithm.target_entropy_share"
        yield Cause(95, f"{key} asks for a policy that stays random", key, f"lower {key}")
    elif entropy < before - 4:
        yield Cause(
            85,
            f"the policy explores no more (entropy {entropy:.2g}, at first {before:.3g})",
            "algorithm.target_entropy",
            "raise algorithm.target_entropy, or algorithm.initial_temperature",
        )


def _of_actions(e: Evidence) -> Iterator[Cause]:
    o, share = e.options, e.at_bounds
    if share is None or share < 0.8:
        return
    found = f"{100 * share:.0f} % of the actions are at their bounds"
    if o.get("noise_start", 0.0) >= 1:
        key = "algorithm.noise_start"
        yield Cause(96, f"{found}, {key}={o['noise_start']:g}", key, f"set {key}=0.3")
    elif o.get("initial_log_std", -1.0) >= 0.5:
        key = "algorithm.initial_log_std"
        yield Cause(96, f"{found}, {key}={o['initial_log_std']:g}", key, f"set {key}=-0.5")
    else:
        key = e.option("output_penalty", "actor_lr", "lr")
        change = f"raise {key}" if key.endswith("penalty") else f"lower {key}"
        yield Cause(82, found, key, f"{change}; see that the environment's bounds are right")


def _of_environment(e: Evidence) -> Iterator[Cause]:
    where = "environment.name"
    look = "see what `murmur check-env` says of its rewards"
    if e.constant:
        yield Cause(
            87,
            "all observations of an update are the same",
            where,
            "see with `murmur check-env` what the environment of environment.name observes",
        )
    recent, untrained = e.recent, e.untrained
    if recent.low == recent.high:
        same = untrained.low == untrained.high == recent.low
        steps = "" if e.lengths is None else f" in {e.lengths.mean:.0f} steps"
        yield Cause(
            94 if same else 75,
            f"every episode returns {number_text(recent.mean)}{steps}"
            + (", before the first update, too" if same else ": it reaches nothing"),
            where,
            f"does the reward of environment.name ever change? {look}",
        )
        if key := _explores_by(e):
            yield Cause(
                65,
                f"nothing better than {number_text(recent.mean)} was ever tried",
                key,
                f"raise {key}",
            )
    elif _changed(e) and abs(recent.mean - untrained.mean) < 0.25 * untrained.std:
        yield Cause(
            48,
            "the policy has changed and its episodes have not: actions may change nothing",
            where,
            f"do actions of environment.name have an effect, and observations tell? {look}",
        )


def _changed(e: Evidence) -> bool:
    """Return whether the policy that acts is less random than the first one, by far."""
    start, _, _ = _epsilon(e)
    if start >= 0.5 and "epsilon" in e.losses:
        return e.losses["epsilon"] < 0.3 * start
    entropy, before = e.losses.get("entropy"), e.first.get("entropy", 0.0)
    return entropy is not None and before > 0 and entropy < 0.7 * before


def _explores_by(e: Evidence) -> str:
    """Return the key by which the algorithm explores; "" if it has none of those known."""
    return e.option("entropy_weight", "epsilon_env_steps", "target_entropy", "noise_end")


def _usual(e: Evidence) -> Iterator[Cause]:
    """Yield causes that nothing speaks for, to complete three."""
    if e.rates:
        name, rate = next(iter(e.rates.items()))
        key = f"algorithm.{name}"
        yield Cause(
            12, f"{key}={rate:g} may not suit", key, f"try {rate / 3:.1g} and {rate * 3:.1g}"
        )
    if key := _explores_by(e):
        yield Cause(10, "it may explore too little", key, f"raise {key}")
    yield Cause(
        14,
        "rewards may come too rarely, or actions change nothing",
        "environment.name",
        "see what `murmur check-env` finds in the environment of environment.name",
    )
    if "gamma" in e.options:
        gamma = e.options["gamma"]
        yield Cause(
            6, f"algorithm.gamma={gamma:g} may not suit", "algorithm.gamma", "try 0.95 and 0.995"
        )


def _of(e: Evidence, *names: str) -> str:
    """Format some losses."""
    return ", ".join(f"{name} {e.losses[name]:.2g}" for name in names if name in e.losses)
