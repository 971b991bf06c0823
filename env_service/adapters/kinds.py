"""Recognition of the plug-in that steps an environment of another library."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from murmur.env_service.adapters.factory import AdapterConfig, Factory, create, find_factory
from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.watchdog.faults import close_quietly
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK

# Where others keep masks: sb3-contrib, PyMARL, RLlib, and spellings of ours.
_MASK_METHODS = (
    *("action_masks", "action_mask", "get_action_mask", "get_action_masks", "valid_action_mask"),
    *("get_avail_actions", "get_avail_agent_actions"),
)
_MASK_NAMES = (
    *("action_masks", "actions_mask", "action-mask", "valid_action_mask", "legal_mask"),
    *("avail_actions", "available_actions", "legal_actions", "valid_actions"),
)
_MOST_WRAPPERS = 50
_PLUGINS = ("murmur", "pettingzoo", "gymnasium", "gymnasium_vector")


def _has(environment: Any, name: str) -> bool:
    """Return whether it has an attribute, even one that raises: `read` reports that later."""
    try:
        return hasattr(environment, name)
    except Exception:
        return True


def kind_of(environment: Any) -> str:
    """Find the plug-in that steps an environment.

    Returns:
        "murmur", "pettingzoo", "gymnasium" or "gymnasium_vector"; for an object that murmur cannot
        step, a phrase with its type and the fix.
    """
    if isinstance(environment, VectorEnvironment):
        return "murmur"
    classes = {f"{c.__module__}.{c.__qualname__}" for c in type(environment).__mro__}
    kind = type(environment).__name__
    if "gymnasium.vector.vector_env.VectorEnv" in classes:
        return "gymnasium_vector"
    if "gymnasium.core.Env" in classes:
        return "gymnasium"
    if _has(environment, "possible_agents") and _has(environment, "step"):
        return "pettingzoo"
    if "gym.core.Env" in classes:
        return f"a {kind} of the old gym package; use its gymnasium version, or wrap it with shimmy"
    missing = [x for x in ("possible_agents", "reset", "step") if not _has(environment, x)]
    return f"a {kind}, neither a PettingZoo parallel environment nor a Gymnasium environment" + (
        f"; the first has {', '.join(missing)}, this has not" if len(missing) < 3 else ""
    )


def create_copies(config: AdapterConfig, kind: str, num_envs: int) -> list[Any]:
    """Make N environments that the plug-in `kind` steps.

    Raises:
        ConfigError: if the factory cannot be called, or makes another object, naming its type and
            the fix.
    """
    environment = create(config)
    require_kind(environment, config, kind)
    return [environment, *(create(config) for _ in range(num_envs - 1))]


def require_kind(environment: Any, config: AdapterConfig, kind: str) -> None:
    """Refuse an environment that another plug-in than `kind` steps.

    Raises:
        ConfigError: naming its type and the fix.
    """
    found = kind_of(environment)
    if found == kind:
        return
    if found in _PLUGINS:
        fix = "name: its own plug-in" if found == "murmur" else f"environment.name: {found}"
        found = f"a {type(environment).__name__}; set {fix}"
    raise ConfigError(f"'{config.factory}' gave {found}")


def unread_masks(
    environment: Any, infos: Sequence[Mapping[Any, Any]], spaces: Sequence[Any]
) -> tuple[tuple[str, str, str], ...]:
    """Find action masks in places that murmur does not read.

    Args:
        environment: environment without an `action_mask`.
        infos: infos of its first reset.
        spaces: observation spaces.

    Returns:
        (kind, subject, sentence) of the first one found, for a notice; empty if there is none.
    """
    where = ""
    for info in infos:
        where = where or next((f"info '{name}'" for name in _MASK_NAMES if name in info), "")
    for keys in map(_keys, spaces):
        names = (ACTION_MASK, *_MASK_NAMES)
        where = where or next((f"observation '{name}'" for name in names if name in keys), "")
    inner, depth = environment, 0
    while not where and inner is not None and depth < _MOST_WRAPPERS:
        for name in _MASK_METHODS:
            if callable(inspect.getattr_static(inner, name, None)):
                where = f"{type(inner).__name__}.{name}()"
                break
        inner, depth = getattr(inner, "env", None), depth + 1
    if not where:
        return ()
    text = (
        f"{where} is not used as a mask, so every action counts as legal; murmur reads masks of "
        f"Discrete actions (1 legal, 0 not) from info['{ACTION_MASK}'] of reset() and every step, "
        f"or from '{ACTION_MASK}' in a Dict observation"
    )
    return (("mask_unused", ACTION_MASK, text),)


def _keys(space: Any) -> set[Any]:
    """Return all keys of a Dict space, and of Dict spaces nested in it or in a Tuple."""
    inner = getattr(space, "spaces", None)
    if not isinstance(inner, Mapping):
        return set().union(*map(_keys, inner)) if isinstance(inner, tuple) else set()
    return set(inner).union(*map(_keys, inner.values()))


def recognise(path: str, arguments: Mapping[str, Any]) -> str:
    """Find the plug-in for "package.module:factory", by calling the factory.

    Returns:
        "murmur" for a factory of a VectorEnvironment of num_envs copies (see
        murmur.shared.config.named_plugin);
        else "pettingzoo", "gymnasium" or "gymnasium_vector".

    Raises:
        ConfigError: if none of these fits, naming the fix.
    """
    factory = find_factory(path)
    if isinstance(factory, type) and issubclass(factory, VectorEnvironment):
        return "murmur"
    if not arguments and _needs_one_argument(factory):
        return "murmur"
    environment = create(AdapterConfig(factory=path, arguments=dict(arguments)))
    kind = kind_of(environment)
    close_quietly(environment)  # `check_environment` says it if that fails
    if kind not in _PLUGINS:
        raise ConfigError(f"'{path}' gave {kind}")
    return kind


def _needs_one_argument(factory: Factory) -> bool:
    """Return whether a factory can be called with one argument but not with none."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = [p.kind for p in parameters if p.default is p.empty and p.kind not in any_number]
    return len(kinds) == 1 and kinds[0] is not inspect.Parameter.KEYWORD_ONLY
