"""Specification of a sweep: a YAML file, or the arguments of `murmur sweep`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from shared.config import Section
from shared.config.experiment import ExperimentConfig
from shared.config.files import config_names, load, read_file
from shared.config.section import validate
from shared.config.text import NO_YAML, one_line, parse_yaml, short
from shared.process.errors import ConfigError

DISTRIBUTIONS = ("uniform", "log_uniform", "integers", "choice")
OWN_KEYS = {"run.seed": "seeds", "run.name": "name", "run.directory": "directory"}


class Distribution(Section):
    """Distribution from which a random search draws a value.

    Attributes:
        kind: kind of the distribution: uniform and log_uniform give floats in [low, high], integers
            whole numbers from low to high, both included, choice one of `values`.
    """

    kind: Literal["uniform", "log_uniform", "integers", "choice"]
    low: float = 0.0
    high: float = 0.0
    values: tuple[Any, ...] = ()


def _distribution(value: object) -> object:
    """Convert [1, 2] and {log_uniform: [1, 2]} to a Distribution."""
    if isinstance(value, Distribution):
        return value
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in DISTRIBUTIONS:
        ((kind, limits),) = value.items()
    elif isinstance(value, list | tuple):
        kind, limits = "choice", value
    else:
        raise ValueError(
            f"{short(value)} says no values: write a list, [1, 2], or one of "
            + ", ".join(f"{{{name}: [...]}}" for name in DISTRIBUTIONS)
        )
    if not isinstance(limits, list | tuple) or not limits:
        raise ValueError(f"{kind}: {short(limits)} is no list of values")
    if kind == "choice":
        if len({one_line(value) for value in limits}) < len(limits):
            raise ValueError(f"{short(limits)} has a value twice; for repeats use `seeds`")
        return Distribution(kind="choice", values=tuple(limits))
    whole = kind == "integers"
    if whole:
        limits = [_whole(limit) for limit in limits]
    numbers = [x for x in limits if isinstance(x, int if whole else int | float)]
    if len(numbers) != 2 or len(limits) != 2 or isinstance(numbers[0], bool):
        needed = "two integers" if whole else "two numbers"
        raise ValueError(f"{kind}: {short(limits)}: give {needed}, [low, high]")
    low, high = numbers
    if not low < high or (kind == "log_uniform" and low <= 0):
        above = "0 < " if kind == "log_uniform" else ""
        raise ValueError(f"{kind}: {short(limits)}: it needs {above}low < high")
    return Distribution(kind=kind, low=low, high=high)


def _whole(value: object) -> object:
    """Convert 1e3 to 1000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _seeds(value: object) -> object:
    """Convert 5 to the seeds 1 to 5."""
    value = _whole(value)
    return tuple(range(1, value + 1)) if isinstance(value, int) and value > 0 else value


def _names(value: object) -> object:
    """Convert one name to a list of one."""
    return (value,) if isinstance(value, str) else value


Values = Annotated[Distribution, BeforeValidator(_distribution)]


