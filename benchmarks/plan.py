"""Forecasts of `murmur plan` against measurements on this machine.

A learner and one to four environment servers as real processes. Costs are measured with one and
with three servers; one, two and four are forecast. The update is light or heavy, or comes from a
replay. All processes share this machine's processors, so contention for them is forecast too. What
other programs use meanwhile is measured and given to the model, and so is how much slower the
processors were than when the costs were measured ("slower by": processor time of learning for a
row, the same work).

Two learners with a server each are forecast from the same costs, with as much work for each rank
(twice the batch), and measured as a run of two ranks that average gradients by gloo.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil

from benchmarks._cores import two_cores
from benchmarks._rank_messages import Learners
from murmur.benchmarks.effort import Effort
from murmur.plan.costs import Window
from murmur.plan.forecast import Basis, Size, forecast, scaled
from murmur.plan.model import Costs
from murmur.plan.setup import (
    calibrated,
    environment_spec,
    measure,
    parameters_of,
    plan_config,
)
from murmur.plan.stated import network
from murmur.shared.config.cores import available_cores
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.host_cpu import machine_busy_seconds

DESCRIPTION = (
    "what murmur plan forecasts and what is measured: light and heavy updates and a replay, 1 to 4 "
    "environment servers (target: within 15 %)"
)

_SPREAD = {
    "environment": {"name": "spread"},
    "env_server": {"num_workers": 1, "envs_per_worker": 32, "sessions_per_worker": 2},
    "network": {"name": "mlp", "hidden": [64, 64]},
    "learner": {"device": "cpu", "num_threads": 1, "max_policy_lag": 1},
}
LOADS: dict[str, dict[str, Any]] = {
    "light update": {
        **_SPREAD,
        "algorithm": {
            "name": "mappo",
            "batch_size": 2400,
            "batch_number": 1,
            "data_passes": 1,
            "unroll_steps": 25,
            "unrolls_per_update": 32,
        },
    },
    "heavy update": {
        **_SPREAD,
        "algorithm": {
            "name": "mappo",
            "batch_size": 600,
            "batch_number": 4,
            "data_passes": 8,
            "unroll_steps": 25,
            "unrolls_per_update": 32,
        },
    },
}
LOADS["replay"] = {
    **_SPREAD,
    "algorithm": {
        "name": "qmix",
        "replay": {"start_rows": 1000, "batch_size": 64, "update_interval": 64},
    },
}
GROUPS = ("light update", "heavy update")  # that two learners are forecast for as well
MEASURED_WITH = (1, 3)  # servers, for the costs
FORECAST = (1, 2, 4)
LOOPBACK = network("loopback")


def compare(
    load: Mapping[str, Any], seconds: float, servers: tuple[int, ...], *, group: bool = False
) -> dict[str, Any]:
    """Forecast and measurement for each number of servers.

    Args:
        load: content of a configuration.
        seconds: length of a window [s].
        servers: numbers of servers to measure; those of MEASURED_WITH give the costs.
        group: flag to forecast and measure two learners, too.
    """
    config = plan_config(validate(ExperimentConfig, load))
    spec = environment_spec(config, None)
    windows = measure(config, servers, seconds)
    known = {n: windows[n] for n in MEASURED_WITH if n in windows}
    costs = calibrated(config, spec, known)
    cores = max(1, round(available_cores()))
    rows = {}
    for n in FORECAST:
        if n in windows:
            seen = windows[n]
            slower = _learn_row_s(seen) / statistics.mean(map(_learn_row_s, known.values()))
            now = at_speed(costs, slower)
            basis = Basis(config, now, spec, LOOPBACK, others=seen.others)
            rows[f"{n} servers"] = _row(basis, Size(1, cores, n), seen, slower)
    if group:
        with_weights = replace(costs, parameters=parameters_of(config, spec))
        rows["2 learners"] = _two_learners(Basis(config, with_weights, spec, LOOPBACK), seconds)
    return {"costs": {k: v for k, v in vars(costs).items() if v}, "forecasts": rows}


def _two_learners(basis: Basis, seconds: float) -> dict[str, Any]:
    """Forecast and measure two ranks and two servers, which share two cores."""
    cores = two_cores()
    size = Size(learners=2, cores=len(cores), workers=2, batch=2)
    server = basis.config.env_server
    content = scaled(basis.config, size.batch).model_dump(mode="json", exclude={"security"})
    with Learners(content, [cores] * size.learners) as learners:
        machine = machine_busy_seconds()
        before, after = learners.window(seconds)
        machine = machine_busy_seconds() - machine
    took = after.wall_s - before.wall_s
    used = after.learners_s + after.servers_s - before.learners_s - before.servers_s
    others = max(0.0, (machine - used) / took)
    seen = forecast(replace(basis, others=others), size)
    envs = server.envs_per_worker // server.sessions_per_worker
    measured = (after.messages - before.messages) * envs * basis.costs.steps_per_row / took
    return {
        "forecast": seen.env_rate,
        "measured": measured,
        "ratio": seen.env_rate / measured,
        "updates/s": seen.outcome.updates,
        "measured updates/s": (after.updates - before.updates) / took,
        "batch": seen.outcome.batch,
        "limited by": seen.bottleneck,
        "others, cores": others,
    }


def _learn_row_s(window: Window) -> float:
    """Return the processor seconds of learning for a row, which are the same work at any size."""
    return window.learn_s / max(window.trained, 1)


def at_speed(costs: Costs, slower: float) -> Costs:
    """Return the same costs on processors that are slower by this factor."""
    times = {k: v * slower for k, v in vars(costs).items() if k.endswith("_s") and k != "hop_s"}
    return replace(costs, **times)


def _row(basis: Basis, size: Size, window: Window, slower: float) -> dict[str, Any]:
    seen = forecast(basis, size)
    measured = window.env_steps / window.seconds
    return {
        "forecast": seen.env_rate,
        "measured": measured,
        "ratio": seen.env_rate / measured,
        "updates/s": seen.outcome.updates,
        "measured updates/s": window.updates / window.seconds,
        "batch": seen.outcome.batch,
        "measured batch": window.batch,
        "limited by": seen.bottleneck,
        "others, cores": window.others,
        "slower by": slower,
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Forecast and measure environment steps per second, by load and number of servers."""
    seconds = effort.choose(0.5, 4.0, 15.0)
    servers = effort.choose((1,), (1, 2, 3, 4), (1, 2, 3, 4))
    loads = list(LOADS)[:1] if effort is Effort.SMOKE else list(LOADS)
    started = time.monotonic()
    result: dict[str, Any] = {
        name: compare(
            LOADS[name],
            seconds,
            servers,
            group=name in GROUPS and effort is not Effort.SMOKE,
        )
        for name in loads
    }
    ratios = [row["ratio"] for of in result.values() for row in of["forecasts"].values()]
    result["largest error"] = max(abs(ratio - 1) for ratio in ratios)
    result["seconds"] = time.monotonic() - started
    result["load_average"] = psutil.getloadavg()[0]
    return result
