"""Interface of a player of one kind of session: with environments, or with samples."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from murmur.kit.conformance.peer import Session
from shared.rpc import rollout_pb2 as pb

WrongAnswer = Callable[[Session], Awaitable[None]]


class Act(NamedTuple):
    """A part of the examination that is played on one stream.

    Attributes:
        name: name for the user.
        play: function that plays it.
        key: key of the contract's sentence that is broken if the server ends the stream meanwhile.
    """

    name: str
    play: Callable[[Session], Awaitable[None]]
    key: str = "stays"


class Player(Protocol):
    """Player of one session, of environments or of samples.

    Attributes:
        acts: acts in order; one for each way to leave.
        wrong_answers: wrong answers, each of which must end the server.
    """

    @property
    def acts(self) -> Sequence[Act]:
        """Acts in order; one for each way to leave."""

    @property
    def wrong_answers(self) -> Mapping[str, WrongAnswer]:
        """Wrong answers, each of which must end the server."""

    def check_hello(self, hello: pb.Hello) -> str | None:
        """Return the error in a Hello of this session; None: there is none.

        Raises:
            SpecError: if it announces what cannot be.
        """

    async def until_ended(self, session: Session, stop: Callable[[], None]) -> None:
        """Play until the server, told to stop by `stop`, ends the stream.

        Raises:
            Ended: when it does.
            Silent: if it does not, and says no more.
        """
