"""Factories of environments of other libraries: "package.module:factory" and its options."""

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from murmur.env_service.adapters.pixels import Resize
from murmur.env_service.adapters.teams import RETURN, TEAMS, Teams
from murmur.env_service.adapters.turns import TurnByTurn
from murmur.shared.config import Section
from murmur.shared.config.episode_options import Value
from murmur.shared.config.import_advice import import_advice
from murmur.shared.config.named_plugin import find_object
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.traces import error_message

Factory = Callable[..., Any]

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
    joint_actions: bool | None = Field(
        None,
        description="MultiDiscrete, MultiBinary, and Tuple and Dict of choices: every combination "
        "is one action, at most 4096; null: only for algorithms that make one choice, which are "
        "all but mappo, happo, ippo and ppo",
    )
    arrays: tuple[str, ...] = Field(
        (),
        description="keys of Dict observations that stay arrays of their own, such as sets of "
        "entities [E, D], their masks `<key>_mask` and `adjacency`; the rest is flattened",
    )
    gray: bool = Field(False, description="images of bytes travel in gray: a third of the bytes")

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

    def missing(module: Any, part: str) -> str:
        turns = part == "parallel_env" and hasattr(module, "env")
        return f"its agents take turns: write {path.partition(':')[0]}:env" if turns else ""

    found = find_object(path, missing)
    if not callable(found):
        raise ConfigError(
            f"'{path}' is a {type(found).__name__}; name a function or class that makes an "
            "environment"
        )
    factory: Factory = found
    return factory


def create(config: AdapterConfig, **more: Any) -> Any:
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
        return stepped(factory(**given))
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


def stepped(environment: Any) -> Any:
    """Return the environment; one of PettingZoo's AEC kind with the steps of a parallel one.

    If it is parallelizable all agents act in each step, else the agent with the turn does.
    """
    if not hasattr(environment, "agent_iter"):
        return environment
    if not (getattr(environment, "metadata", None) or {}).get("is_parallelizable"):
        return TurnByTurn(environment)
    from pettingzoo.utils import aec_to_parallel

    return aec_to_parallel(environment)


def first_reset(environment: Any, factory: str, returns: str) -> tuple[Any, Any]:
    """Call reset(seed=0) and return its pair of observation and info.

    Raises:
        ConfigError: if reset raises or returns no pair, or its infos are no dictionary.
    """
    what = "infos are" if "infos" in returns else "info is"
    calling = f"reset(seed=0), which should return {returns},"
    result = attempt(factory, calling, lambda: environment.reset(seed=0))
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"'{factory}': reset() must return {returns}; it returned a {type(result).__name__}"
        )
    if not isinstance(result[1], Mapping):
        raise ConfigError(
            f"'{factory}': reset() must return {returns}; its {what} a "
            f"{type(result[1]).__name__}, not a dictionary"
        )
    return result


def require_reset_options(
    environment: Any, factory: str, options: Mapping[str, Value], **more: Any
) -> None:
    """Check that reset() takes options, by a reset with these.

    Args:
        environment: environment of another library.
        factory: name of what made it.
        options: options of an episode.
        more: further options of this reset alone.

    Raises:
        ConfigError: if its reset() has no such parameter, or raises.
    """
    inner = getattr(environment, "unwrapped", environment)
    names = ", ".join(options)
    with contextlib.suppress(TypeError, ValueError):
        taken = inspect.signature(inner.reset).parameters.values()
        if not any(p.name == "options" or p.kind is p.VAR_KEYWORD for p in taken):
            raise ConfigError(
                f"'{factory}' takes no options in reset(), so environment.curriculum and "
                f"environment.randomize cannot change {names}: write reset(self, seed=None, "
                "options=None) and read them there"
            )
    calling = (
        f"reset(seed=0, options={dict(options)}), with what environment.curriculum and "
        "environment.randomize name,"
    )
    attempt(factory, calling, lambda: environment.reset(seed=0, options={**options, **more}))


def attempt(factory: str, what: str, call: Callable[[], Any], fix: str = "") -> Any:
    """Call another library's code, and return what it returns.

    Args:
        factory: name of what made the environment.
        what: name of the call for the message.
        call: function to call.
        fix: advice for the user; empty: none.

    Raises:
        ConfigError: if it raises, naming the call and the fix.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        advice = f"; {fix}" if fix else ""
        raise ConfigError(f"'{factory}': {what} raised {error_message(error)}{advice}") from error


def read_spaces(environment: Any, factory: str, prefix: str = "") -> list[Any]:
    """Read the observation space and the action space of an environment.

    Args:
        environment: environment of Gymnasium.
        factory: name of what made it.
        prefix: beginning of the attributes' names.

    Raises:
        ConfigError: if one is missing or raises, naming it and the fix.
    """
    return [
        attempt(
            factory,
            f"reading {name}",
            partial(getattr, environment, name),
            f"set self.{name} to one of gymnasium.spaces in its __init__",
        )
        for name in (f"{prefix}observation_space", f"{prefix}action_space")
    ]


def read_info(info: Mapping[Any, Any], name: str) -> Any:
    """Return an info's value by name; a.b is b in its dictionary a; None if missing."""
    if name in info:
        return info[name]
    first, dot, rest = name.partition(".")
    inner = info.get(first)
    return read_info(inner, rest) if dot and isinstance(inner, Mapping) else None
