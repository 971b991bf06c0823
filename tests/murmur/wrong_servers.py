"""Environment servers that each break the contract in one point: the example with one flaw."""

import struct

import grpc

from examples.environment_server import ABORTED, FINAL, FIRST, LAST, Corridor, Server
from murmur.shared.rpc import rollout_pb2 as pb


class Aborted(Server):
    """Keeps the contract; every third episode fails at its third row, two of five at once."""

    def restart(self, i: int) -> None:
        super().restart(i)
        if self.episodes[i] % 5 >= 3:
            self.environments[i].kind = ABORTED

    def advance(self, i: int, action: int) -> None:
        super().advance(i, action)
        e = self.environments[i]
        if self.episodes[i] % 3 == 2 and e.age == 2:
            e.kind, e.reward = ABORTED, 0.0

    def observation(self, sequence: int) -> list[bytes]:
        for e in self.environments:
            if e.kind == ABORTED:
                e.cell = e.age = 0
        return super().observation(sequence)


class AbortedWithObservation(Server):
    def advance(self, i: int, action: int) -> None:
        super().advance(i, action)
        if self.environments[i].age == 2:
            self.environments[i].kind = ABORTED


class OtherVersion(Server):
    def hello(self) -> pb.Hello:
        hello = super().hello()
        hello.protocol_version = 7
        return hello


class Nameless(Server):
    worker_id = ""


class ImpossibleSpec(Server):
    def hello(self) -> pb.Hello:
        hello = super().hello()
        hello.spec.observations[0].dtype = "float64"
        return hello


class Renames(Server):
    """Takes its agents' names from what differs from stream to stream."""

    streams = 0

    def hello(self) -> pb.Hello:
        hello = super().hello()
        hello.spec.agents[:] = [f"walker_{self.streams}"]
        self.streams += 1
        return hello


class NamesTwoOfOne(Server):
    def hello(self) -> pb.Hello:
        hello = super().hello()
        hello.spec.agents.append("another")
        return hello


class ObservationFirst(Server):
    """Says no Hello."""

    def hello(self) -> pb.Hello:
        raise NotImplementedError

    def play(self, channel: grpc.Channel) -> None:
        call = channel.stream_stream("/murmur.v1.Rollout/Play")
        answers = call(iter([self.message(1, b"")]))
        self.read(answers, "welcome")


class ByteTooFew(Server):
    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        return super().message(sequence, arrays[:-1])


class CountsFromZero(Server):
    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        return super().message(sequence - 1, arrays)

    def actions(self, action: pb.Action, sequence: int) -> list[int]:
        return super().actions(action, action.sequence + 1 if sequence == 1 else action.sequence)


class CountsOn(Server):
    """Continues counting where the last stream ended."""

    sent = 0

    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        self.sent += 1
        return super().message(self.sent, arrays)

    def actions(self, action: pb.Action, sequence: int) -> list[int]:
        return super().actions(action, self.sent)


class Impatient(Server):
    """Sends the next message beside the one that is not answered yet."""

    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        return super().message(sequence, arrays)

    def play(self, channel: grpc.Channel) -> None:
        arrays = bytes(16) + struct.pack("<4f", *[1.0] * 4) + bytes(32) + bytes([1, 1] * 4)
        arrays += bytes(16) + bytes([FIRST] * 4)
        hello = pb.WorkerMessage(hello=self.hello()).SerializeToString()
        messages = [hello, *(self.message(k, arrays) for k in (1, 2, 3))]
        for _ in channel.stream_stream("/murmur.v1.Rollout/Play")(iter(messages)):
            pass


class GivesUpWaiting(Server):
    """Takes a learner that is slow for one that is gone, and stays away."""

    def play(self, channel: grpc.Channel) -> None:
        call = channel.stream_stream("/murmur.v1.Rollout/Play")
        hello = pb.WorkerMessage(hello=self.hello()).SerializeToString()
        grpc.channel_ready_future(channel).result(10)
        try:
            for _ in call(iter([hello]), timeout=0.3):
                pass
        finally:
            self.stop.set()


class OneEncoding(Server):
    """Looks for the actions at the place where they were the first time."""

    def read(self, answers: object, wanted: str) -> pb.LearnerMessage | None:
        data = next(answers, None)  # type: ignore[call-overload]
        if data is None:
            return None
        if wanted == "action" and len(data) != 2 + 18 + 2 + 16:
            raise RuntimeError("this is no action")
        return pb.LearnerMessage.FromString(data)

    def run(self) -> int:
        try:
            return super().run()
        except RuntimeError:
            self.stop.set()
            return 1


class OmitsFirst(Server):
    """The next episode begins with MID."""

    def restart(self, i: int) -> None:
        again = hasattr(self.environments[i], "kind")
        super().restart(i)
        if again:
            self.environments[i].kind = 1


class RewardOnFirst(Server):
    def restart(self, i: int) -> None:
        super().restart(i)
        self.environments[i].reward = 0.5


class DiscountFactor(Server):
    """Sends gamma, or no end at all, in place of the discount."""

    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        gamma = struct.pack("<4f", *(0.0 if e.terminated else 0.99 for e in self.environments))
        return super().message(sequence, arrays[:16] + gamma + arrays[32:])


class LongEpisodes(Server):
    def hello(self) -> pb.Hello:
        hello = super().hello()
        hello.spec.max_episode_steps = 2
        return hello


class NotANumber(Server):
    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        if sequence % 5 == 0:
            arrays = arrays[:32] + struct.pack("<f", float("nan")) + arrays[36:]
        return super().message(sequence, arrays)


