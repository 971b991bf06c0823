"""What a time step must hold before it is stored: order of step types, and contents."""

import numpy as np
from numpy.typing import NDArray

from learner_service.serving.session import EnvSession
from shared.errors import WireError
from shared.row_check import RowCheck
from shared.timestep import StepType, TimeStep

_FIRST, _ABORTED = int(StepType.FIRST), int(StepType.ABORTED)


def check_order(
    session: EnvSession, step_type: NDArray[np.uint8], ended: NDArray[np.bool_] | None
) -> None:
    """Refuse step types that cannot follow the last ones.

    Args:
        session: the sender of the rows.
        step_type: [n].
        ended: [n] whether each environment's last row was LAST or ABORTED; None: the session
            begins.

    Raises:
        WireError: naming the environment.
    """
    largest = int(step_type.max())
    if largest > _ABORTED:
        raise WireError(f"step_type holds {largest}, expected 0, 1, 2 or 3")
    aborted = step_type == _ABORTED  # may stand in the place of any row
    first = step_type == _FIRST
    if ended is None:
        if session.evaluating and not (first | aborted).all():
            raise WireError("the first rows of an evaluation must be FIRST, or ABORTED")
    elif (wrong := (first != ended) & ~aborted).any():
        env = int(wrong.argmax())
        raise WireError(
            f"step_type of environment {env} is {StepType(step_type[env]).name}; FIRST "
            f"must follow LAST and ABORTED, and nothing else (its row before was "
            f"{'one' if ended[env] else 'neither'})"
        )


def check_contents(check: RowCheck, timestep: TimeStep) -> None:
    """Refuse what would poison the storage.

    Raises:
        WireError: naming environment, array and value.
    """
    if broken := check.broken(timestep):
        env = min(broken)
        raise WireError(
            f"environment {env} returned {broken[env]}; nothing of this message was stored"
        )