class SweepConfig(Section):
    """A sweep: every configuration with every setting and every seed."""

    configs: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        min_length=1, description="configurations: names or YAML files"
    )
    name: str = Field("", description="name of the sweep; empty: that of the first configuration")
    directory: str = Field("runs", description="folder that holds the sweep's folder")
    method: Literal["grid", "random", "optuna"] = Field(
        "grid",
        description="grid: all combinations of `vary`; random: `trials` independent draws; optuna: "
        "`trials` draws by Optuna's TPE, which learns from the scores (extra search)",
    )
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds)] = Field(
        (1,), min_length=1, description="values of run.seed; a number N stands for 1 to N"
    )
    vary: dict[str, Values] = Field(
        {},
        description="configuration keys and their values: a list, or {uniform: [low, high]}, "
        "{log_uniform: [low, high]}, {integers: [low, high]}, {choice: [...]}",
    )
    set: dict[str, Any] = Field({}, description="configuration keys that are the same in all runs")
    trials: int = Field(0, ge=0, description="random, optuna: how many draws")
    search_seed: int = Field(1, ge=0, description="random, optuna: seed of the draws")
    prune: bool = Field(
        True,
        description="optuna: stop a run once its evaluation is worse than the median of the "
        "earlier runs' at the same update",
    )
    parallel: int = Field(
        0, ge=0, description="runs at once; 0: as many as cores and memory of the machine hold"
    )

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError(f"{short(list(seeds))}: seeds are different numbers from 0")
        return seeds

    @model_validator(mode="after")
    def _fits_the_method(self) -> "SweepConfig":
        for key in (*self.vary, *self.set):
            if key in OWN_KEYS:
                raise ValueError(f"'{key}' is chosen by the sweep; set its `{OWN_KEYS[key]}`")
        if both := set(self.vary) & set(self.set):
            raise ValueError(f"'{both.pop()}' is in both `set` and `vary`; keep one")
        if self.method == "grid":
            for key, values in self.vary.items():
                if values.kind != "choice":
                    raise ValueError(
                        f"vary: {key}: {values.kind} has no grid; list its values, or set "
                        "method: random and trials"
                    )
            if self.trials:
                raise ValueError(f"trials={self.trials}: a grid has all; set method: random")
            return self
        if not self.trials or not self.vary:
            missing = "trials: how many draws" if self.vary else "vary: what to draw"
            raise ValueError(f"method: {self.method} needs {missing}")
        if self.method == "optuna" and len(self.seeds) * len(self.configs) > 1:
            raise ValueError(
                f"method: optuna searches with one configuration and one seed, not with "
                f"{len(self.configs)} and {len(self.seeds)}; then run the best settings with "
                "several seeds"
            )
        return self


def load_spec(targets: list[str], changes: Mapping[str, Any]) -> SweepConfig:
    """Load the sweep that the arguments of `murmur sweep` mean.

    Args:
        targets: one sweep file, or configurations.
        changes: keys of the sweep that replace those of the file; `set` and `vary` are merged.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    files = [target for target in targets if is_sweep_file(target)]
    if files and len(targets) > 1:
        raise ConfigError(
            f"'{files[0]}' is a sweep file, which names its configurations itself; give it alone"
        )
    data: dict[str, Any] = {"configs": tuple(targets)}
    if files:
        data = read_file(Path(files[0]), ())
    for key, value in changes.items():
        below = data.get(key)
        merged = isinstance(below, dict) and isinstance(value, dict)
        data[key] = {**below, **value} if merged and below else value
    return validate(SweepConfig, data)


def is_sweep_file(target: str) -> bool:
    """Return whether a name is a YAML file with the key `configs`, which no configuration has."""
    path = Path(target)
    if target in config_names() or not path.is_file():
        return False
    try:
        data = parse_yaml(path.read_text(errors="replace"), target)
    except NO_YAML:
        return False  # `load` says what is wrong with it
    return isinstance(data, dict) and "configs" in data


def varied(items: list[str]) -> dict[str, Any]:
    """Parse `vary` from "KEY=VALUE,VALUE" items; values in YAML syntax.

    Raises:
        ConfigError: for an item that is not so.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise ConfigError(f"--vary {item!r}: write it as section.key=value,value")
        try:
            values = parse_yaml(f"[{text}]", f"--vary {key}", key.strip())
        except NO_YAML as error:
            raise ConfigError(f"--vary {item!r}: {' '.join(str(error).split())}") from None
        one = values[0] if len(values) == 1 else None
        drawn = isinstance(one, dict) and len(one) == 1 and next(iter(one)) in DISTRIBUTIONS
        found[key.strip()] = one if drawn or isinstance(one, list) else values
    return found


def experiment(
    spec: SweepConfig, config: str, settings: Mapping[str, Any], name: str
) -> ExperimentConfig:
    """Build the configuration of one run of a sweep.

    Ports are any free ones: several runs share the machine.

    Args:
        spec: the sweep.
        config: one of its configurations.
        settings: settings of this run, run.seed among them.
        name: name of the run.

    Raises:
        ConfigError: if they do not fit together.
    """
    from murmur.runs.settings import TASK, resolve

    ports = {"learner.port": 0, "learner.metrics_port": 0, "env_server.metrics_port": 0}
    items = {**ports, **spec.set, **settings, "run.name": name}
    loaded = load(config, [f"{k}={one_line(v)}" for k, v in items.items()])
    resolve(loaded)  # a wrong option of an algorithm or network too ends the sweep here
    return resolve(loaded, TASK)