class NotANumberInMetrics(Server):
    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        return super().message(sequence, arrays[:-20] + struct.pack("<4f", *[float("inf")] * 4)
                               + arrays[-4:])  # fmt: skip


class NothingLegal(Server):
    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        return super().message(sequence, arrays[:64] + bytes(8) + arrays[72:])


class OwnSeeds(Server):
    """Each stream has its own seed, odd or even in turn: a corridor asks no more of it."""

    streams = 0

    def begin(self, welcome: pb.Welcome) -> None:
        self.streams += 1
        super().begin(welcome)

    def restart(self, i: int) -> None:
        self.environments[i].begin(self.streams)


class ActsOnLast(Server):
    """The action that answers LAST decides about the next episode."""

    def advance(self, i: int, action: int) -> None:
        over = self.environments[i].kind == LAST
        super().advance(i, action)
        if over:
            self.environments[i].cell += action


class IgnoresActions(Server):
    """Begins every episode at its start and ignores the actions that Welcome repeats."""

    def begin(self, welcome: pb.Welcome) -> None:
        for slot in welcome.slots:
            slot.actions = b""
        super().begin(welcome)


class IgnoresNumbers(Server):
    """Counts episodes from 0 on every stream."""

    def begin(self, welcome: pb.Welcome) -> None:
        for slot in welcome.slots:
            slot.episode = 0
        super().begin(welcome)


class Leaves(Server):
    """Closes its stream after a few messages, and reconnects."""

    def message(self, sequence: int, arrays: bytes, part: int = 0) -> bytes:
        if sequence == 7:
            raise TimeoutError
        return super().message(sequence, arrays)

    def play(self, channel: grpc.Channel) -> None:
        try:
            super().play(channel)
        except TimeoutError:
            self.pause_s = 0.1


class Once(Server):
    """Ends with its first stream, if that ends with this status (None: in order)."""

    status: grpc.StatusCode | None = None

    def play(self, channel: grpc.Channel) -> None:
        try:
            super().play(channel)
        except grpc.RpcError as error:
            if error.code() == self.status:
                self.stop.set()
            raise
        else:
            if self.status is None:
                self.stop.set()


class EndsAtUnavailable(Once):
    status = grpc.StatusCode.UNAVAILABLE


class EndsAtOk(Once):
    pass


class EndsAtInternal(Once):
    status = grpc.StatusCode.INTERNAL


class Hammers(Server):
    """Reconnects without a pause."""

    def play(self, channel: grpc.Channel) -> None:
        try:
            super().play(channel)
        finally:
            self.pause_s = 0.001


class NeverRefused(Server):
    """Reconnects whatever the status is."""

    def play(self, channel: grpc.Channel) -> None:
        try:
            super().play(channel)
        except grpc.RpcError as error:
            if error.code() not in FINAL:
                raise


# Name -> (flaw, the key it breaks, the acts that show it; none: all).
FLAWS: dict[str, tuple[type[Server], str, tuple[str, ...]]] = {
    "speaks another version": (OtherVersion, "hello", ("first play",)),
    "has no name": (Nameless, "hello", ("first play",)),
    "has a spec that cannot be": (ImpossibleSpec, "hello", ("first play",)),
    "renames its agents": (Renames, "hello", ("first play", "another play")),
    "names agents that it has not": (NamesTwoOfOne, "hello", ("first play",)),
    "says no Hello": (ObservationFirst, "hello", ("first play",)),
    "sends a byte too few": (ByteTooFew, "size", ("first play",)),
    "counts from zero": (CountsFromZero, "sequence", ("first play",)),
    "counts on from stream to stream": (CountsOn, "sequence", ("first play", "another play")),
    "does not wait for answers": (Impatient, "lockstep", ("first play",)),
    "gives up waiting": (GivesUpWaiting, "stays", ("first play",)),
    "reads one encoding": (OneEncoding, "encodings", ("first play", "another play")),
    "omits FIRST": (OmitsFirst, "rows", ("first play",)),
    "rewards FIRST": (RewardOnFirst, "rows", ("first play",)),
    "sends gamma": (DiscountFactor, "discount", ("first play",)),
    "plays longer than it says": (LongEpisodes, "length", ("first play",)),
    "sends NaN": (NotANumber, "rows", ("first play",)),
    "sends infinite metrics": (NotANumberInMetrics, "rows", ("first play",)),
    "leaves no legal action": (NothingLegal, "rows", ("first play",)),
    "observes in ABORTED rows": (AbortedWithObservation, "aborted", ("first play",)),
    "makes its own seeds": (OwnSeeds, "repeats", ("first play", "another play")),
    "acts on what answers LAST": (ActsOnLast, "repeats", ("first play", "another play")),
    "ignores actions in Welcome": (
        IgnoresActions,
        "resumes",
        ("first play", "episodes under way"),
    ),
    "ignores numbers in Welcome": (
        IgnoresNumbers,
        "resumes",
        ("first play", "episodes under way", "episodes under way, elsewhere"),
    ),
    "leaves after seven messages": (Leaves, "stays", ("first play",)),
    "ends at UNAVAILABLE": (EndsAtUnavailable, "again UNAVAILABLE", ("first play", "another play")),
    "ends at OK": (EndsAtOk, "again OK", ("another play", "a few rows")),
    "ends at INTERNAL": (EndsAtInternal, "again INTERNAL", ("episodes under way", "a few rows")),
    "connects without a pause": (Hammers, "again full", ()),
    "takes no refusal": (NeverRefused, "refused", ()),
}

__all__ = ["FLAWS", "Aborted", "Corridor"]
