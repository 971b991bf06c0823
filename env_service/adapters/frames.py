"""Pictures that environments of other libraries draw themselves."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmur.shared.config.experiment import ExperimentConfig

FRAME = "rgb_array"  # of render_state, and the render mode that draws it
# Plug-ins whose factories take the argument to draw.
_TOLD = ("pettingzoo", "gymnasium", "gymnasium_vector")
DRAWING = (*_TOLD, "vmas")  # those whose environments may draw themselves


def with_frames(config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration with render_mode set for factories that take it and lack it."""
    plugin, evaluation = config.environment, config.evaluation
    if plugin.name not in _TOLD:
        return config
    options = {**plugin.options, "arguments": _drawn(plugin.options)}
    changes: dict[str, Any] = {"environment": plugin.with_options(options)}
    if "arguments" in evaluation.environment:
        own = {**evaluation.environment, "arguments": _drawn(evaluation.environment)}
        changes["evaluation"] = evaluation.model_copy(update={"environment": own})
    return config.model_copy(update=changes)


def _drawn(options: dict[str, Any]) -> dict[str, Any]:
    return {"render_mode": FRAME, **(options.get("arguments") or {})}


def frame_of(environment: Any, copy: int | None = None) -> NDArray[np.uint8]:
    """Return the picture that an environment, or a copy of it, draws, uint8 [height, width, 3].

    Raises:
        NotImplementedError: if it draws no such picture, naming its result and render modes.
    """
    metadata = getattr(environment, "metadata", None) or {}
    modes = ", ".join(map(str, metadata.get("render_modes") or ())) or "none"
    try:
        frame = environment.render() if copy is None else np.asarray(environment.render()[copy])
    except Exception as error:
        raise NotImplementedError(
            f"render() raised {type(error).__name__}: {error}; its render modes: {modes}"
        ) from error
    if isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[-1] in (3, 4):
        return np.array(frame[..., :3], np.uint8)
    shown = f"an array of shape {frame.shape}" if isinstance(frame, np.ndarray) else repr(frame)
    raise NotImplementedError(
        f"render() gave {shown[:60]}, not an array [height, width, 3]; its render modes: {modes}"
    )
