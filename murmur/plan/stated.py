"""Stated figures, not measured here: times of a GPU, and networks between learners.

They come from counts of launches and from what `murmur bench gpu` measured on one H100, both in
benchmarks/results, and from data sheets; docs/plan.md has the table. A forecast that uses them says
so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.learning.options import OnPolicyConfig
from murmur.plan.model import Costs
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError

# As one H100 had them: a launch from Python, a kernel within a captured graph, a replay of one.
LAUNCH_S, KERNEL_S, REPLAY_S = 30e-6, 4e-6, 7.5e-6
FLOPS = 60e12
CPU_FLOPS = 87e9  # of one core in a large fp32 matrix product: at most so much was computed
# Launches where no preset was counted: of an optimizer step on-policy, of an update off-policy.
STEP_LAUNCHES, OFF_POLICY_LAUNCHES, ACT_LAUNCHES = 50, 180, 25
BLOCK, BLOCK_LAUNCHES = 16, 4  # minibatches of a graph at most; copies into it and out of it
# Of the host, outside an update's graphs: gathering and returns of rollouts; draws from a replay.
ROLLOUT_HOST_S, DRAW_HOST_S = 5e-3, 1.1e-3
AGREE_S = 3e-4  # of a group: one exchange of a few numbers on the host before an update

# As `murmur bench gpu` counted them on 2026-11-26, by environment and algorithm: launches of an
# optimizer step (of an update over its steps; off-policy: of an update), and of an act.
COUNTED: Mapping[tuple[str, str], tuple[float, int]] = {
    ("spread", "mappo"): (1739 / 32, 16),
    ("spread", "qmix"): (220, 19),
    ("formation", "mappo"): (2819 / 40, 23),
    ("formation", "masac"): (252, 18),
    ("terrain", "coma"): (3612 / 48, 40),
    ("snakes", "coma"): (2541 / 50, 25),
    ("snakes", "mappo"): (2170 / 36, 18),
    ("snakes", "maddpg"): (214, 15),
}


@dataclass(frozen=True)
class Network:
    """Network between learners.

    Attributes:
        what: description of the network.
        step_s: time of one of the 2 (N - 1) steps of a ring, without the bytes.
        bytes_per_s: bandwidth of a learner's link, as all-reduce sees it.
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
    """Find a network by name.

    Raises:
        ConfigError: naming those that there are.
    """
    if name not in NETWORKS:
        raise ConfigError(f"--network {name}: known are {', '.join(NETWORKS)}")
    return NETWORKS[name]


def all_reduce_s(net: Network, ranks: int, size: float) -> float:
    """Return the seconds of a ring all-reduce: 2 (N - 1) steps, each of 1/N of the bytes.

    Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    steps = 2 * (ranks - 1)
    return steps * (net.step_s + size / ranks / net.bytes_per_s)


def optimiser_steps(config: ExperimentConfig) -> int:
    """Count an update's all-reduces of gradients: of policy and of critic, for each minibatch."""
    options = algorithm_config(config.algorithm)
    if isinstance(options, OnPolicyConfig):
        return 2 * options.batch_number * options.data_passes
    return 2


def exchange_s(config: ExperimentConfig, net: Network, ranks: int, parameters: int) -> float:
    """Return the seconds of gradient exchange in an update, none hidden by arithmetic."""
    if ranks == 1:
        return 0.0
    steps = optimiser_steps(config)
    one = all_reduce_s(net, ranks, 4.0 * parameters / (2 if steps > 1 else 1))
    return AGREE_S + steps * one


def on_gpu(costs: Costs, config: ExperimentConfig, agents: int) -> Costs:
    """Move acting and updates to a GPU, as counted for a preset or by the rule of thumb.

    An update takes its kernels in captured graphs and its arithmetic. A rollout of more rows than
    an update needs is learned from in as many more minibatches; a rank's minibatches are smaller,
    not fewer.

    Args:
        costs: costs measured on a CPU.
        config: the experiment, with all options of its algorithm.
        agents: agents of an environment.
    """
    options, steps = algorithm_config(config.algorithm), optimiser_steps(config)
    preset = config.environment.name, config.algorithm.name
    launches, act = COUNTED.get(preset, (0.0, ACT_LAUNCHES))
    # Share of a core's time in which the GPU does the same work, at the most.
    arithmetic = costs.update_row_s * CPU_FLOPS / FLOPS
    if isinstance(options, OnPolicyConfig):
        launches = steps * (launches or STEP_LAUNCHES)
        number = options.batch_number
        block = max(k for k in range(1, BLOCK + 1) if number % k == 0)
        replays_s = steps / block * (REPLAY_S + BLOCK_LAUNCHES * LAUNCH_S)
        host_s = ROLLOUT_HOST_S
        rows = options.batch_size * number / agents
    else:
        launches = launches or OFF_POLICY_LAUNCHES
        replays_s, host_s, rows = REPLAY_S, DRAW_HOST_S, 0.0
    return replace(
        costs,
        device=True,
        act_s=3 * LAUNCH_S + act * KERNEL_S,
        act_message_s=0.0,
        update_s=launches * KERNEL_S,
        update_row_s=arithmetic,
        update_host_s=host_s,
        update_replays_s=replays_s,
        update_eager_s=launches * LAUNCH_S,
        update_rows=rows,
    )
