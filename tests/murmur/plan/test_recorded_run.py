"""Forecasts beside runs that were measured and not used to fit."""

from dataclasses import replace

import pytest

from murmur.plan import stated
from murmur.plan.forecast import Basis, Forecast, Size, forecast
from murmur.plan.model import Costs
from murmur.plan.setup import plan_config
from murmur.shared.config.files import load
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.murmur.recorded_h100 import AGENTS, ENVS, UPDATE_ROWS, recorded

# `murmur plan terrain-reference --save-costs` on two EPYC cores; but a step of an environment as
# the H100's machine takes, 0.92 ms of a core.
COSTS = Costs(
    step_s=0.92e-3 * ENVS,
    message_s=0.72e-3,
    io_message_s=0.72e-3,
    batch_s=1.31e-3,
    copy_message_s=5.5e-6,
    act_s=0.0,
    update_s=0.0,
    update_row_s=0.99e-3,
    message_bytes=498_993,
    steps_per_row=15 / 16,
    jitter=0.1,
)

# `formation` on two EPYC cores on 2026-11-26: costs of runs with one and three workers.
FORMATION = Costs(
    step_s=712e-6,
    message_s=245e-6,
    io_message_s=78.3e-6,
    batch_s=226e-6,
    copy_message_s=10.8e-6,
    act_s=636e-6,
    update_s=0.0,
    update_row_s=67.1e-6,
    hop_s=58.6e-6,
    steps_per_row=0.966,
    jitter=0.1,
)
TWO_WORKERS = {"others": 1.04, "env_steps_per_s": 8530.0, "updates_per_s": 2.16}


def spec(agents: int, longest: int) -> EnvSpec:
    """An environment whose observations do not matter."""
    array = ArraySpec("x", "float32", (1,))
    return EnvSpec("any", agents, (array,), Discrete(2), max_episode_steps=longest)


def on_an_h100(eager: float) -> Forecast:
    """terrain-reference on 15 workers and an H100; `eager`: share of the updates."""
    config = plan_config(load("terrain-reference", [], {}))
    costs = replace(stated.on_gpu(COSTS, config, AGENTS), eager=eager)
    basis = Basis(config, costs, spec(AGENTS, 15), stated.network("nvlink"))
    return forecast(basis, Size(1, 16, 15))


def test_the_recorded_run_comes_out_within_30_percent() -> None:
    r = recorded()
    updates = r["agent-steps a second"] / AGENTS / UPDATE_ROWS  # a second
    seen = on_an_h100(r["eager calls a second"] / updates)
    assert seen.rate == pytest.approx(r["agent-steps a second"], rel=0.3)
    assert 1e3 * seen.outcome.update_s == pytest.approx(r["update, ms, mean"], rel=0.3)
    assert seen.outcome.busy["device"] == pytest.approx(r["device busy by NVML, share"], rel=0.3)
    events = r["device busy by CUDA events, share"]
    assert seen.outcome.busy["learning"] == pytest.approx(events, rel=0.3)
    assert seen.bottleneck == "eager updates"
    assert seen.outcome.update_rows == 960 * 16


def test_without_eager_updates_its_environments_set_the_rate() -> None:
    """54,000 kernels of 4 µs: 220 ms; 15 cores at 0.92 ms a step: 65,000 agent-steps/s."""
    seen = on_an_h100(0.0)
    assert 1e3 * seen.outcome.update_s == pytest.approx(228, rel=0.3)
    assert seen.rate == pytest.approx(65_000, rel=0.15)
    assert seen.bottleneck in ("cores", "workers")


def test_two_workers_come_out_within_30_percent_of_others() -> None:
    """The run with two workers gave none of the costs. Other programs took a processor of two."""
    config = plan_config(load("formation", [], {}))
    others = TWO_WORKERS["others"]
    basis = Basis(config, FORMATION, spec(3, 1000), stated.network("loopback"), others=others)
    seen = forecast(basis, Size(1, 2, 2))
    assert seen.env_rate == pytest.approx(TWO_WORKERS["env_steps_per_s"], rel=0.3)
    assert seen.outcome.updates == pytest.approx(TWO_WORKERS["updates_per_s"], rel=0.3)
    assert seen.bottleneck == "cores"
