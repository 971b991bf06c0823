"""The slot table: what a session leaves behind in it, and how large it gets."""

import numpy as np

from murmur.learner_service.checkpoint.parts import SLOTS
from murmur.learner_service.serving.requests import EnvSession
from murmur.learner_service.serving.slots import SlotTable
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.timestep import StepType
from tests.learner_service.toys import vector_spec

SPEC = vector_spec()


def table(exact: bool = False, **options: int) -> SlotTable:
    return SlotTable(exact, Progress(), **options)


def admit(slots: SlotTable, num_envs: int, first: int) -> EnvSession:
    hello = pb.Hello(worker_id="w", num_envs=num_envs, preferred_first_slot=first)
    return slots.admit(hello, SPEC)[0]


def play(session: EnvSession, episodes: int) -> None:
    """Begin this number of episodes in each of its slots."""
    for _ in range(episodes):
        session.observe(np.full(session.num_envs, StepType.FIRST, np.uint8))


def test_a_session_without_rows_leaves_no_slots() -> None:
    slots = table()
    for i in range(16):
        session = admit(slots, 65_536, 65_536 * (i % 15))
        assert slots.state_dict()["slots"] == []  # nor is it saved while it is connected
        slots.end(session)
    assert slots.state_dict()["slots"] == []


def test_a_cancelled_session_keeps_the_slots_next_episode() -> None:
    slots = table()
    for _ in range(2):
        session = admit(slots, 2, 0)
        play(session, 3)
        slots.end(session)
        slots.end(admit(slots, 2, 0))
    assert [episode for _, episode, _ in slots.state_dict()["slots"]] == [6, 6]


def test_table_drops_slots_but_repeats_no_episode() -> None:
    slots = table(max_remembered=8)
    played: set[tuple[int, int]] = set()
    for turn in range(40):
        session = admit(slots, 4, 4 * (turn * 7 % 5))
        first = session.episode.copy()
        play(session, 1 + turn % 3)
        for slot, a, b in zip(session.slots.tolist(), first, session.episode, strict=True):
            new = {(slot, e) for e in range(a, b + 1)}
            assert not new & played
            played |= new
        slots.end(session)
        assert len(slots.state_dict()["slots"]) <= 8
    resumed = table(max_remembered=8)
    resumed.load_state_dict(slots.state_dict())
    for first_slot in (0, 4, 8, 12, 16):
        session = admit(resumed, 4, first_slot)
        for slot, episode in zip(session.slots.tolist(), session.episode, strict=True):
            assert (slot, int(episode)) not in played


def test_each_rank_has_slots_of_its_own() -> None:
    slots = table(rank=3)
    first, wanted = 3 * SLOTS, admit(slots, 2, 5)
    assert wanted.first_slot == first + 5
    assert admit(slots, 5, 6).first_slot == first  # its place is taken: the first gap
    assert admit(slots, 2, first + 9).first_slot == first + 9  # as its last Welcome said
    play(wanted, 1)
    slots.end(wanted)
    assert [slot for slot, *_ in slots.state_dict()["slots"]] == [first + 5, first + 6]


def test_a_resumed_episode_still_counts_as_begun_before() -> None:
    slots = table(exact=True)
    session = admit(slots, 3, 0)
    play(session, 1)
    session.untrained[:] = [True, False, True]
    session.episode_return[:] = [1, 2, 3]
    resumed = table(exact=True)
    resumed.load_state_dict(slots.state_dict())
    early = admit(resumed, 3, 0)
    resumed.end(early)  # before its first row
    again = admit(resumed, 3, 0)
    for each in (early, again):
        assert each.untrained.tolist() == [True, False, True]
        assert each.episode_return.tolist() == [1, 2, 3]
    resumed.end(again)
