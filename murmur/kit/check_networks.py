"""Speed of learning and acting with the networks of configurations, in each precision."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from murmur.benchmarks.gpu_topics.figures import Case
from murmur.benchmarks.gpu_topics.parts import Actor, Trial, quantile
from murmur.benchmarks.masac_update import count_gflop
from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.learning.options import OnPolicyConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from murmur.text import number, plain

CONFIGS = ("spread", "terrain-reference")
_PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
_COLUMNS = ("networks of", "on", "rows", "learn, ms", "rows/s", "TFLOP/s", "envs", "act, ms")
_REPEATS, _BUDGET_S = 10, 0.5
_MOST_ACTING = 256  # environments of a message


@dataclass(frozen=True)
class Speed:
    """One configuration in one precision.

    Attributes:
        config: name of the configuration.
        device: "cuda" or "cpu".
        precision: fp32 (TF32 on CUDA), bf16 or fp16.
        rows: environment rows of the minibatch.
        gflop: work of its forward and backward passes, 1e9 operations.
        update_ms: time of one minibatch's forward pass, backward pass and optimizer step [ms].
        acting_rows: number of environments acted for at once.
        act_ms: time of an act, copies included [ms].
    """

    config: str
    device: str
    precision: str
    rows: int
    gflop: float
    update_ms: float
    acting_rows: int
    act_ms: float


def network_speeds(configs: Sequence[str] = CONFIGS, device: str = "") -> Iterator[Speed]:
    """Time each configuration's networks at the shapes of its minibatch and messages.

    Args:
        configs: names or files of configurations.
        device: device, "cuda" or "cpu"; "": CUDA if there is one.

    Raises:
        MurmurError: if a configuration or its environment is not available here, or it has none.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name in configs:
        config = load(name, [], {})
        if not config.environment.name:
            raise ConfigError(f"--config {name}: it has no environment; name one that has")
        # One pass over one minibatch: what an update repeats is the same again.
        one = ("algorithm.batch_number=1", "algorithm.data_passes=1")
        on_policy = isinstance(algorithm_config(config.algorithm), OnPolicyConfig)
        case = Case(name, name, one if on_policy else ())
        server = config.env_server
        acting = max(server.envs_per_worker // server.sessions_per_worker, 1)
        acting = min(acting, _MOST_ACTING)
        eager = Trial(case, device, graphs=False)
        batch = eager.sample()
        gflop = count_gflop(lambda trial=eager, rows=batch: trial.algorithm.update(rows))  # type: ignore[misc]
        for precision in _PRECISIONS[device]:
            trial = Trial(case, device, precision=precision)
            update = trial.update_ms(_REPEATS, _BUDGET_S)
            act = quantile(Actor(trial, acting).milliseconds(_REPEATS, _BUDGET_S), 0.5)
            yield Speed(name, device, precision, batch.size, gflop, update, acting, act)


def speeds_table(speeds: Sequence[Speed]) -> Table:
    """Return the speeds as a table for the terminal."""
    table = Table(*_COLUMNS, box=None, padding=(0, 1, 0, 0))
    for s in speeds:
        rows_per_s, tflop_per_s = round(1e3 * s.rows / s.update_ms), s.gflop / s.update_ms
        figures = (s.rows, s.update_ms, rows_per_s, tflop_per_s, s.acting_rows, s.act_ms)
        table.add_row(plain(s.config), f"{s.device} {s.precision}", *map(number, figures))
    return table
