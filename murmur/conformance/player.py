"""What is played with one kind of session: with environments, or with samples."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from murmur.conformance.peer import Session
from shared.rpc import rollout_pb2 as pb

WrongAnswer = Callable[[Session], Awaitable[None]]


class Act(NamedTuple):
    """What is played on one stream.

    Attributes:
        name: for the user.
        play: plays it.
        key: the sentence of the contract that is broken if the server ends the stream meanwhile.
    """

    name: str
    play: Callable[[Session], Awaitable[None]]
    key: str = "stays"


class Player(Protocol):
    """Plays with one session, whatever it is that it brings.

    Attributes:
        acts: what is played on one stream after the other; one for each way to leave.
        wrong_answers: after each of which the server must end.
    """

    @property
    def acts(self) -> Sequence[Act]:
        """See the class."""

    @property
    def wrong_answers(self) -> Mapping[str, WrongAnswer]:
        """See the class."""

    def check_hello(self, hello: pb.Hello) -> str | None:
        """What is wrong with a Hello of this session; None: nothing.

        Raises:
            SpecError: if it announces what cannot be.
        """

    async def until_ended(self, session: Session, stop: Callable[[], None]) -> None:
        """Play until the server, told to stop by `stop`, ends the stream.

        Raises:
            Ended: when it does.
            Silent: if it does not, and says no more.
        """
