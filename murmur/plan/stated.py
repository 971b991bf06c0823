"""Figures that are stated, not measured here: what a GPU would take, and networks between learners.

They come from committed counts of launches (`murmur bench launches`), from what `murmur bench gpu`
measured on one H100, and from data sheets; docs/plan.md has the table. A forecast that uses them
says so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from murmur.machine import RESULTS
from murmur.plan.model import Costs
from shared.config import ExperimentConfig
from shared.errors import ConfigError

# As one H100 had them: a launch from Python, a kernel within a captured graph.
LAUNCH_S, KERNEL_S = 30e-6, 4e-6
FLOPS = 60e12
CPU_FLOPS = 87e9  # of one core in a large fp32 matrix product: at most so much was computed
# Launches where no preset was counted: of an optimiser step on-policy, of an update off-policy.
STEP_LAUNCHES, OFF_POLICY_LAUNCHES, ACT_LAUNCHES = 50, 180, 25
UPDATE_HOST_S = 1e-3  # of a captured update: its replay and what is launched beside it, losses, log
AGREE_S = 3e-4  # of a group: one exchange of a few numbers on the host before an update


@dataclass(frozen=True)
class Network:
    """Between learners.

    Attributes:
        what: as text.
        step_s: of one of the 2 (N - 1) steps of a ring, without the bytes.
        bytes_per_s: of a learner's link, as all-reduce sees it.
    """

    what: str
    step_s: float
    bytes_per_s: float


NETWORKS: Mapping[str, Network] = {
    "nvlink": Network("NVLink within a machine, NCCL", 4e-6, 300e9),
    "pcie": Network("PCIe 5 within a machine, NCCL", 6e-6, 20e9),
    "infiniband": Network("400 Gbit/s InfiniBand, NCCL", 8e-6, 40e9),
    "ethernet-100": Network("100 Gbit/s Ethernet, NCCL over TCP", 30e-6, 9e9),
    "ethernet-25": Network("25 Gbit/s Ethernet, NCCL over TCP", 35e-6, 2.5e9),
    "ethernet-10": Network("10 Gbit/s Ethernet, NCCL over TCP", 40e-6, 1e9),
    "loopback": Network("processes on one machine, gloo", 60e-6, 1.5e9),
}


def network(name: str) -> Network:
    """A network by name.

    Raises:
        ConfigError: naming those that there are.
    """
    if name not in NETWORKS:
        raise ConfigError(f"--network {name}: known are {', '.join(NETWORKS)}")
    return NETWORKS[name]


def all_reduce_s(net: Network, ranks: int, size: float) -> float:
    """Seconds of a ring all-reduce: 2 (N - 1) steps, each of 1/N of the bytes.

    Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    if ranks == 1:
        return 0.0
    steps = 2 * (ranks - 1)
    return steps * (net.step_s + size / ranks / net.bytes_per_s)


def optimiser_steps(config: ExperimentConfig) -> int:
    """All-reduces of gradients in an update: of policy and of critic, for each minibatch."""
    from learner_service.algorithms.base import algorithm_config
    from learner_service.algorithms.options import OnPolicyConfig

    options = algorithm_config(config.algorithm)
    if isinstance(options, OnPolicyConfig):
        return 2 * options.batch_number * options.data_passes
    return 2


def exchange_s(config: ExperimentConfig, net: Network, ranks: int, parameters: int) -> float:
    """Seconds of an update in which ranks exchange gradients, none of it hidden by arithmetic."""
    if ranks == 1:
        return 0.0
    steps = optimiser_steps(config)
    one = all_reduce_s(net, ranks, 4.0 * parameters / (2 if steps > 1 else 1))
    return AGREE_S + steps * one


def on_gpu(costs: Costs, config: ExperimentConfig) -> Costs:
    """The same with acting and updates on a GPU, as counted for a preset or by the rule of thumb.

    An update takes its launches in a captured graph, or its arithmetic if that takes longer; only
    the arithmetic shrinks with a rank's share of the rows.
    """
    preset = _preset(config)
    launches, act = counted().get(preset, (0, 0)) if preset else (0, 0)
    if not launches:
        on_policy = optimiser_steps(config) > 2
        launches = STEP_LAUNCHES * optimiser_steps(config) if on_policy else OFF_POLICY_LAUNCHES
    act = act or ACT_LAUNCHES
    # Share of a core's time in which the GPU does the same work, at the most.
    arithmetic = costs.update_row_s * CPU_FLOPS / FLOPS
    return replace(
        costs,
        device=True,
        act_s=3 * LAUNCH_S + act * KERNEL_S,
        act_message_s=0.0,
        update_s=launches * KERNEL_S,
        update_row_s=arithmetic,
        update_host_s=UPDATE_HOST_S,
    )


def _preset(config: ExperimentConfig) -> str:
    """The counted preset that a configuration is; empty if it is none."""
    own = (config.environment.name, config.algorithm.name)
    return {
        ("spread", "mappo"): "spread (MAPPO)",
        ("spread", "qmix"): "QMIX, spread",
        ("formation", "mappo"): "formation (MAPPO)",
        ("formation", "masac"): "MASAC, formation, 2x256",
        ("terrain", "coma"): "terrain-reference (COMA)",
        ("snakes", "coma"): "snakes (COMA)",
        ("snakes", "mappo"): "snakes-greedy (MAPPO)",
        ("snakes", "maddpg"): "snakes-ddpg (MADDPG)",
    }.get(own, "")


@cache
def counted() -> dict[str, tuple[int, int]]:
    """Launches of an update and of an act by preset, of the newest saved comparison."""
    found: dict[str, tuple[int, int]] = {}
    for file in sorted(RESULTS.glob("launches-*.json")):
        try:
            rows = json.loads(file.read_text())["result"]["launches"]
            for name, row in rows.items():
                preset, _, work = name.partition(": ")
                update, act = found.get(preset, (0, 0))
                if work == "update, fp32":
                    update = int(row["launches"])
                elif work == "act, 16 sessions":
                    act = int(row["launches"])
                found[preset] = update, act
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
