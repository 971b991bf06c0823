"""One COMA update at full size on the CPU, against the arithmetic it does and a plain matmul.

The terrain reference: 4 agents, 6 actions, maps of 11 x 11 with 7 channels for the actor and 12
for the critic, three layers of 256 kernels; 300 rows (5 episodes of 15 decisions)
in 5 minibatches of 60, 5 passes. FLOPs are those of direct convolutions, counted from the shapes of
the operations of `fp32 direct`, and stand beside every update. `direct` updates do without Toom and
Cook's method. Updates, 2048 x 2048 products and `bare` run in turns, so that a busy machine
disturbs all; CPU time counts. `bare` is what the arithmetic takes without an algorithm: forward and
backward passes of the same two networks, written with plain layers, on minibatches of 60 constant
rows.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.learner_service.algorithms import coma
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers import toom_cook
from murmur.learner_service.learning.minibatches import Rows
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.rollout import Rollout
from murmur.shared.config import PluginConfig
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import TimeStep

DESCRIPTION = (
    "a full-size COMA update on the CPU: share of the matmul rate, share spent outside the "
    "networks (target ≤ 5 %), bf16 against fp32 (target ≥ 1.3), formulations of the convolutions"
)

_MATMUL, _ROWS, _WIDTH = 2048, 60, 256  # of the product; of minibatch and layers written plainly
_SMALL_MATMUL, _SMALL_ROWS, _SMALL_WIDTH = 256, 32, 32  # the least that Toom and Cook take
_CPU = torch.device("cpu")
# Of the terrain system's authors.
_OPTIONS: dict[str, Any] = {
    **{"batch_size": 60, "batch_number": 5, "data_passes": 5},
    **{"clip_ratio": 0.0, "normalize_advantage": False},
}


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure updates with 1 and 2 threads in fp32 and bf16, and the convolutions one by one."""
    rounds = effort.choose(1, 2, 7)
    threads_before = torch.get_num_threads()
    small = effort is Effort.SMOKE
    batch = rollout(1 if small else 5)
    result: dict[str, Any] = {"updates": {}}
    try:
        for threads in (1,) if small else (1, 2):
            torch.set_num_threads(threads)
            rows = result["updates"][_threads(threads)] = compare(batch, rounds, small=small)
            for way in ("", " direct"):
                fp32, bf16 = (rows[f"{p}{way}"]["cpu_s"] for p in ("fp32", "bf16"))
                result[f"bf16_speedup{way}, {_threads(threads)}"] = fp32 / bf16
        torch.set_num_threads(1)
        # On some processors bf16 takes long.
        turns, precisions = (1, ("fp32",)) if small else (5 * rounds + 2, ("fp32", "bf16"))
        result["convolutions, ms"] = {p: convolutions(p, turns, small=small) for p in precisions}
    finally:
        torch.set_num_threads(threads_before)
    result["load_average"] = psutil.getloadavg()[0]
    return result


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def rollout(episodes: int) -> Rollout:
    """Play episodes of the real environment under random legal actions."""
    environment = make_environment(PluginConfig(name="terrain"), episodes)
    spec = environment.spec
    length = spec.max_episode_steps + 1
    generator = np.random.default_rng(0)
    seeds = np.arange(1, episodes + 1, dtype=np.uint64)
    restart = np.zeros(episodes, np.bool_)
    timestep = environment.reset(seeds)
    rows: list[dict[str, Tensor]] = []
    for t in range(length + 1):
        mask = timestep.observation[ACTION_MASK].astype(float)
        action = (mask * generator.random(mask.shape)).argmax(axis=-1).astype(np.int32)
        rows.append(_row(timestep, action))
        restart[:] = t == length - 1
        timestep = environment.step(action, restart, seeds + np.uint64(episodes))
    return Rollout({k: torch.stack([r[k] for r in rows]) for k in rows[0]}, [0] * episodes)


