"""MASAC updates of 2, 4 and 8 agents: time, work, and the agent-by-agent scheme beside it.

Batch 256, two hidden layers of 256, 18 numbers observed and 2 acted by each agent, networks of each
agent's own, centralized twin critics. Stacked updates and the sequential scheme (_masac_loop.py),
each in fp32 and bf16, run in turns in one process, so that a busy machine disturbs all alike; CPU
time counts. The matrix products of both schemes are counted too: what the sequential one has more
of is what arithmetic alone would make the stacked one faster by. Where there is CUDA, also eager
updates, updates as one graph, and 16 agents.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from murmur.benchmarks._masac_loop import MasacLoop
from murmur.benchmarks._threads import one_thread
from murmur.benchmarks.effort import Effort
from murmur.learner_service.algorithms.masac import Config, Masac
from murmur.learner_service.device.device import keep_freed_memory
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.replay import ReplayBatch
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ArraySpec, Continuous, EnvSpec

DESCRIPTION = (
    "MASAC updates of 2, 4 and 8 agents (targets: 28, 54, 103 CPU-ms fp32, 19, 33, 69 bf16; "
    "1.5 and 2.5 times the sequential scheme at 2 and 8; at most 185 operations)"
)

_BATCH, _WIDTH, _ACTION, _HIDDEN = 256, 18, 2, (256, 256)
_GFLOP = "GFLOP of the matrix products"  # a multiply-add is two
_VIEWS = {
    *("view", "_unsafe_view", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice"),
    *("select", "permute", "detach", "alias", "split", "unbind", "as_strided", "unfold"),
}


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure the table on one CPU core; on CUDA too if there is one."""
    keep_freed_memory()  # as a learner does
    sizes = effort.choose((2,), (2, 4, 8), (2, 4, 8))
    with one_thread():
        measured = {f"{n} agents": _on_cpu(n, effort.choose(1, 3, 15)) for n in sizes}
    result: dict[str, Any] = {
        f"one core: {what}": {agents: found[what] for agents, found in measured.items()}
        for what in ("CPU-ms", "times as fast as the sequential scheme", "operations")
    }
    result[_GFLOP] = {agents: found[_GFLOP] for agents, found in measured.items()}
    result["load_average"] = psutil.getloadavg()[0]
    if torch.cuda.is_available():
        repeats = effort.choose(1, 20, 200)
        table = {f"{n} agents": _on_cuda(n, repeats) for n in (2, 4, 16)}
        result["CUDA, ms"] = table
        result["graph_16_over_2_agents"] = table["16 agents"]["graph"] / table["2 agents"]["graph"]
    return result


def make(
    agents: int,
    precision: str,
    device: torch.device,
    *,
    group: Group = ALONE,
    **options: Any,  # noqa: ANN401
) -> Masac:
    """Build MASAC of the benchmark's size; of a rank, if it learns with others."""
    spec = EnvSpec(
        "toy",
        agents,
        (ArraySpec("observation", "float32", (_WIDTH,)),),
        Continuous(_ACTION),
    )
    network = PluginConfig(name="mlp", hidden=_HIDDEN, agent_id=False)
    config = Config(share_parameters=False, **options)
    arithmetic = Precision(precision, device, group=group)
    return Masac(config, spec, network, arithmetic, device, seed=1)


def batch(agents: int, device: torch.device, size: int = _BATCH) -> ReplayBatch:
    """Draw random transitions."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    key, index = OBSERVATION + "observation", torch.arange(size, device=device)
    return ReplayBatch(
        arrays={
            key: normal(size, agents, _WIDTH),
            "action": normal(size, agents, _ACTION).tanh(),
        },
        next_arrays={key: normal(size, agents, _WIDTH)},
        reward=normal(size, agents),
        discount=torch.full((size, 1), 0.99, device=device),
        weight=torch.ones(size, device=device),
        index=index,
        age=index,
    )


def sequential_update(
    agents: int, precision: str, device: torch.device
) -> Callable[[ReplayBatch], object]:
    masac = make(agents, precision, device)
    loop = MasacLoop(masac, masac._config, gauss_seidel=True)
    generator = torch.Generator(device).manual_seed(0)
    return lambda rows: loop.update(rows, generator)


def _on_cpu(agents: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure medians over rounds, one update of each kind in turn."""
    cpu = torch.device("cpu")
    rows = batch(agents, cpu)
    updates: dict[str, Callable[[ReplayBatch], object]] = {}
    for precision in ("fp32", "bf16"):
        updates[precision] = make(agents, precision, cpu).update
        updates[f"sequential {precision}"] = sequential_update(agents, precision, cpu)
    spent: dict[str, list[float]] = {name: [] for name in updates}
    for turn in range(rounds + 2):
        for name, update in updates.items():
            started = time.process_time()
            update(rows)
            if turn >= 2:
                spent[name].append((time.process_time() - started) * 1e3)
    pairs = {p: zip(spent[f"sequential {p}"], spent[p], strict=True) for p in ("fp32", "bf16")}
    return {
        "CPU-ms": {name: statistics.median(times) for name, times in spent.items()},
        "times as fast as the sequential scheme": {
            precision: statistics.median(s / f for s, f in both)
            for precision, both in pairs.items()
        },
        "operations": {
            precision: count_operations(partial(updates[precision], rows)).total()
            for precision in pairs
        },
        _GFLOP: {
            "stacked": (stacked := count_gflop(lambda: updates["fp32"](rows))),
            "sequential": (sequential := count_gflop(lambda: updates["sequential fp32"](rows))),
            "sequential / stacked": sequential / stacked,
        },
    }


def _on_cuda(agents: int, repeats: int) -> dict[str, float]:
    """Measure milliseconds of one update, mean over repeats."""
    cuda = torch.device("cuda")
    rows = batch(agents, cuda)
    updates: dict[str, Callable[[ReplayBatch], object]] = {
        "graph": make(agents, "fp32", cuda).update,
        "graph, bf16": make(agents, "bf16", cuda).update,
        "eager": make(agents, "fp32", cuda, cuda_graph=False).update,
        "sequential": sequential_update(agents, "fp32", cuda),
    }
    table = {}
    for name, update in updates.items():
        for _ in range(10):
            update(rows)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            update(rows)
        torch.cuda.synchronize()
        table[name] = (time.perf_counter() - started) / repeats * 1e3
    return table | {
        "eager / graph": table["eager"] / table["graph"],
        "sequential / graph": table["sequential"] / table["graph"],
    }


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts operations, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in _VIEWS:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def count_gflop(call: Callable[[], object]) -> float:
    """Count 1e9 operations of a call's matrix products, the backward pass included."""
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops()) / 1e9


def count_operations(call: Callable[[], object]) -> Counter[str]:
    """Count ATen operations that a call dispatches, by name, views left out."""
    with _Operations() as operations:
        call()
    counted: Counter[str] = operations.counted
    return counted
