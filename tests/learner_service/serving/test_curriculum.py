"""The curriculum on the learner: courses, messages to sessions, checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from murmur.learner_service.serving.curriculum import Curriculum
from murmur.learner_service.serving.slots import SlotTable
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.config.episode_options import EnvironmentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec
from murmur.shared.wire.episode_options import options_from_proto
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType

SPEC = EnvSpec(
    name="windy",
    num_agents=1,
    observations=(ArraySpec("observation", "float32", (3,)),),
    action=Discrete(2),
    metrics=("calm",),
    max_episode_steps=5,
)
LEVELS = {"levels": [1, 2, 4], "when": {"metric": "calm", "above": 0.5, "over_episodes": 4}}
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def curriculum(size: int = 1, **courses: Any) -> Curriculum:
    config = EnvironmentConfig(name="windy", curriculum=courses)
    return Curriculum(config.courses, size)


def alone(values: Mapping[str, float]) -> Mapping[str, float]:
    return values


def finish(of: Curriculum, *calm: float, values: Any = None) -> None:
    """Finish episodes that began with these values, or the current ones."""
    n = len(calm)
    begun = np.full(n, values or of.current, object)
    of.note(begun, np.ones(n, np.bool_), np.zeros(n), {"calm": np.array(calm)})


def test_lines_follow_updates_or_environment_steps() -> None:
    found = curriculum(
        wind={"from": 0, "to": 10, "over_env_steps": 100},
        mass={"from": 4, "to": 1, "over_updates": 4, "whole": True},
        maze={"levels": ["a", "b"], "over_updates": 4},
    )
    assert found.current.options == {"wind": 0.0, "mass": 4, "maze": "a"}
    found.advance(1, 25, alone)
    assert found.current.options == {"wind": 2.5, "mass": 3, "maze": "a"}
    found.advance(2, 50, alone)
    assert found.current.options == {"wind": 5.0, "mass": 2, "maze": "b"}
    found.advance(9, 900, alone)
    assert found.current == found.last
    assert found.last.options == {"wind": 10.0, "mass": 1, "maze": "b"}
    before = found.current
    found.advance(10, 1000, alone)
    assert found.current is before  # no message carries it


def test_a_level_waits_for_enough_episodes_of_its_own() -> None:
    found = curriculum(wind=LEVELS)
    first = found.current
    finish(found, 1, 1, 1)
    found.advance(1, 10, alone)
    assert found.current.options == {"wind": 1}  # three of four
    finish(found, 0)
    found.advance(2, 20, alone)
    assert found.current.options == {"wind": 2}  # mean 0.75
    finish(found, 1, 1, 1, 1, values=first)  # of the level before
    found.advance(3, 30, alone)
    assert found.current.options == {"wind": 2}
    finish(found, 1, 1, 0, 0)
    found.advance(4, 40, alone)
    assert found.current.options == {"wind": 2}  # 0.5 is not above 0.5
    finish(found, 1, 1, 1)
    found.advance(5, 50, alone)
    assert found.current.options == {"wind": 4}  # of the latest four only one is 0
    finish(found, 1, 1, 1, 1)
    found.advance(6, 60, alone)
    assert found.current.options == {"wind": 4}  # the last
    figures = found.figures(LearnerMetrics())["curriculum"]["wind"]
    assert figures == {"value": 4, "number": 4.0, "level": 2, "episodes": [8, 7, 4], "mean": 1.0}


def test_levels_of_one_value_are_passed() -> None:
    found = curriculum(wind={**LEVELS, "levels": [1, 1, 2]})
    for update, level in enumerate((1, 2)):
        finish(found, 1, 1, 1, 1)
        found.advance(update, 10 * update, alone)
        assert found.current.levels == {"wind": level}


def test_learners_of_a_run_are_at_one_level() -> None:
    """Neither has enough episodes alone, and one of them is below the threshold."""
    ranks = [curriculum(2, wind=LEVELS) for _ in range(2)]
    finish(ranks[0], 1, 1)
    finish(ranks[1], 0, 1)
    told: list[dict[str, float]] = []
    for rank in ranks:
        rank.advance(0, 0, lambda own: told.append(dict(own)) or own)
    total = {name: sum(own[name] for own in told) for name in told[0]}
    for rank in ranks:
        assert rank.current.options == {"wind": 1}
        rank.advance(1, 10, lambda own: total)
        assert rank.current.options == {"wind": 2}


def test_unknown_metrics_are_named() -> None:
    course = {**LEVELS, "when": {"metric": "clam", "above": 1}}
    with pytest.raises(ConfigError, match=r"metric=clam: .*did you mean 'calm'.*return"):
        curriculum(wind=course).check(SPEC)
    curriculum(wind={**LEVELS, "when": {"metric": "return", "below": 1}}).check(SPEC)


def test_a_resumed_curriculum_continues() -> None:
    one, other = (
        curriculum(wind=LEVELS, sun={"from": 0, "to": 1, "over_updates": 8}) for _ in "ab"
    )
    finish(one, 1, 1, 1, 1)
    one.advance(4, 10, alone)
    finish(one, 1, 1, 1)
    other.load_state_dict(one.state_dict())
    assert other.current.options == {"wind": 2, "sun": 0.5}
    for each in (one, other):
        finish(each, 0)
        each.advance(5, 20, alone)
        assert each.current.options == {"wind": 4, "sun": 0.625}
    shorter = curriculum(wind={**LEVELS, "levels": [1, 2]})
    shorter.load_state_dict(one.state_dict())
    assert shorter.current.options == {"wind": 2}


def rows(*kinds: StepType) -> Any:
    return np.array(kinds, np.uint8)


def test_a_resumed_episode_has_the_value_that_it_began_with() -> None:
    """Slot 0 is in an episode of an older value, slot 1 in one of the latest but one."""
    found = curriculum(wind={"from": 0, "to": 8, "over_updates": 8})
    table = SlotTable(True, Progress(), curriculum=found)
    session, starts = table.admit(pb.Hello(worker_id="w", num_envs=2, curriculum=["wind"]), SPEC)
    assert not starts[0].options
    assert session.values is found.current
    codec, action = ActionCodec(SPEC, 2), np.zeros((2, 1), np.int32)

    def answer(kinds: Any, updates: int) -> None:
        session.observe(kinds)
        found.advance(updates, 0, alone)
        session.taken.append(action)
        message = session.codec.pack(1, updates, action)
        if session.values is not found.current:
            message = session.tell(message, found.current)
        codec.unpack(message)
        assert codec.options == dict(found.current.options)

    answer(rows(FIRST, FIRST), 1)
    answer(rows(MID, LAST), 2)  # 2 from here on
    answer(rows(MID, FIRST), 3)
    assert [values.options["wind"] for values in session.begun] == [0, 2]
    state = table.state_dict()
    again = SlotTable(True, Progress(), curriculum=found)
    again.load_state_dict(state)
    resumed, starts = again.admit(pb.Hello(worker_id="w", num_envs=2, curriculum=["wind"]), SPEC)
    assert [options_from_proto(start.options)["wind"] for start in starts] == [0, 2]
    assert resumed.values is not None
    assert resumed.values.options["wind"] == 3
    resumed.observe(rows(MID, MID))
    assert [values.options["wind"] for values in resumed.begun] == [0, 2]
    # A session that ends before its first rows leaves its place as it was.
    third = SlotTable(True, Progress(), curriculum=found)
    third.load_state_dict(state)
    left, _ = third.admit(pb.Hello(worker_id="w", num_envs=2, curriculum=["wind"]), SPEC)
    third.end(left)
    _, starts = third.admit(pb.Hello(worker_id="w", num_envs=2, curriculum=["wind"]), SPEC)
    assert [options_from_proto(start.options)["wind"] for start in starts] == [0, 2]


def test_a_resumed_episode_follows_a_changed_curriculum() -> None:
    """An option that the curriculum no longer names is dropped, an added one is current."""
    line = {"from": 1, "to": 9, "over_updates": 8}
    found = curriculum(wind=line, sun=line)
    table = SlotTable(True, Progress(), curriculum=found)
    session, _ = table.admit(pb.Hello(worker_id="w", num_envs=1), SPEC)
    session.observe(rows(FIRST))
    session.taken.append(np.zeros((1, 1), np.int32))
    changed = curriculum(wind=line, maze={"levels": ["a", "b"], "over_updates": 4})
    again = SlotTable(True, Progress(), curriculum=changed)
    again.load_state_dict(table.state_dict())
    resumed, starts = again.admit(pb.Hello(worker_id="w", num_envs=1), SPEC)
    assert options_from_proto(starts[0].options) == {"wind": 1.0, "maze": "a"}
    assert resumed.values is not None
    assert resumed.values.options == {"wind": 1.0, "maze": "a"}
    assert resumed.begun[0].levels == {"maze": 0}
