"""The topics by name, the most valuable first, with their time limits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from murmur.benchmarks.gpu_topics import acting, augmentation, costs, suite, topics, training
from murmur.benchmarks.gpu_topics.figures import Figure, Value
from murmur.benchmarks.gpu_topics.topics import Context


@dataclass(frozen=True)
class Topic:
    """A topic: a plan and a measurement with time limits.

    Attributes:
        plan: its figures, with goals and predictions.
        measure: function that returns their values.
        limit_s: longest duration [s].
        likely_s: expected duration [s].
    """

    plan: Callable[[Context], list[Figure]]
    measure: Callable[[Context], dict[str, Value]]
    limit_s: float
    likely_s: float


def _run(preset: str) -> Topic:
    run = training.RUNS[preset]
    plan = partial(training.plan_run, run=run)
    return Topic(plan, partial(training.measure_run, run=run), 90, 75)


TOPICS = {
    "terrain-reference": _run("terrain-reference"),
    "updates": Topic(topics.plan_updates, topics.updates, 60, 45),
    "masac": Topic(topics.plan_masac, topics.masac, 40, 25),
    "terrain-published": _run("terrain-published"),
    "augment": Topic(augmentation.plan_augment, augmentation.augment, 40, 25),
    "costs": Topic(costs.plan_costs, costs.costs, 40, 25),
    "spread": _run("spread"),
    "acting": Topic(acting.plan_acting, acting.acting, 80, 65),
    "equality": Topic(topics.plan_equality, topics.equality, 60, 45),
    "tests": Topic(suite.plan_tests, suite.tests, 60, 45),
    "precision": Topic(topics.plan_precision, topics.precision, 60, 55),
    "launches": Topic(topics.plan_launches, topics.launches, 40, 35),
}
# What each of two calls of six minutes measures, by default.
SESSIONS = (tuple(TOPICS)[:6], tuple(TOPICS)[6:])
