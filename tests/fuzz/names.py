"""Names of agents: every agent's row reaches its own place and its action comes back to it.

A run has some names, a session brings others: the same, another order, other ones, none, or such
as cannot be. It is welcomed or refused as the names say, and no row is lost or exchanged.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from murmur.learner_service.serving.lockstep import in_order
from murmur.learner_service.serving.requests import Request
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec, ObservationCodec
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType, TimeStep
from tests.fuzz import Reader
from tests.fuzz.stand_in import Host, play, server_of
from tests.wire import hello

MODULES = (
    "murmur.learner_service.serving.lockstep",
    "murmur.learner_service.serving.requests",
    "murmur.shared.wire.spec",
)
SEEDS = [b"\3\1\0" + bytes(range(1, 40)), b"\2\0\1abc", b"\6\1\2\1\2\3\4\5", b"\2\1\3\7", b"\4\1\4"]
_MOST = 8
_BASE = EnvSpec("e", 1, (ArraySpec("x", "float32", ()),), Discrete(256))
# Words of which names are made: of other scripts, of several characters, of none, not printable.
_WORDS = ("", "uav_", "a", "É", "机", "\N{GRINNING FACE}", "x" * 60, "\x1b[2J", "\u202e", " ", ",")


class _Host(Host):
    """A run with names, whose actions are what each row observed."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {
            shared: validate(
                ExperimentConfig,
                {
                    "environment": {"name": "e"},
                    "algorithm": {"name": "mappo", "share_parameters": shared},
                },
            )
            for shared in (True, False)
        }
        self.shared = True
        self.seen: list[list[float]] = []

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        return in_order(spec, self.spec, self.config[self.shared])

    def put(self, requests: Sequence[Request]) -> None:
        for request in requests:
            seen = request.timestep.observation["x"]
            self.seen.append(seen[0].tolist())
            reply = request.session.codec.pack(request.sequence, 0, seen.astype(np.int32))
            request.reply.set_result(reply)


_HOST = _Host()
_SERVER = server_of(_HOST)


def one(data: bytes) -> str:
    reader = Reader(data)
    relation, _HOST.shared = reader.below(6), bool(reader.below(2))
    ours = _names(reader, 1 + reader.below(_MOST))
    if _spec(ours) is None:
        ours = tuple(f"agent_{i}" for i in range(len(ours)))  # the run's are such as can be
    theirs = _related(reader, relation, ours)
    _HOST.spec = replace(_BASE, num_agents=len(ours), agents=ours)
    _HOST.seen.clear()
    num_agents = len(theirs) or len(ours)
    message = hello(_BASE, 1)
    message.spec.num_agents, message.spec.agents[:] = num_agents, theirs
    spec = _spec(theirs) if theirs else replace(_BASE, num_agents=num_agents)
    # What each agent observes tells it by its number in the run; a stranger's is 99.
    numbers = [ours.index(name) if name in ours else 99 for name in theirs or ours]
    messages = [pb.WorkerMessage(hello=message).SerializeToString()]
    if spec is not None:
        messages += ObservationCodec(spec, 1).messages(1, _rows(numbers))
    status, written = play(messages, _SERVER, _HOST)
    if spec is None:
        assert (status, written) == ("FAILED_PRECONDITION", []), (ours, theirs, status)
        return "impossible"
    same = not theirs or theirs == ours
    fits = same or (_HOST.shared and sorted(theirs) == sorted(ours))
    assert (status == "OK") == fits, (ours, theirs, status)
    if not fits:
        return "refused"
    assert _HOST.seen == [list(range(len(ours)))], (ours, theirs, _HOST.seen)
    _, _, action = ActionCodec(spec, 1).unpack(written[1])
    assert action[0].tolist() == numbers, (ours, theirs, action)
    return "as it is" if same else "put in order"


def _names(reader: Reader, count: int) -> tuple[str, ...]:
    return tuple(
        _WORDS[reader.below(len(_WORDS))] + "".join(map(chr, reader.take(reader.below(2)))) + str(i)
        for i in range(count)
    )


def _related(reader: Reader, relation: int, ours: tuple[str, ...]) -> tuple[str, ...]:
    """What the session calls its agents."""
    names = list(ours)
    match relation:
        case 0:
            return ours
        case 1:
            return ()
        case 2 | 3:
            for i in range(len(names) - 1, 0, -1):
                j = reader.below(i + 1)
                names[i], names[j] = names[j], names[i]
        case 4:  # one is another, perhaps one that is there
            at = reader.below(len(names))
            names[at] = names[reader.below(len(names))] if reader.below(2) else _names(reader, 1)[0]
        case _:
            names = list(_names(reader, 1 + reader.below(_MOST)))
    return tuple(names)


def _spec(agents: tuple[str, ...]) -> EnvSpec | None:
    """The spec of these agents; None: there can be none."""
    try:
        return replace(_BASE, num_agents=len(agents), agents=agents)
    except SpecError:
        return None


def _rows(numbers: list[int]) -> TimeStep:
    shape = 1, len(numbers)
    return TimeStep(
        np.full(1, int(StepType.FIRST), np.uint8),
        np.zeros(shape, np.float32),
        np.ones(1, np.float32),
        {"x": np.array(numbers, np.float32).reshape(shape)},
        {},
    )
