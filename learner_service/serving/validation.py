"""What a time step must hold before it is stored: order of step types, indices, finite numbers."""

import numpy as np
from numpy.typing import NDArray

from learner_service.serving.session import Session
from shared.errors import WireError
from shared.spec import ACTION_MASK, AGENT_CELL, AGENT_MASK, EnvSpec
from shared.timestep import Array, StepType, TimeStep, surely_finite

_FIRST, _LAST, _VOID = int(StepType.FIRST), int(StepType.LAST), int(StepType.VOID)


def check_indices(spec: EnvSpec, timestep: TimeStep) -> None:
    """Refuse what would be used as an index or a choice and cannot be.

    Raises:
        WireError: naming the array, the environment and the agent.
    """
    for name in (ACTION_MASK, AGENT_MASK):
        flags = timestep.observation.get(name)
        if flags is not None and (wrong := np.greater(flags, 1)).any():
            env, agent, *_ = np.argwhere(wrong)[0]
            raise WireError(
                f"{name} of agent {agent} of environment {env} holds {flags[env, agent].max()}; "
                "it must be 0 or 1"
            )
    mask = timestep.observation.get(ACTION_MASK)
    if mask is not None and not (legal := mask.any(-1)).all():
        env, agent = np.argwhere(~legal)[0]
        raise WireError(f"{ACTION_MASK} allows no action to agent {agent} of environment {env}")
    cell = timestep.observation.get(AGENT_CELL)
    maps = next((o for o in spec.observations if o.per_agent and len(o.shape) == 3), None)
    if cell is not None and maps is not None:
        inside = (np.greater_equal(cell, 0) & np.less(cell, maps.shape[1:])).all(-1)
        if not inside.all():
            env, agent = np.argwhere(~inside)[0]
            raise WireError(
                f"{AGENT_CELL} of agent {agent} of environment {env} is "
                f"{cell[env, agent].tolist()}, outside the maps of {maps.shape[1:]}"
            )


def check_order(
    session: Session, step_type: NDArray[np.uint8], ended: NDArray[np.bool_] | None
) -> None:
    """Refuse step types that cannot follow the last ones.

    Args:
        session: whose rows they are.
        step_type: [n].
        ended: [n] whether each environment's last row was LAST or VOID; None: the session begins.

    Raises:
        WireError: naming the environment.
    """
    largest = int(step_type.max())
    if largest > _VOID:
        raise WireError(f"step_type holds {largest}, expected 0, 1, 2 or 3")
    if ended is None:
        if session.evaluating and step_type.any():
            raise WireError("the first rows of an evaluation must be FIRST")
    elif (wrong := (step_type == _FIRST) != ended).any():
        env = int(wrong.argmax())
        raise WireError(
            f"step_type of environment {env} is {StepType(step_type[env]).name}; FIRST "
            f"must follow LAST and VOID, and nothing else (its row before was "
            f"{'one' if ended[env] else 'neither'})"
        )


def check_results(timestep: TimeStep) -> None:
    """Refuse results of ended episodes that are no numbers: no later one would be the best.

    Raises:
        WireError: naming the metric and the environment.
    """
    ends = timestep.step_type == _LAST
    if not ends.any():
        return
    for name, values in timestep.metrics.items():
        if (wrong := ends & ~np.isfinite(values)).any():
            env = int(wrong.argmax())
            raise WireError(
                f"metric '{name}' of environment {env} is {values[env]} on LAST; "
                "nothing of this message was stored"
            )


def check_contents(spec: EnvSpec, timestep: TimeStep) -> None:
    """Refuse what would poison the storage.

    Raises:
        WireError: naming the array.
    """
    check_indices(spec, timestep)
    if surely_finite([timestep.reward, timestep.discount, *timestep.observation.values()]):
        return
    named: list[tuple[str, Array]] = [("reward", timestep.reward), ("discount", timestep.discount)]
    named += [(f"observation '{k}'", v) for k, v in timestep.observation.items()]
    for name, array in named:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0]
            raise WireError(
                f"{name} holds {array[tuple(where)]} at index {where.tolist()} "
                f"(environment {where[0]}); nothing of this message was stored"
            )
