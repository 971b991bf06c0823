"""Evaluations: the first episode of every environment counts, once."""

import numpy as np
import pytest

from murmur.learner_service.serving.evaluation import (
    Evaluation,
    EvaluationScheduler,
    check_best_metric,
)
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import TimeStep
from tests.learner_service.toys import FIRST, LAST, MID, make_coma, vector_spec


def rows(types: list[int], reward: float, score: list[float]) -> TimeStep:
    n = len(types)
    return TimeStep(
        np.array(types, np.uint8),
        np.full((n, 2), reward, np.float32),
        np.ones(n, np.float32),
        {},
        {"score": np.array(score, np.float32)},
    )


def evaluation(updates: int = 3) -> Evaluation:
    return Evaluation(make_coma(vector_spec()).make_policy(), updates, 100)


@pytest.mark.parametrize("name", ["return", "-return", "score", "-score"])
def test_best_is_chosen_by_return_or_an_environment_metric(name: str) -> None:
    check_best_metric(name, "it", vector_spec().metrics)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scoer", "has no metric 'scoer'; did you mean 'score'[?] known: return, score$"),
        ("-height", "has no metric 'height'; known: return, score$"),
    ],
)
def test_the_best_by_another_metric_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_best_metric(name, "it", vector_spec().metrics)


def test_only_first_episodes_count() -> None:
    e = evaluation()
    assert not e.observe(rows([FIRST, FIRST], 0, [0, 0]))
    assert not e.observe(rows([LAST, MID], 1, [5, 0]))  # returns so far 2, 2
    assert not e.observe(rows([FIRST, MID], 10, [0, 0]))
    assert not e.observe(rows([LAST, MID], 10, [99, 0]))  # a second episode
    assert e.observe(rows([FIRST, LAST], 1, [0, 7]))  # 2 + 20 + 20 + 2 = 44
    assert e.episodes == {"return": [2, 44], "score": [5, 7]}
    summary = e.summary()
    assert summary["score"]["mean"] == 6
    assert summary["score"]["std"] == 1  # of these episodes
    # 1.96 * sqrt(2) / sqrt(2)
    assert summary["score"]["ci95"] == pytest.approx([6 - 1.96, 6 + 1.96])
    assert summary["score"]["episodes"] == 2


def test_few_environments_play_the_episodes_in_turns() -> None:
    e = evaluation()
    e.wanted = 3  # environment 0 plays 0 and 2, environment 1 plays 1
    assert not e.observe(rows([FIRST, FIRST], 0, [0, 0]))
    assert not e.observe(rows([LAST, MID], 1, [5, 0]))
    assert not e.observe(rows([FIRST, LAST], 0, [0, 6]))
    assert not e.observe(rows([MID, FIRST], 1, [0, 0]))
    assert not e.observe(rows([MID, LAST], 1, [0, 99]))  # a second one of environment 1
    assert e.observe(rows([LAST, FIRST], 1, [7, 0]))
    assert e.episodes == {"return": [2, 2, 6], "score": [5, 6, 7]}


def test_an_evaluation_that_is_given_up_is_not_due_again() -> None:
    scheduler = EvaluationScheduler(lambda _: None)
    for given_up in (False, True):
        scheduler.offer(evaluation())
        started = scheduler.start()
        assert started is not None
        scheduler.end(started, complete=False, given_up=given_up)
        assert (scheduler.start() is None) == given_up


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "cut off"])
def test_the_end_waits_for_the_evaluator_of_a_long_evaluation(
    complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(
        "murmur.learner_service.serving.evaluation.time.monotonic", lambda: clock[0]
    )
    scheduler = EvaluationScheduler(lambda _: None)
    scheduler.offer(evaluation())
    started = scheduler.start()
    assert started is not None
    clock[0] += 60.0
    scheduler.offer(evaluation())  # of the final policy
    scheduler.end(started, complete=complete)
    assert scheduler.busy  # its session asks again in a moment
    clock[0] += 60.0
    assert not scheduler.busy  # it is gone


def test_one_episode_has_no_interval() -> None:
    e = evaluation()
    e.observe(rows([LAST], 1, [5]))
    assert e.summary()["score"]["ci95"] == [5, 5]


def test_due_evaluation_starts_once_and_yields_to_a_newer_one() -> None:
    scheduler = EvaluationScheduler(lambda _: None)
    assert scheduler.start() is None
    old, new = evaluation(1), evaluation(2)
    scheduler.offer(old)
    scheduler.offer(new)
    assert scheduler.start() is new
    assert scheduler.start() is None
