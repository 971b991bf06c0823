"""Figures of runs that do not learn: which causes are named, and when nothing is said."""

from dataclasses import replace
from typing import Any

import pytest

from murmur.learner_service.learning.stagnation import (
    EPISODES,
    FEWEST,
    UPDATES,
    Evidence,
    stagnation,
)
from murmur.learner_service.telemetry.progress import Progress, share_of_budget
from murmur.learner_service.telemetry.statistics import Statistics
from murmur.shared.config.experiment import RunConfig

ON_POLICY = {
    "actor_lr": 5e-4,
    "critic_lr": 5e-4,
    "gamma": 0.99,
    "entropy_weight": 0.01,
    "batch_number": 4,
    "data_passes": 4,
    "anneal_updates": 0,
    "final_lr_fraction": 1.0,
    "normalize_rewards": False,
    "initial_log_std": -0.5,
    "frozen_agents": (),
}
OFF_POLICY = {
    "lr": 5e-4,
    "gamma": 0.99,
    "target_tau": 0.01,
    "epsilon_start": 1.0,
    "epsilon_end": 0.05,
    "epsilon_env_steps": 1000,
    "normalize_rewards": False,
    "replay": {"update_interval": 1, "start_rows": 100},
}
SOFT = {
    "actor_lr": 3e-4,
    "gamma": 0.99,
    "initial_temperature": 0.1,
    "target_entropy": -1.0,
    "target_entropy_share": 0.2,
    "replay": {"update_interval": 1, "start_rows": 100},
}


def evidence(options: dict[str, Any], **changes: Any) -> Evidence:
    """A run at 40 % of its budget, whose returns are an untrained policy's; no cause is seen."""
    losses = {"entropy": 0.5, "kl": 0.01, "explained_variance": 0.5, "q_mean": 1.0}
    own = {name: changes.pop(name) for name in ("own", "seen") if name in changes}
    found = Evidence(
        record={
            "updates": 4000,
            "episodes": 500,
            "env_steps": 4000,
            "env_steps_received": 4000,
            "updates_skipped": 0,
        },
        options={**options, **own.get("own", {})},
        untrained=Statistics(50, 20.0, 10.0, 5.0, 60.0),
        recent=Statistics(100, 21.0, 10.0, 5.0, 60.0),
        done=0.4,
        budget="run.max_env_steps=10,000",
        first={"entropy": 0.69},
        losses={**losses, **own.get("seen", {})},
        lengths=Statistics(100, 20.0, 5.0, 5.0, 60.0),
    )
    return replace(found, **changes)


