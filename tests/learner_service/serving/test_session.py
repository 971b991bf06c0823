"""What a session remembers, so that an exact resume can replay it."""

import numpy as np
import pytest

from murmur.learner_service.serving.requests import EnvSession
from murmur.learner_service.serving.slots import replay
from murmur.shared.wire.timestep import Array
from tests.learner_service.serving_learner import Serving
from tests.learner_service.toys import ABORTED, FIRST, LAST, MID, make_coma, row, vector_spec

SPEC = vector_spec(num_agents=2)


def session(n: int = 2, episode: int = 0) -> EnvSession:
    return EnvSession("w", SPEC, n, 4, np.full(n, episode, np.int64))


def action(n: int, value: int) -> Array:
    """Environment i, agent a: value * 100 + 10 i + a."""
    return (100 * value + 10 * np.arange(n)[:, None] + np.arange(2)).astype(np.int32)


def decode(data: bytes) -> list[int]:
    """First agent's actions."""
    return np.frombuffer(data, np.int32).reshape(-1, 2)[:, 0].tolist()


def play(s: EnvSession, rows: list[list[int]], start: int = 0) -> None:
    for t, types in enumerate(rows, start):
        s.observe(np.array(types, np.uint8))
        s.taken.append(action(s.num_envs, t))


def test_open_actions_of_episodes_of_different_lengths() -> None:
    s = session()
    play(
        s,
        [
            [FIRST, FIRST],  # action 0
            [MID, LAST],
            [LAST, FIRST],  # 2: environment 1 begins its second episode
            [FIRST, MID],  # 3: environment 0 too
            [MID, MID],
        ],
    )
    assert s.episode.tolist() == [1, 1]
    assert decode(s.open_actions(0)) == [300, 400]
    assert decode(s.open_actions(1)) == [210, 310, 410]
    assert len(s.taken) == 3  # what no open episode began with is forgotten


def test_answer_to_a_last_row_is_kept_until_the_next_episode() -> None:
    s = session(1)
    play(s, [[FIRST], [MID], [LAST]])
    assert decode(s.open_actions(0)) == [0, 100, 200]
    s.observe(np.array([FIRST], np.uint8))
    assert decode(s.open_actions(0)) == []
    assert s.episode.tolist() == [1]


def test_the_episodes_of_the_first_rows_were_agreed_on() -> None:
    s = session(episode=5)
    s.observe(np.array([FIRST, FIRST], np.uint8))
    assert s.episode.tolist() == [5, 5]
    assert s.slots.tolist() == [4, 5]


def test_replay_aligns_the_ends() -> None:
    before = session(3, episode=2)
    play(
        before,
        [[FIRST] * 3, [MID, LAST, MID], [MID, FIRST, MID], [MID, MID, LAST], [MID, MID, FIRST]],
    )
    before.observe(np.array([MID, MID, MID], np.uint8))  # a checkpoint is written here
    actions = [before.open_actions(i) for i in range(3)]
    assert [len(decode(a)) for a in actions] == [5, 3, 1]

    after = session(3, episode=2)
    after.episode = before.episode.copy()
    replay(after, actions)
    assert [after.open_actions(i) for i in range(3)] == actions
    # ... and continues as the other does
    after.observe(np.array([MID, MID, MID], np.uint8))
    for s in (before, after):
        s.taken.append(action(3, 9))
        s.observe(np.array([MID, FIRST, MID], np.uint8))
        s.taken.append(action(3, 10))
    assert [after.open_actions(i) for i in range(3)] == [before.open_actions(i) for i in range(3)]
    assert after.episode.tolist() == before.episode.tolist() == [2, 4, 3]


def test_replay_of_nothing_is_a_fresh_start() -> None:
    s = session(2)
    replay(s, [b"", b""])
    assert s.taken == []
    assert s.started.tolist() == [0, 0]


@pytest.mark.parametrize("before", [0, 1, 3])
def test_rows_at_the_end_of_their_session_are_counted(before: int) -> None:
    """Not as received only: then they would be in no other count."""
    with Serving(make_coma(SPEC), SPEC) as serving:
        player = serving.session(2)
        for t in range(before):
            serving.exchange((player, row(SPEC, 2, MID if t else FIRST)))
        serving.end(player, row(SPEC, 2, MID if before else FIRST))
        assert serving.progress.rows_received == 2 * (before + 1)
        assert serving.progress.rows_dropped == {"session": 2}
        assert serving.storage.waiting_rows == 2 * before


@pytest.mark.parametrize("after", [0, 1, 2])
def test_rows_cut_by_an_update_survive_their_session(after: int) -> None:
    with Serving(make_coma(SPEC), SPEC) as serving:
        player = serving.session(2)
        for t in range(3):
            serving.exchange((player, row(SPEC, 2, MID if t else FIRST)))
        assert player.unroll is not None
        head = player.unroll.cut()  # as an update does that takes what the next would find too old
        assert head is not None
        for _ in range(after):
            serving.exchange((player, row(SPEC, 2, MID)))
        serving.end(player, row(SPEC, 2, MID))
        assert serving.progress.rows_received == 2 * (3 + after + 1)
        assert serving.progress.rows_dropped == {"session": 2}
        assert 2 * head.transitions + serving.storage.waiting_rows == 2 * (3 + after)


def test_episodes_before_the_first_update_are_told_apart() -> None:
    with Serving(make_coma(SPEC), SPEC) as serving:
        player, p = serving.session(16), serving.progress
        serving.exchange((player, row(SPEC, 16, FIRST)))
        p.updates = 1
        serving.exchange((player, row(SPEC, 16, LAST)), (player, row(SPEC, 16, FIRST)))
        assert (len(p.untrained), p.trained_episodes) == (16, 0)
        serving.exchange((player, row(SPEC, 16, LAST)))
        assert (len(p.untrained), p.trained_episodes) == (16, 16)


@pytest.mark.parametrize(("rewards", "at_odds"), [((1.0, -1.0), 2), ((-1.0, -2.0), 0)])
def test_agents_that_are_rewarded_at_each_others_expense(
    rewards: tuple[float, float], at_odds: int
) -> None:
    with Serving(make_coma(SPEC), SPEC) as serving:
        player = serving.session(2)
        for t in range(3):
            timestep = row(SPEC, 2, MID if t else FIRST)
            timestep.reward[:] = rewards if t == 1 else 0.0
            serving.exchange((player, timestep))
        assert serving.progress.rewards_at_odds == [2, at_odds]


def test_episode_counts_do_not_depend_on_the_mid_shortcut() -> None:
    """Random rows of three environments: episodes begin with FIRST, or after LAST or ABORTED."""
    random = np.random.default_rng(0)
    met = session(3)
    episode, over = np.zeros(3, np.int64), np.zeros(3, np.bool_)
    for turn in range(300):
        step_type = random.choice([FIRST, MID, MID, MID, MID, MID, LAST, ABORTED], 3).astype(
            np.uint8
        )
        if random.random() < 0.5:
            step_type[:] = MID
        begins = (step_type == FIRST) | over
        episode += begins if turn else 0
        over = (step_type == LAST) | (step_type == ABORTED)
        met.observe(step_type)
        assert met.episode.tolist() == episode.tolist()
        assert met.over.tolist() == over.tolist()
