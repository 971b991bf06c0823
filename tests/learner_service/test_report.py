"""Figures of a report: the share of actions at their bounds."""

import math

import pytest
import torch
from prometheus_client import generate_latest

from murmur.learner_service.report import _share_at_bounds
from murmur.learner_service.storage.rollout import Batch
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    TURN_MASK,
    ActionSpec,
    ArraySpec,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
)


def spec_of(action: ActionSpec, *observations: ArraySpec) -> EnvSpec:
    return EnvSpec("some", 2, (ArraySpec("seen", "float32", (1,)), *observations), action)


def test_numbers_beside_choices_have_their_own_bounds() -> None:
    idle = ((False, False), (False, True))
    action = Composite((2,), (-1.0, 5.0), (1.0, math.inf), idle)
    taken = torch.tensor([[[[0.0, 1.0, 5.0], [1.0, 0.0, 5.0]]]])  # the last number counts for none
    share = _share_at_bounds(Batch({"action": taken}, [0]), spec_of(action))
    assert share == pytest.approx(2 / 3)


def test_numbers_without_bounds_are_at_none() -> None:
    taken = torch.full((1, 1, 2, 1), 1e6)
    spec = spec_of(Continuous(1, -math.inf, math.inf))
    assert _share_at_bounds(Batch({"action": taken}, [0]), spec) == 0


@pytest.mark.parametrize("action", [Discrete(3), Composite((2, 3))])
def test_choices_have_no_bounds(action: ActionSpec) -> None:
    taken = torch.zeros(1, 1, 2, dtype=torch.int32)
    assert _share_at_bounds(Batch({"action": taken}, [0]), spec_of(action)) is None


def test_actions_of_agents_that_wait_do_not_count() -> None:
    spec = spec_of(Continuous(1, 0.0, 1.0), ArraySpec(TURN_MASK, "uint8", ()))
    turn = torch.tensor([[[1, 0]], [[0, 1]]], dtype=torch.uint8)
    taken = torch.tensor([[[0.5, 0.0]], [[0.0, 1.0]]]).unsqueeze(-1)
    rows = Batch({"action": taken, OBSERVATION + TURN_MASK: turn}, [0])
    assert _share_at_bounds(rows, spec) == 0.5


def test_lags_count_as_often_as_unrolls_have_them() -> None:
    metrics = LearnerMetrics()
    metrics.histogram("policy_lag").observe_many({0: 63, 1: 1})
    assert metrics.sum_of("policy_lag") == (1.0, 64.0)
    exposed = generate_latest(metrics.registry).decode()
    assert 'policy_lag_bucket{le="0.0"} 63.0' in exposed
    assert 'policy_lag_bucket{le="1.0"} 64.0' in exposed
