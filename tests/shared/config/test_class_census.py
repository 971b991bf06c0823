"""A census of masks finds every value, and looks at each sample once."""

import numpy as np

from murmur.shared.config.class_census import ClassCensus, class_problems
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec

ARRAYS = (ArraySpec("mask", "uint8", (4, 4), per_agent=False),)


def spec(classes: int) -> SampleSpec:
    names = tuple(f"c{k}" for k in range(classes))
    return SampleSpec("toy", ARRAYS, (6, 4), "0" * 64, names)


def test_census_equals_a_count_of_all_pixels() -> None:
    rng = np.random.default_rng(0)
    for classes in (2, 5, 40):
        census = ClassCensus(spec(classes))
        masks = rng.integers(0, classes, (6, 4, 4), np.uint8)
        masks[2, 1, 1] = 255
        for part in ([0, 1], [2], [3, 4, 5]):
            census.look(0, part, masks[part])
        assert np.flatnonzero(census.seen[0]).tolist() == np.unique(masks).tolist()
        assert not census.seen[1].any()
        assert census.looked[0].all()


def test_samples_that_come_again_are_not_looked_at() -> None:
    census = ClassCensus(spec(3))
    census.look(0, [1, 2], np.zeros((2, 4, 4), np.uint8))
    census.look(0, [2, 1], np.ones((2, 4, 4), np.uint8))
    assert np.flatnonzero(census.seen[0]).tolist() == [0]


def test_nothing_is_said_of_a_split_that_was_not_looked_at() -> None:
    seen = np.zeros((2, 256), np.bool_)
    assert not class_problems(spec(2), seen, (0, 0))
    seen[0, :2] = True
    assert not class_problems(spec(2), seen, (6, 0))
    assert [p.fatal for p in class_problems(spec(2), seen, (6, 4))] == [True]
