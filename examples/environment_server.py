"""An environment server in one file, as one would write it in another language.

    python examples/environment_server.py 127.0.0.1:50051

It shares nothing with murmur but the messages of proto/rollout.proto, knows no more than
docs/wire.md tells, and keeps that contract:

    murmur conformance 127.0.0.1:50051 -- python examples/environment_server.py 127.0.0.1:50051

Four agents, each alone in a corridor of nine cells, look for its end. A real one would also show
certificates and a token (docs/security.md).
"""

import os
import queue
import random
import signal
import struct
import sys
import threading
from collections.abc import Iterator

import grpc

from murmur.shared.rpc import rollout_pb2 as pb  # protoc --python_out=. -I proto rollout.proto

METHOD = "/murmur.v1.Rollout/Play"
FIRST, MID, LAST, ABORTED = range(4)
PART_BYTES = 1 << 20
CELLS, MAX_STEPS = 9, 12
FINAL = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}
OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),  # a learner that is gone without notice is detected
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_http_proxy", 0),  # http_proxy would also take connections to this machine
]


class BrokenContractError(Exception):
    """The learner answered something that it must not."""


def mix(x: int) -> int:
    """The finaliser of splitmix64, on 64 bits."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def episode_seed(run_seed: int, slot: int, episode: int) -> int:
    """Below 2**63; the definition is that of shared/wire/seeding.py."""
    golden = 0x9E3779B97F4A7C15
    for part in (slot, episode):
        run_seed = mix((run_seed + golden) % 2**64 ^ mix((part + golden) % 2**64))
    return run_seed >> 1


class Corridor:
    """One environment: one agent, who goes left or right until the end that its seed hides."""

    def begin(self, seed: int) -> None:
        """A new episode, from its seed alone."""
        self.cell, self.goal = CELLS // 2, (0, CELLS - 1)[seed % 2]
        self.age, self.kind, self.reward = 0, FIRST, 0.0

    def step(self, action: int) -> None:
        """One decision."""
        self.age += 1
        self.cell += 1 if action else -1
        found = self.cell == self.goal
        over = found or self.cell in (0, CELLS - 1) or self.age == MAX_STEPS
        self.kind, self.reward = (LAST if over else MID), float(found)

    @property
    def terminated(self) -> bool:
        """Whether the episode has come to an end of its own, not to the end of its time."""
        return self.kind == LAST and self.cell in (0, CELLS - 1)


class Server:
    """One session of four corridors, played until it is told to stop."""

    num_envs, worker_id = 4, f"example-{os.getpid()}"
    longest_pause_s = 5.0

    def __init__(self, address: str) -> None:
        self.address, self.stop = address, threading.Event()
        self.pause_s = 0.2
        self.environments = [Corridor() for _ in range(self.num_envs)]

    def run(self) -> int:
        """Connect, play, reconnect; returns the exit code."""
        with grpc.insecure_channel(self.address, options=OPTIONS) as channel:
            while not self.stop.is_set():
                try:
                    self.play(channel)
                except grpc.RpcError as error:
                    if error.code() in FINAL:
                        print(f"refused: {error.details()}", file=sys.stderr)
                        return 2
                except BrokenContractError as error:
                    print(f"the learner broke the contract: {error}", file=sys.stderr)
                    return 2
                self.stop.wait(self.pause_s * random.uniform(0.5, 1))  # noqa: S311 - no secret
                self.pause_s = min(2 * self.pause_s, self.longest_pause_s)
        return 0

    def play(self, channel: grpc.Channel) -> None:
        """One stream, until the learner ends it with OK; raises any other status."""
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        answers = channel.stream_stream(METHOD)(iter(out.get, None))
        try:
            out.put(pb.WorkerMessage(hello=self.hello()).SerializeToString())
            answer = self.read(answers, "welcome")
            if answer is None:
                return
            self.pause_s = 0.2
            self.begin(answer.welcome)
            sequence = 0
            while True:
                sequence += 1
                for message in self.observation(sequence):
                    out.put(message)
                answer = self.read(answers, "action")
                if answer is None or self.stop.is_set():
                    return
                self.step(self.actions(answer.action, sequence))
        finally:
            out.put(None)  # half-close
            if self.stop.is_set():
                for _ in answers:  # until the learner has ended the stream
                    pass
            answers.cancel()

    def read(self, answers: Iterator[bytes], wanted: str) -> pb.LearnerMessage | None:
        """The next message, or None at the end of the stream."""
        data = next(answers, None)
        if data is None:
            return None
        try:
            message = pb.LearnerMessage.FromString(data)
        except Exception as error:
            raise BrokenContractError(f"no LearnerMessage: {error}") from None
        if message.WhichOneof("message") != wanted:
            raise BrokenContractError(f"not '{wanted}' but '{message.WhichOneof('message')}'")
        return message

    def hello(self) -> pb.Hello:
        """Who we are and what is played here."""
        spec = pb.EnvSpec(
            name="corridor",
            num_agents=1,
            observations=[
                pb.ArraySpec(name="cell", dtype="float32", shape=[2], per_agent=True),
                pb.ArraySpec(name="action_mask", dtype="uint8", shape=[2], per_agent=True),
            ],
            action=pb.ActionSpec(discrete=pb.Discrete(num_actions=2)),
            metrics=["found"],
            max_episode_steps=MAX_STEPS,
            agents=["walker"],  # one name a row, in one order in every process
        )
        return pb.Hello(
            protocol_version=6,
            worker_id=self.worker_id,
            mode=pb.MODE_TRAIN,
            num_envs=self.num_envs,
            spec=spec,
        )

    def begin(self, welcome: pb.Welcome) -> None:
        """Bring every environment to where the learner has it."""
        if len(welcome.slots) != self.num_envs:
            raise BrokenContractError(f"Welcome names {len(welcome.slots)} slots")
        self.run_seed, self.first_slot = welcome.run_seed, welcome.first_slot
        self.episodes = [slot.episode for slot in welcome.slots]
        for i, slot in enumerate(welcome.slots):
            if len(slot.actions) % 4:
                raise BrokenContractError(f"{len(slot.actions)} bytes are no int32 actions")
            self.restart(i)
            for (action,) in struct.iter_unpack("<i", slot.actions):
                self.advance(i, action)

    def restart(self, i: int) -> None:
        """The episode whose number it is."""
        seed = episode_seed(self.run_seed, self.first_slot + i, self.episodes[i])
        self.environments[i].begin(seed)

    def advance(self, i: int, action: int) -> None:
        """One row further: after LAST and ABORTED the next episode, whatever the action.

        Corridors never fail. A simulator that fails in its start or in a step gives ABORTED.
        """
        if self.environments[i].kind in (LAST, ABORTED):
            self.episodes[i] += 1
            self.restart(i)
        else:
            self.environments[i].step(action)

    def step(self, actions: list[int]) -> None:
        """All environments."""
        for i, action in enumerate(actions):
            self.advance(i, action)

    def observation(self, sequence: int) -> list[bytes]:
        """The rows of all environments: docs/wire.md, "Arrays". More than 1 MiB goes in parts."""
        every = self.environments
        cells = [x for e in every for x in (e.cell, e.age)]
        arrays = struct.pack(f"<{len(every)}f", *(e.reward for e in every))
        arrays += struct.pack(f"<{len(every)}f", *(float(not e.terminated) for e in every))
        arrays += struct.pack(f"<{len(cells)}f", *cells)
        arrays += bytes([1, 1] * len(every))  # action_mask: both ways are open
        arrays += struct.pack(f"<{len(every)}f", *(float(e.terminated) for e in every))
        arrays += bytes(e.kind for e in every)
        starts = range(0, len(arrays), PART_BYTES)
        return [
            self.message(sequence, arrays[at : at + PART_BYTES], part)
            for part, at in enumerate(starts)
        ]

    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        """As it travels."""
        observation = pb.Observation(sequence=sequence, arrays=arrays, part=part)
        return pb.WorkerMessage(observation=observation).SerializeToString()

    def actions(self, action: pb.Action, sequence: int) -> list[int]:
        """One for each environment."""
        if action.sequence != sequence:
            raise BrokenContractError(f"answer {action.sequence} to message {sequence}")
        if len(action.arrays) != 4 * self.num_envs:
            raise BrokenContractError(f"{len(action.arrays)} bytes of actions")
        return [a for (a,) in struct.iter_unpack("<i", action.arrays)]


if __name__ == "__main__":
    server = Server(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: server.stop.set())
    sys.exit(server.run())
