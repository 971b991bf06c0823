"""The only record that environments produce: dm_env's TimeStep, batched over N environments.

Shape legend of the whole project, one meaning a letter:

    T  time steps: of an unroll L + 1       L  transitions of an unroll or a sequence
    N  environments; n those of a session   B  entries of a batch, side by side
    M  joint transitions of a minibatch     R  rows of several dimensions flattened into one
    A  agents                               S  parameter groups: agents with the same networks
    K  discrete actions                     U  numbers of a continuous action
    F  features                             Z  numbers of an agent's recurrent state
    I  O  inputs and outputs of a layer     Y  units of a recurrent layer: Z = Y, of an LSTM 2 Y
    C  H  W  channels, height and width of an image

Agents come after batch: [T, B, A, ...] in storage, [B, A, ...] in networks and losses. Files that
need other letters say there what they mean.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
_HALF = 2  # bytes; BLAS has no half precision


class StepType(IntEnum):
    """Position of a time step in its episode."""

    FIRST = 0
    MID = 1
    LAST = 2
    ABORTED = 3


@dataclass(frozen=True, slots=True)
class TimeStep:
    """One step of N environments.

    After LAST comes FIRST of the next episode; the action in answer to a LAST row is ignored. The
    same holds for ABORTED, which means that the environment failed, in a step or in a reset: the
    episode has no end, the row's other numbers are zeros without meaning, and nothing is learned
    from the step that led to it.

    Arrays may be views of buffers that the next step overwrites.

    Attributes:
        step_type: [N] uint8, values of StepType.
        reward: [N, A] float32, the result of the previous action; zero on FIRST.
        discount: [N] float32, 0 on LAST of an episode that terminated, else 1 (also on LAST of an
            episode that was truncated).
        observation: name -> [N, A, ...], or [N, ...] if the spec says per_agent=False.
        metrics: name -> [N] float32, the environment's own results, valid on LAST rows only.
    """

    step_type: NDArray[np.uint8]
    reward: NDArray[np.float32]
    discount: NDArray[np.float32]
    observation: Mapping[str, Array]
    metrics: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def named_arrays(timestep: TimeStep) -> dict[str, Array]:
    """Return all arrays of a time step, by their names in messages."""
    arrays: dict[str, Array] = {
        "step_type": timestep.step_type,
        "reward": timestep.reward,
        "discount": timestep.discount,
    }
    arrays.update((f"observation '{name}'", o) for name, o in timestep.observation.items())
    arrays.update((f"metric '{name}'", m) for name, m in timestep.metrics.items())
    return arrays


def surely_finite(arrays: Iterable[Array]) -> bool:
    """Return whether no floating-point array among these holds NaN or infinity.

    One pass by BLAS: a number that is not finite makes the sum of squares so. If the sum is not
    finite, which squares that overflow cause too, each number is checked.
    """
    for a in arrays:
        if a.dtype.kind == "f":
            quick = a.dtype.itemsize > _HALF and math.isfinite(np.vdot(a, a))  # type: ignore[arg-type]
            if not quick and not np.isfinite(a).all():
                return False
    return True