def _row(timestep: TimeStep, action: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    arrays = {
        "step_type": timestep.step_type,
        "reward": timestep.reward,
        "discount": timestep.discount,
        "action": action,
        **{OBSERVATION + k: v for k, v in timestep.observation.items()},
    }
    return {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}


def make(precision: str, *, small: bool, group: Group = ALONE) -> coma.Coma:
    """Build COMA as published; small: with narrow networks, one pass over one minibatch."""
    environment: VectorEnvironment = make_environment(PluginConfig(name="terrain"), 1)
    channels = (8, 8, 8) if small else (256, 256, 256)
    network = PluginConfig(
        name="cnn", channels=channels, kernels=(5, 4, 4), strides=(1, 1, 1), hidden=(256,)
    )
    passes = {"batch_number": 1, "data_passes": 1} if small else {}
    return coma.Coma(
        coma.Config(**_OPTIONS | passes),
        environment.spec,
        network,
        Precision(precision, _CPU, group=group),
        _CPU,
        seed=1,
    )


def compare(batch: Rollout, rounds: int, *, small: bool) -> dict[str, dict[str, float]]:
    """Measure fp32 and bf16 updates, both ways, and matmuls in turns; return medians."""
    precisions = ("fp32", "fp32 direct", "bf16", "bf16 direct")
    algorithms = {name: make(name.split()[0], small=small) for name in precisions}
    counter = FlopCounterMode(display=False)
    for name, algorithm in algorithms.items():
        with ways(name), counter if name == "fp32 direct" else nullcontext():
            algorithm.update(batch)
    flops = counter.get_total_flops()
    bare_step = bare(algorithms["fp32"], small=small)
    with counter:
        bare_step()
    bare_flops = counter.get_total_flops()
    clocks = {name: Clocks(algorithm) for name, algorithm in algorithms.items()}
    cpu: dict[str, list[float]] = {name: [] for name in (*algorithms, "matmul", "bare")}
    wall: dict[str, list[float]] = {name: [] for name in cpu}
    size = _SMALL_MATMUL if small else _MATMUL
    a = torch.randn(size, size)
    works: dict[str, Callable[[], object]] = {
        **{name: partial(algorithm.update, batch) for name, algorithm in algorithms.items()},
        "matmul": partial(torch.mm, a, a),
        "bare": bare_step,
    }
    for _ in range(rounds):
        for name in cpu:
            started = time.process_time(), time.perf_counter()
            with ways(name):
                works[name]()
            cpu[name].append(time.process_time() - started[0])
            wall[name].append(time.perf_counter() - started[1])
    matmul_rate = 2 * size**3 / statistics.median(cpu["matmul"])
    table = {}
    for name, clock in clocks.items():
        seconds = statistics.median(cpu[name])
        total = sum(cpu[name])
        networks = clock.seconds["networks"] + clock.seconds["backward and step"]
        table[name] = {
            "cpu_s": seconds,
            "wall_s": statistics.median(wall[name]),
            "gflop": flops / 1e9,
            "gflop_per_cpu_s": flops / seconds / 1e9,
            "matmul_gflop_per_cpu_s": matmul_rate / 1e9,
            "share_of_matmul_rate": flops / seconds / matmul_rate,
            "bare_share_of_matmul_rate": bare_flops / statistics.median(cpu["bare"]) / matmul_rate,
            "share_networks": clock.seconds["networks"] / total,
            "share_backward_and_step": clock.seconds["backward and step"] / total,
            "share_targets": clock.seconds["targets"] / total,
            "share_features": clock.seconds["features"] / total,
            "share_other": 1
            - (networks + clock.seconds["targets"] + clock.seconds["features"]) / total,
        }
    return table


@contextmanager
def ways(name: str) -> Iterator[None]:
    """Disable Toom and Cook's method if the name says `direct`."""
    pieces = toom_cook.pieces
    if name.endswith(" direct"):
        toom_cook.pieces = lambda *_: None
    try:
        yield
    finally:
        toom_cook.pieces = pieces


def bare(algorithm: coma.Coma, *, small: bool) -> Callable[[], None]:
    """Return a step that passes a minibatch forward and backward through plain networks."""
    width, rows = (_SMALL_WIDTH, _SMALL_ROWS) if small else (_WIDTH, _ROWS)
    networks = []
    for inputs in (algorithm._actor_inputs, algorithm._critic_inputs):
        assert inputs.shape.image is not None
        channels, *size = inputs.shape.image
        network = nn.Sequential(
            *(nn.Conv2d(channels, width, 5), nn.ReLU()),
            *(nn.Conv2d(width, width, 4), nn.ReLU()),
            *(nn.Conv2d(width, width, 4), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6)),
        )
        networks.append((network, torch.randn(rows, channels, *size)))

    def step() -> None:
        for network, image in networks:
            network.zero_grad(set_to_none=True)
            network(image).square().mean().backward()

    return step