FEW = {"updates": 60, "episodes": 500, "env_steps": 4000, "env_steps_received": 4000}
STILL = Statistics(50, -200.0, 0.0, -200.0, -200.0)
PLANTED: dict[str, tuple[Evidence, str]] = {
    "few updates": (evidence(OFF_POLICY, record=FEW), "algorithm.replay.update_interval"),
    "rate too high": (evidence(ON_POLICY, own={"actor_lr": 0.3}), "algorithm.actor_lr"),
    "rate too low": (evidence(ON_POLICY, own={"critic_lr": 1e-9}), "algorithm.critic_lr"),
    "skipped": (
        evidence(ON_POLICY, record={**FEW, "updates_skipped": 20}),
        "algorithm.actor_lr",
    ),
    "jumps": (evidence(ON_POLICY, seen={"kl": 2.0}), "algorithm.actor_lr"),
    "annealed": (
        evidence(ON_POLICY, own={"anneal_updates": 100, "final_lr_fraction": 0.001}),
        "algorithm.anneal_updates",
    ),
    "uniform": (
        evidence(ON_POLICY, own={"entropy_weight": 2.0}, seen={"entropy": 0.69}),
        "algorithm.entropy_weight",
    ),
    "uniform without a reason": (
        evidence(ON_POLICY, seen={"entropy": 0.69}),
        "algorithm.actor_lr",
    ),
    "collapsed": (evidence(ON_POLICY, seen={"entropy": 0.01}), "algorithm.entropy_weight"),
    "collapsed, continuous": (
        evidence(ON_POLICY, first={"entropy": 0.9}, seen={"entropy": -4.0}, at_bounds=0.1),
        "algorithm.entropy_weight",
    ),
    "soft and hot": (
        evidence(SOFT, own={"initial_temperature": 50.0}, seen={"temperature": 49.0}),
        "algorithm.initial_temperature",
    ),
    "soft and random": (
        evidence(SOFT, own={"target_entropy_share": 1.0}),
        "algorithm.target_entropy_share",
    ),
    "critic": (evidence(ON_POLICY, seen={"explained_variance": -1.0}), "algorithm.critic_lr"),
    "diverging": (evidence(OFF_POLICY, seen={"q_mean": 1e5}), "algorithm.target_tau"),
    "clipped targets": (evidence(OFF_POLICY, seen={"beyond_rewards": 0.9}), "algorithm.target_tau"),
    "large rewards": (
        evidence(
            OFF_POLICY,
            untrained=Statistics(50, 2e7, 1e7, 0, 3e7),
            recent=Statistics(50, 2e7, 1e7, 0, 3e7),
        ),
        "algorithm.normalize_rewards",
    ),
    "short horizon": (evidence(ON_POLICY, own={"gamma": 0.0}), "algorithm.gamma"),
    "epsilon": (
        evidence(OFF_POLICY, own={"epsilon_env_steps": 10**7}, seen={"epsilon": 0.99}),
        "algorithm.epsilon_env_steps",
    ),
    "epsilon never falls": (
        evidence(OFF_POLICY, own={"epsilon_end": 1.0}, seen={"epsilon": 1.0}),
        "algorithm.epsilon_end",
    ),
    "wide": (
        evidence(ON_POLICY, own={"initial_log_std": 3.0}, at_bounds=0.95),
        "algorithm.initial_log_std",
    ),
    "noisy": (
        evidence({**OFF_POLICY, "noise_start": 5.0}, at_bounds=0.95),
        "algorithm.noise_start",
    ),
    "saturated": (
        evidence({**OFF_POLICY, "output_penalty": 0.0}, at_bounds=0.99),
        "algorithm.output_penalty",
    ),
    "constant": (evidence(ON_POLICY, untrained=STILL, recent=STILL), "environment.name"),
    "one length": (
        evidence(ON_POLICY, recent=STILL, untrained=Statistics(50, -199.0, 3.0, -200.0, -180.0)),
        "algorithm.entropy_weight",
    ),
    "blind": (evidence(ON_POLICY, constant=True), "environment.name"),
    "no effect": (evidence(OFF_POLICY, seen={"epsilon": 0.05}), "environment.name"),
    "frozen": (evidence(ON_POLICY, frozen=True), "algorithm.frozen_agents"),
    "no gradient": (evidence(ON_POLICY, seen={"actor_grad_norm": 0.0}), "network.name"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_cause_is_among_the_three_with_its_key(name: str) -> None:
    seen, key = PLANTED[name]
    found = stagnation(seen)
    assert found is not None
    assert len(found.causes) == 3
    assert key in [cause.key for cause in found.causes[:2]]
    assert all(cause.key in f"{cause.found} {cause.remedy}" for cause in found.causes)
    assert found.text.isprintable()
    assert len(found.text) < 1000


def test_returns_alone_say_nothing() -> None:
    for options in (ON_POLICY, OFF_POLICY, SOFT):
        assert stagnation(evidence(options)) is None


@pytest.mark.parametrize("name", PLANTED)
def test_a_run_that_learns_stays_silent_whatever_its_settings(name: str) -> None:
    seen, _ = PLANTED[name]
    _, mean, std, low, _ = seen.untrained
    better = mean + 2 * std + 1
    learned = replace(seen, recent=Statistics(50, better, std, low, better + std))
    assert stagnation(learned) is None


def test_an_interval_decides_what_better_is() -> None:
    seen = PLANTED["few updates"][0]
    # Half widths: 1.96 * 10 / sqrt(50) = 2.77 and 1.96 * 10 / sqrt(100) = 1.96: 3.39 together.
    for gain, says in ((3.3, True), (3.5, False), (-9.0, True)):
        found = stagnation(replace(seen, recent=Statistics(100, 20.0 + gain, 10.0, 5.0, 60.0)))
        assert (found is not None) == says


@pytest.mark.parametrize(
    "change",
    [
        {"done": 0.3},  # too early
        {"recent": Statistics(FEWEST - 1, 20.0, 10.0, 5.0, 60.0)},  # too few
        {"competing": True},
        {"fine_tuned": True},  # a good policy may stay good
        {"evaluated": ((Statistics(50, 1.0, 1.0, 1.0, 1.0), Statistics(50, 9.0, 1.0, 9.0, 9.0)),)},
        {"done": None},  # no budget, and few updates
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_is_said_too_early_or_where_returns_do_not_tell(change: dict[str, Any]) -> None:
    seen = PLANTED["few updates"][0]
    assert stagnation(seen) is not None
    assert stagnation(replace(seen, **change)) is None


def test_a_run_without_a_budget_is_judged_by_its_counts() -> None:
    record = {**FEW, "updates": UPDATES, "episodes": EPISODES, "env_steps": 10**6}
    found = stagnation(evidence(OFF_POLICY, record=record, done=None, budget=""))
    assert found is not None
    assert found.what.startswith("after 500 updates this run is no better")


def test_a_fine_tuned_run_that_gets_worse_is_told() -> None:
    worse = Statistics(100, 2.0, 10.0, 0.0, 30.0)
    found = stagnation(replace(PLANTED["jumps"][0], fine_tuned=True, recent=worse))
    assert found is not None
    assert "than the policy that it started from" in found.what


def test_exploration_that_ends_in_time_is_waited_for() -> None:
    # 4,000 rows are 40 % of the budget of 10,000: a schedule of 6,000 ends in time.
    for over, says in ((6000, False), (9000, True)):
        own, seen = {"epsilon_env_steps": over}, {"epsilon": 0.5}
        found = stagnation(evidence(OFF_POLICY, record=FEW, own=own, seen=seen))
        assert (found is not None) == says


def test_the_largest_share_of_a_budget_counts() -> None:
    p = Progress()
    p.updates, p.env_steps = 5, 400
    assert share_of_budget(RunConfig(name="x"), p) == (None, "")
    both = RunConfig(name="x", max_updates=10, max_env_steps=1000)
    assert share_of_budget(both, p) == (0.5, "run.max_updates=10")


def test_untrained_episodes_are_kept_apart_and_survive_a_restart() -> None:
    p = Progress()
    for untrained, value in ((True, 1.0), (True, 1.0), (False, 2.0), (False, 3.0)):
        p.episodes += 8
        for _ in range(8):
            p.finish_return(value, untrained)
    assert p.untrained == [1.0] * 16
    assert p.trained_episodes == 16
    assert p.latest("return") == [2.0] * 8 + [3.0] * 8
    q = Progress()
    q.load_state_dict(p.state_dict())
    assert (q.untrained, q.trained_episodes) == (p.untrained, 16)
    assert q.returns()["untrained"] == {
        "episodes": 16,
        "mean": 1.0,
        "std": 0.0,
        "low": 1.0,
        "high": 1.0,
    }


def test_a_checkpoint_of_before_is_not_judged() -> None:
    p = Progress()
    p.episodes = 50
    state = {k: v for k, v in p.state_dict().items() if k not in ("untrained", "trained_episodes")}
    q = Progress()
    q.load_state_dict(state)
    q.episodes += 30
    for _ in range(30):
        q.finish_return(0.0, False)
    assert q.untrained == []
