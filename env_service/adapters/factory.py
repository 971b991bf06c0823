"""Factories of environments of other libraries: "package.module:factory" and its options."""

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from murmur.env_service.adapters.pixels import Reduction, Resize
from murmur.env_service.adapters.teams import RETURN, TEAMS, Teams
from murmur.shared.config import Section
from murmur.shared.config.import_advice import import_advice
from murmur.shared.config.named_plugin import find_object
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.traces import error_message

Factory = Callable[..., Any]

TURNS = (
    "its agents take turns (AEC), and murmur steps all agents at once; name a factory of your own "
    "in which agents that wait have one legal action: docs/turns.md has one"
)
_OWN_METRICS = ("return", "length")


def _are_new(metrics: tuple[str, ...]) -> tuple[str, ...]:
    for name in metrics:
        if name in _OWN_METRICS or name.startswith(RETURN):
            raise ValueError(f"'{name}' is always reported; leave it out")
    return metrics


MoreMetrics = Annotated[tuple[str, ...], AfterValidator(_are_new)]


class AdapterConfig(Section):
    """Options of every environment that comes from another library."""

    factory: str = Field(description="package.module:factory, what makes one environment")
    arguments: dict[str, Any] = Field(default={}, description="keyword arguments of the factory")
    max_episode_steps: int = Field(
        0,
        ge=0,
        description="truncate episodes after this number of steps; 0: as the environment says",
    )
    renew: bool = Field(
        False,
        description="make a new environment for every episode: for those that remember earlier "
        "episodes, as `murmur check-env` finds out",
    )
    metrics: MoreMetrics = Field(
        (),
        description="numbers among the infos of an episode's last step to report, means over the "
        "agents that have them; a.b is b in the dictionary a",
    )
    teams: Teams = Field("auto", description=TEAMS)
    images: Literal["uint8", "all", "none"] = Field(
        "uint8",
        description="which Boxes become [C, H, W] arrays: those of bytes, all with three "
        "dimensions, none; the rest is flattened",
    )
    channels_last: bool | Literal["auto"] = Field(
        "auto", description="images come as H×W×C; auto: the smaller end is C"
    )
    resize: Resize = Field(
        "auto",
        description="pixels a side, or [height, width], of images of bytes as they travel; auto: "
        "84 where they have more than 128 × 128 pixels; none: as they are",
    )
    gray: bool = Field(False, description="images of bytes travel in gray: a third of the bytes")

    @property
    def reduction(self) -> Reduction:
        """Return the reduction of images."""
        return Reduction(self.resize, self.gray)

    @field_validator("factory")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError(
                f"'{value}': write it as package.module:factory, "
                "for example mpe2.simple_spread_v3:parallel_env"
            )
        return value


def find_factory(path: str) -> Factory:
    """Import the factory that "package.module:factory" names.

    Raises:
        ConfigError: if it cannot be imported or called, naming the fix.
    """
    # pygame greets on standard output when it is imported.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

    def missing(module: Any, part: str) -> str:  # noqa: ANN401
        return (
            _only_turns(path, module) if part == "parallel_env" and hasattr(module, "env") else ""
        )

    found = find_object(path, missing)
    if not callable(found):
        raise ConfigError(
            f"'{path}' is a {type(found).__name__}; name a function or class that makes an "
            "environment"
        )
    factory: Factory = found
    return factory


def _only_turns(path: str, module: Any) -> str:  # noqa: ANN401
    """Return the advice for a PettingZoo module that has only an AEC environment."""
    metadata = getattr(getattr(module, "raw_env", None), "metadata", None) or {}
    return f"write {path.partition(':')[0]}:env" if metadata.get("is_parallelizable") else TURNS


def create(config: AdapterConfig, **more: Any) -> Any:  # noqa: ANN401 - whatever the factory makes
    """Make one environment.

    Args:
        config: options with the factory and its arguments.
        more: keyword arguments beside the configured ones, which win.

    Raises:
        ConfigError: if the factory raises, naming its arguments and the fix.
    """
    factory = find_factory(config.factory)
    given = {**more, **config.arguments}
    try:
        return parallel(factory(**given))
    except (Exception, SystemExit) as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
        call = f"{config.factory}({arguments})"
        # Gymnasium says in its own error which of its extras is missing; murmur's is meant.
        for cause in (error, error.__cause__):
            if isinstance(cause, ModuleNotFoundError):
                raise ConfigError(import_advice(call, cause)) from error
        fix = "its keyword arguments are environment.arguments"
        if isinstance(error, TypeError) and "unexpected keyword argument 'render_mode'" in str(
            error
        ):
            fix = "to be drawn it must take the keyword argument render_mode, also in its __init__"
        raise ConfigError(f"{call} raised {error_message(error)}; {fix}") from error


def parallel(environment: Any) -> Any:  # noqa: ANN401
    """Return the environment, as a parallel one if it is an AEC that PettingZoo can convert."""
    metadata = getattr(environment, "metadata", None) or {}
    if not is_aec(environment) or not metadata.get("is_parallelizable"):
        return environment
    from pettingzoo.utils import aec_to_parallel

    return aec_to_parallel(environment)


def is_aec(environment: Any) -> bool:  # noqa: ANN401
    """Return whether agents take turns in an environment, as in PettingZoo's AEC environments."""
    return hasattr(environment, "agent_iter")


def first_reset(environment: Any, factory: str, returns: str) -> tuple[Any, Any]:  # noqa: ANN401
    """Call reset(seed=0) and return its pair of observation and info.

    Raises:
        ConfigError: if reset raises or returns no pair.
    """
    try:
        result = environment.reset(seed=0)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"'{factory}': reset(seed=0), which should return {returns}, raised "
            f"{error_message(error)}"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"'{factory}': reset() must return {returns}; it returned a {type(result).__name__}"
        )
    return result


def read(factory: str, what: str, get: Callable[[], Any], fix: str) -> Any:  # noqa: ANN401
    """Read a property that an environment must have, by calling `get`.

    Raises:
        ConfigError: if `get` raises, naming the property and the fix.
    """
    try:
        return get()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"'{factory}': reading {what} raised {error_message(error)}; {fix}"
        ) from error


def read_info(info: Mapping[Any, Any], name: str) -> Any:  # noqa: ANN401
    """Return an info's value by name; a.b is b in its dictionary a; None if missing."""
    if name in info:
        return info[name]
    first, dot, rest = name.partition(".")
    inner = info.get(first)
    return read_info(inner, rest) if dot and isinstance(inner, Mapping) else None