class Clocks:
    """CPU seconds in the parts of an update, measured by wrappers around their calls.

    networks: forward passes of minibatches. backward and step: gradients, clipping, Adam.
    targets: the target critic's pass and what follows from it. features: building inputs and
    picking minibatches out of them. The rest is bookkeeping.
    """

    def __init__(self, algorithm: coma.Coma) -> None:
        """Wrap an algorithm for good."""
        self.seconds = dict.fromkeys(("networks", "backward and step", "targets", "features"), 0.0)
        self._part: str | None = None
        self._wrap(algorithm, "_actor_inputs", "features")
        self._wrap(algorithm, "_critic_inputs", "features")
        self._wrap(algorithm._precision, "step_together", "backward and step")
        for network in (algorithm.actor, algorithm.critic):
            network.forward = self._timed(network.forward, "networks")
        prepare = algorithm._rows

        def prepared(batch: Rollout) -> Rows:
            rows = prepare(batch)
            for inputs in (rows.actor, rows.critic):
                self._wrap(inputs, "each", "features")
            return rows

        algorithm._rows = self._timed(prepared, "targets")  # type: ignore[method-assign]

    def _wrap(self, owner: object, name: str, part: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with self._in(part):
                return function(*args, **kwargs)

        return timed

    @contextmanager
    def _in(self, part: str) -> Any:  # noqa: ANN401
        """Charge time to the innermost part; a network's pass for the targets counts as theirs."""
        outer = self._part
        if outer == "targets" and part == "networks":
            yield
            return
        started = time.process_time()
        self._part = part
        try:
            yield
        finally:
            self._part = outer
            spent = time.process_time() - started
            self.seconds[part] += spent
            if outer is not None:
                self.seconds[outer] -= spent


class ToomCook(nn.Module):
    """A convolution over a small map in fewer multiplications."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [B, C, H, W] to [B, O, H', W']."""
        assert self.bias is not None
        pieces = toom_cook.pieces(x, self.weight, (1, 1))
        assert pieces is not None
        return toom_cook.conv2d(x, self.weight, self.bias, pieces)


class Unfold(nn.Module):
    """A convolution without padding, stride 1, as patches times a matrix."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [B, C, H, W] to [B, O, H', W']."""
        o, c, kh, kw = self.weight.shape
        assert self.bias is not None
        patches = x.unfold(2, kh, 1).unfold(3, kw, 1)  # [B, C, H', W', kh, kw]
        b, _, h, w = patches.shape[:4]
        flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(b * h * w, c * kh * kw)
        out = torch.addmm(self.bias, flat, self.weight.reshape(o, -1).T)
        return out.view(b, h, w, o).permute(0, 3, 1, 2)


def convolutions(precision: str, turns: int, *, small: bool) -> dict[str, dict[str, float]]:
    """Measure CPU ms of a minibatch forward and backward, by formulation and critic's layer."""
    width, rows = (_SMALL_WIDTH, _SMALL_ROWS) if small else (_WIDTH, _ROWS)
    torch.manual_seed(0)
    table: dict[str, dict[str, float]] = {}
    for c, size, kernel in ((12, 11, 5), (width, 7, 4), (width, 4, 4)):
        layer = nn.Conv2d(c, width, kernel)
        last = nn.Conv2d(c, width, kernel)
        last.load_state_dict(layer.state_dict())
        last.weight.data = last.weight.data.contiguous(memory_format=torch.channels_last)
        image = torch.randn(rows, c, size, size)
        image_last = image.contiguous(memory_format=torch.channels_last)
        candidates: dict[str, tuple[nn.Module, Tensor]] = {
            "default": (layer, image),
            "channels_last": (last, image_last),
            "unfold": (Unfold(layer), image),
            "unfold_channels_last": (Unfold(layer), image_last),
        }
        if kernel < size <= toom_cook.LARGEST_MAP:
            candidates["toom_cook"] = (ToomCook(layer), image)
        gradient_of_input = c == width  # the first layer's input needs none
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for turn in range(turns):
            for candidate, (module, x) in candidates.items():
                x = x.detach().requires_grad_(gradient_of_input)
                started = time.process_time()
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    out = module(x)
                out.backward(torch.ones_like(out))
                if turn >= 2 or turn == turns - 1:  # the first two warm up
                    times[candidate].append(time.process_time() - started)
        medians = {n: statistics.median(t) * 1e3 for n, t in times.items()}
        flops = 2 * rows * width * c * kernel**2 * (size - kernel + 1) ** 2
        flops *= 3 if gradient_of_input else 2
        medians["best, GFLOP/s"] = flops / min(medians.values()) / 1e6
        for name, value in medians.items():
            table.setdefault(name, {})[f"{c} x {size} x {size}, k {kernel}"] = value
    return table
