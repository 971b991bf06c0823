"""The contract of an environment server in sentences, and what was seen of each."""

from collections import Counter
from collections.abc import Iterator

# Key -> sentence, in the order of docs/wire.md.
CONTRACT = {
    "hello": "says Hello first: protocol version 3, a name, environments and a spec that can be",
    "credentials": "shows a certificate, and a token with every call",
    "patient": "waits for Welcome and for answers, as long as they take",
    "size": "sends as many bytes as its spec says, in parts if they are more than 1 MiB",
    "sequence": "numbers its messages 1, 2, 3, … anew on every stream",
    "lockstep": "sends nothing before the last message was answered",
    "encodings": "reads every protobuf encoding of an answer",
    "step_type": "begins episodes after LAST and VOID alone, with FIRST (VOID if that fails)",
    "first": "gives FIRST rows no reward and discount 1",
    "discount": "gives discount 0 on LAST rows of episodes that terminated, else 1",
    "length": "ends episodes after max_episode_steps decisions at the latest",
    "finite": "sends neither NaN nor infinity, in metrics not on LAST rows",
    "choices": "leaves every agent a legal action, and keeps it inside its maps",
    "void": "sends zeros, discount 1 and legal actions in VOID rows",
    "repeats": "gives the same episodes from the same run seed, slots, numbers and actions",
    "resumes": "takes up episodes where the actions in Welcome lead to, and counts them on",
    "stays": "keeps a stream for as long as the learner does",
    "again UNAVAILABLE": "dials again after UNAVAILABLE",
    "again OK": "dials again after the learner has ended the stream with OK",
    "again INTERNAL": "dials again after a status that the contract does not name",
    "again cut": "dials again after its connection was cut",
    "again frozen": "notices within 30 s that the learner is gone without a word, and dials again",
    "again GOAWAY": "dials again after GOAWAY and a second without a learner",
    "again full": "dials again, with pauses, while the learner is full (RESOURCE_EXHAUSTED)",
    "refused": "ends, with code 2, when it is refused for good",
    "answers": "ends, with code 2, when the learner's answers break the contract",
    "drain": "closes its streams in order and ends with code 0 when told to stop (SIGTERM)",
}


class Checklist:
    """What was seen of the contract. Nothing is said of a sentence that was not put to the test."""

    def __init__(self) -> None:
        """Nothing has been seen."""
        self._kept: Counter[str] = Counter()
        self._broken: dict[str, list[str]] = {}

    def kept(self, key: str) -> None:
        """A sentence was put to the test and held."""
        assert key in CONTRACT
        self._kept[key] += 1

    def broken(self, key: str, words: str) -> None:
        """It did not hold; `words` say where and how."""
        assert key in CONTRACT
        self._broken.setdefault(key, []).append(words)

    def hold(self, key: str, problem: str | None) -> None:
        """Kept if there is no problem."""
        if problem is None:
            self.kept(key)
        else:
            self.broken(key, problem)

    @property
    def problems(self) -> dict[str, list[str]]:
        """Key -> every time it was broken, in words."""
        return dict(self._broken)

    def verdicts(self) -> Iterator[tuple[str, bool | None, list[str]]]:
        """Every sentence: (key, whether it held or None if it was not tested, what was wrong)."""
        for key in CONTRACT:
            wrong = self._broken.get(key, [])
            yield key, (False if wrong else True if self._kept[key] else None), wrong
