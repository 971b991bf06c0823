"""Specification of a sweep: a YAML file, or the arguments of `murmur sweep`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from murmur.shared.config import Section
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import config_names, load, read_file
from murmur.shared.config.section import validate
from murmur.shared.config.text import NO_YAML, one_line, parse_yaml, short
from murmur.shared.process.errors import ConfigError

OWN_KEYS = {"run.seed": "seeds", "run.name": "name", "run.directory": "directory"}
_SEARCH = ("method", "trials", "search_seed", "prune")
_DRAWN = ("uniform", "log_uniform", "integers", "choice")
NO_SEARCH = (
    "a sweep trains all combinations of the values that it lists; for a search let Optuna call "
    "murmur.train (docs/many-runs.md#search-with-optuna)"
)


def _values(value: object) -> object:
    """Refuse what is no list of different values."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(one, dict) and len(one) == 1 and next(iter(one)) in _DRAWN:
        raise ValueError(f"{short(one)}: {NO_SEARCH}")
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{short(value)} says no values: write a list, [1, 2]")
    if len({one_line(each) for each in value}) < len(value):
        raise ValueError(f"{short(value)} has a value twice; for repeats use `seeds`")
    return tuple(value)


def _seeds(value: object) -> object:
    """Convert 5 to the seeds 1 to 5."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e1
    return tuple(range(1, value + 1)) if isinstance(value, int) and value > 0 else value


def _names(value: object) -> object:
    """Convert one name to a list of one."""
    return (value,) if isinstance(value, str) else value


Values = Annotated[tuple[Any, ...], BeforeValidator(_values)]


class SweepConfig(Section):
    """A sweep: every configuration with every setting and every seed."""

    configs: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        min_length=1, description="configurations: names or YAML files"
    )
    name: str = Field("", description="name of the sweep; empty: that of the first configuration")
    directory: str = Field("runs", description="folder that holds the sweep's folder")
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds)] = Field(
        (1,), min_length=1, description="values of run.seed; a number N stands for 1 to N"
    )
    vary: dict[str, Values] = Field(
        {}, description="configuration keys and the values of each: algorithm.name: [mappo, coma]"
    )
    set: dict[str, Any] = Field({}, description="configuration keys that are the same in all runs")
    parallel: int = Field(
        0, ge=0, description="runs at once; 0: as many as cores and memory of the machine hold"
    )

    @model_validator(mode="before")
    @classmethod
    def _has_no_search(cls, data: object) -> object:
        if isinstance(data, Mapping) and (given := [key for key in _SEARCH if key in data]):
            raise ValueError(f"'{given[0]}' is no key any more: {NO_SEARCH}")
        return data

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError(f"{short(list(seeds))}: seeds are different numbers from 0")
        return seeds

    @model_validator(mode="after")
    def _sets_each_key_once(self) -> "SweepConfig":
        for key in (*self.vary, *self.set):
            if key in OWN_KEYS:
                raise ValueError(f"'{key}' is chosen by the sweep; set its `{OWN_KEYS[key]}`")
        if both := set(self.vary) & set(self.set):
            raise ValueError(f"'{both.pop()}' is in both `set` and `vary`; keep one")
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
        found[key.strip()] = one if isinstance(one, list) else values
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
    from murmur.runs.settings import TASK, with_plugin_defaults

    ports = {"learner.port": 0, "learner.metrics_port": 0, "env_server.metrics_port": 0}
    items = {**ports, **spec.set, **settings, "run.name": name}
    loaded = load(config, [f"{k}={one_line(v)}" for k, v in items.items()])
    # A wrong option of an algorithm or network too ends the sweep here.
    with_plugin_defaults(loaded)
    return with_plugin_defaults(loaded, TASK)
