"""Parts that all transport variants share: empty time steps, and a gate to play or rest."""

import asyncio
import ctypes
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType, TimeStep

loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
"""How this process makes its event loop; see transport._begin."""


class Gate:
    """Gate shared with a client process: lets it play or rest, and counts its messages."""

    def __init__(self, context: Any, streams: int) -> None:  # noqa: ANN401
        self._open = context.RawValue(ctypes.c_bool, False)  # quicker to read than the event
        self._opened = context.Event()
        self.counts = context.RawArray(ctypes.c_uint64, streams)

    def step(self, stream: int) -> None:
        """Wait while the gate is closed. The client calls it before each message."""
        if not self._open.value:
            self._opened.wait()  # asleep: those at rest must not disturb the one that plays
        self.counts[stream] += 1

    def set(self, is_open: bool) -> None:
        """Open or close the gate. The benchmark calls it."""
        self._open.value = is_open
        (self._opened.set if is_open else self._opened.clear)()


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main)


def no_op_spec(width: int) -> EnvSpec:
    """Return the spec of three agents that observe `width` floats each."""
    return EnvSpec("no-op", 3, (ArraySpec("observation", "float32", (width,)),), Discrete(5))


def no_op_timestep(spec: EnvSpec, num_envs: int) -> TimeStep:
    """Return rows that never end."""
    width = spec.observations[0].shape[0]
    return TimeStep(
        step_type=np.full(num_envs, StepType.MID, np.uint8),
        reward=np.zeros((num_envs, 3), np.float32),
        discount=np.ones(num_envs, np.float32),
        observation={
            "observation": np.random.default_rng(0).random((num_envs, 3, width), np.float32)
        },
    )
