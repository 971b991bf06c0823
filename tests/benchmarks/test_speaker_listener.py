"""The planner that A4 is compared with."""

import itertools

import numpy as np
import pytest

from benchmarks import speaker_listener
from benchmarks.speaker_listener import (
    _at,
    _search,
    _step,
    begin,
    costs_to_go,
    plan_continuous,
    plan_discrete,
    play,
)

COARSE = np.array([-0.5, 0.0, 0.5])


@pytest.fixture(scope="module")
def to_go() -> speaker_listener.Floats:
    return costs_to_go(COARSE, False)


def test_a_step_by_hand() -> None:
    start = np.array([0.4, -0.2, 1.0, 0.0, 2.0])
    # x = 0.4 + 0.1, v = 0.75 - 0.5; y stays; 2 + 0.25 + 0.04.
    assert _step(start, 1, False) == pytest.approx([0.5, -0.2, 0.25, 0.0, 2.29])
    # v first: 0.25, x = 0.4 + 0.025; 2 + 0.180625 + 0.04.
    assert _step(start, 1, True) == pytest.approx([0.425, -0.2, 0.25, 0.0, 2.220625])


@pytest.mark.long
def test_the_beam_finds_what_trying_everything_finds(to_go: speaker_listener.Floats) -> None:
    for x, y, v in ((0.5, -0.3, 0.2), (0.05, 0.9, -1.0), (-0.4, -0.4, 0.0)):
        start, least = np.array([x, y, v, -v, 0.0]), np.inf
        for actions in itertools.product(range(5), repeat=6):
            state = start
            for action in actions:
                state = _step(state, action, False)
            least = min(least, state[4])
        cost, path = _search(start, 6, to_go, 100, False)
        assert cost == pytest.approx(least)
        for action in path:
            start = _step(start, action, False)
        assert start[4] == pytest.approx(cost)


def test_each_axis_by_itself_costs_less_than_both_together(to_go: speaker_listener.Floats) -> None:
    places, goals = begin(3)
    costs, _ = plan_discrete(places, goals, to_go, 50, False)
    for episode, cost in enumerate(costs):
        x, y = places[episode, goals[episode]]
        assert _at(to_go[25], x, 0.0) + _at(to_go[25], y, 0.0) < cost


@pytest.mark.parametrize("continuous", [False, True])
def test_what_is_planned_is_what_the_environment_pays(
    to_go: speaker_listener.Floats, continuous: bool
) -> None:
    places, goals = begin(4)
    if continuous:
        costs, plan = plan_continuous(places, goals, to_go, COARSE, False)
    else:
        costs, plan = plan_discrete(places, goals, to_go, 20, False)
    assert play(plan, continuous=continuous) == pytest.approx(-2 * costs, abs=1e-3)
