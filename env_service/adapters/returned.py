"""Messages about values that environments of other libraries return."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shared.wire.spec import ACTION_MASK


def shown(value: object) -> str:
    """Describe a value that an environment returned, for a message: arrays by their shape."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def without(observation: Any, paths: list[tuple[Any, ...]]) -> str:  # noqa: ANN401
    """Describe the first part of its space that an observation lacks; "" if none."""
    for path in paths:
        value = observation
        for depth, key in enumerate(path):
            try:
                value = value[key]
            except Exception:
                at = f" at '{'.'.join(map(str, path[:depth]))}'" if depth else ""
                if isinstance(value, Mapping):
                    there = ", ".join(f"'{k}'" for k in value)
                    return f"has no {key!r}{at}, which its space has; it has {there or 'nothing'}"
                return f"is a {type(value).__name__}{at}; its space has a {key!r} there"
    return ""


def not_infos(value: object, agent: str = "") -> str:
    """Return the message about infos, of one agent or of all, that are no dictionary."""
    who = f" of agent '{agent}'" if agent else ""
    return f"returned a {type(value).__name__} as infos{who}, not a dictionary"


def mask_missing(agent: str) -> str:
    """Return the message about an observation without the mask that its space has."""
    return f"gave a wrong observation: that of agent '{agent}' lacks '{ACTION_MASK}'"


def mask_not_told(agent: str) -> str:
    """Return the message about a mask in a step's infos if the first reset gave none."""
    return (
        f"gives agent '{agent}' an '{ACTION_MASK}' among its infos, but none in its first reset(); "
        "give it in both"
    )
