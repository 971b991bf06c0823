"""Answers that break the contract: an environment server must end with code 2."""

from collections.abc import Awaitable, Callable

import numpy as np

from murmur.kit.conformance.play import Play, encoded
from murmur.kit.conformance.rows import legal_action
from shared.rpc import rollout_pb2 as pb
from shared.wire.codec import action_array_layout
from shared.wire.spec import Discrete
from shared.wire.timestep import Array


async def _other_sequence(play: Play) -> None:
    await play.welcome([pb.SlotStart()] * play.num_envs)
    action = np.zeros_like(await _first_action(play))
    play.sequence += 1
    await play.answer(action)


async def _other_size(play: Play) -> None:
    await play.welcome([pb.SlotStart()] * play.num_envs)
    action = await _first_action(play)
    body = pb.Action(sequence=play.sequence, arrays=encoded(action)[:-1])
    await play.session.write(pb.LearnerMessage(action=body).SerializeToString())


async def _first_action(play: Play) -> Array:
    return legal_action(play.spec, await play.row(), np.random.default_rng(0))


async def _other_slots(play: Play) -> None:
    await play.welcome([pb.SlotStart()] * (play.num_envs + 1))


async def _torn_replay(play: Play) -> None:
    _, dtype, shape = action_array_layout(play.spec, play.num_envs).fields[0]
    whole = dtype.itemsize * int(np.prod(shape[1:]))
    await play.welcome([pb.SlotStart(actions=bytes(whole + 1))] * play.num_envs)


async def _action_first(play: Play) -> None:
    dtype = np.int32 if isinstance(play.spec.action, Discrete) else np.float32
    size = () if isinstance(play.spec.action, Discrete) else (play.spec.action.size,)
    await play.answer(np.zeros((play.num_envs, play.spec.num_agents, *size), dtype))


async def _garbage(play: Play) -> None:
    await play.session.write(b"\xff\xff\xff")


WRONG_ANSWERS: dict[str, Callable[[Play], Awaitable[None]]] = {
    "an Action with another sequence number": _other_sequence,
    "an Action with a byte too few": _other_size,
    "a Welcome for another number of environments": _other_slots,
    "a Welcome whose actions are no whole number of actions": _torn_replay,
    "an Action instead of Welcome": _action_first,
    "bytes that are no message": _garbage,
}
