"""The topics by name, with their time limits."""

from collections.abc import Callable
from dataclasses import dataclass

from murmur.benchmarks.gpu_topics import acting, suite, topics, training
from murmur.benchmarks.gpu_topics.figures import Figure, Value
from murmur.benchmarks.gpu_topics.topics import Context


@dataclass(frozen=True)
class Topic:
    """One topic.

    Attributes:
        plan: its figures, with goals and predictions.
        measure: gives their values.
        limit_s: the longest that it may take; all limits together are ten minutes.
    """

    plan: Callable[[Context], list[Figure]]
    measure: Callable[[Context], dict[str, Value]]
    limit_s: float


TOPICS = {
    "masac": Topic(topics.plan_masac, topics.masac, 40),
    "acting": Topic(acting.plan_acting, acting.acting, 60),
    "updates": Topic(topics.plan_updates, topics.updates, 100),
    "training": Topic(training.plan_training, training.training, 90),
    "profile": Topic(training.plan_profile, training.profile, 70),
    "equality": Topic(topics.plan_equality, topics.equality, 50),
    "precision": Topic(topics.plan_precision, topics.precision, 90),
    "launches": Topic(topics.plan_launches, topics.launches, 60),
    "tests": Topic(suite.plan_tests, suite.tests, 40),
}
