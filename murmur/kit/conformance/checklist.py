"""Contracts in sentences, and the observations of each."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Contract(NamedTuple):
    """Requirements on one side of the wire.

    Attributes:
        subject: name of this side, for the user.
        sentences: sentences by key, in the order of docs/wire.md.
    """

    subject: str
    sentences: Mapping[str, str]


# Of every server, whatever it brings.
_AGAIN = {
    "stays": "keeps a stream for as long as the learner does",
    "again UNAVAILABLE": "reconnects after UNAVAILABLE",
    "again OK": "reconnects after the learner has ended the stream with OK",
    "again INTERNAL": "reconnects after a status that the contract does not name",
    "again cut": "reconnects after its connection was cut",
    "again frozen": "notices within 30 s that the learner is gone without notice, and reconnects",
    "again GOAWAY": "reconnects after GOAWAY and a second without a learner",
    "again full": "reconnects, with pauses, while the learner is full (RESOURCE_EXHAUSTED)",
    "refused": "ends, with code 2, when it is refused for good",
    "answers": "ends, with code 2, when the learner's answers break the contract",
    "drain": "closes its streams in order and ends with code 0 when told to stop (SIGTERM)",
}
_CREDENTIALS = "shows a certificate, and a token with every call"
CONTRACT = Contract(
    "An environment server",
    {
        "hello": "says Hello first: protocol version 6, a name, environments, a spec that can be",
        "credentials": _CREDENTIALS,
        "patient": "waits for Welcome and for answers, as long as they take",
        "size": "sends as many bytes as its spec says, in parts if they are more than 1 MiB",
        "sequence": "numbers its messages 1, 2, 3, … from 1 on every stream",
        "lockstep": "sends nothing before the last message was answered",
        "encodings": "reads every protobuf encoding of an answer",
        "rows": "begins episodes with FIRST (ABORTED if that fails), after LAST and ABORTED alone, "
        "and without a reward; sends neither NaN nor infinity, in metrics not on LAST rows; leaves "
        "every agent a legal action, and keeps it inside its maps; gives one agent the turn, none "
        "on LAST, if agents take turns",
        "discount": "gives discount 0 on LAST rows of episodes that terminated, else 1",
        "length": "ends episodes after max_episode_steps decisions at the latest",
        "aborted": "sends zeros, discount 1 and legal actions in ABORTED rows",
        "repeats": "gives the same episodes from the same run seed, slots, numbers and actions",
        "resumes": "takes up episodes where the actions in Welcome lead to, and counts them on",
        **_AGAIN,
    },
)
SUPPLY_CONTRACT = Contract(
    "A supply server",
    {
        "hello": "says Hello first: protocol version 6, a name and a data set that can be",
        "credentials": _CREDENTIALS,
        "patient": "waits for Welcome and for grants, as long as they take",
        "unasked": "sends nothing that it was not asked for",
        "samples": "answers grants in order, with their numbers 1, 2, 3, … on every stream, and "
        "with as many bytes as its data set says, in parts if they are more than 1 MiB",
        "encodings": "reads every protobuf encoding of a grant",
        "classes": "sends masks of its classes and the ignored index alone",
        "finite": "sends neither NaN nor infinity",
        "named": "names samples that it cannot read, with a reason, before it sends the others",
        "repeats": "gives the same sample for the same split and index, in every grant and epoch",
        **_AGAIN,
    },
)


class Checklist:
    """Observations of the contract. A sentence that was not tested has none.

    Attributes:
        contract: contract to examine.
        problems: messages by key, one for every time that the sentence was broken.
    """

    def __init__(self, contract: Contract = CONTRACT) -> None:
        """Start without observations."""
        self.contract = contract
        self._kept: Counter[str] = Counter()
        self.problems: dict[str, list[str]] = {}

    def note(self, key: str, problem: str | None = None) -> None:
        """Note that a sentence was tested and held; or the problem, which says where and how."""
        assert key in self.contract.sentences
        if problem is None:
            self._kept[key] += 1
        else:
            self.problems.setdefault(key, []).append(problem)

    def verdicts(self) -> Iterator[tuple[str, bool | None, list[str]]]:
        """Yield every sentence: (key, whether it held or None if it was not tested, its errors)."""
        for key in self.contract.sentences:
            wrong = self.problems.get(key, [])
            yield key, (False if wrong else True if self._kept[key] else None), wrong
