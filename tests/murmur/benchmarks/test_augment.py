"""The loop that the benchmark compares with is a second implementation: same images, same masks."""

import pytest

from murmur.benchmarks.augment import both, count_launches, make_batch


@pytest.mark.parametrize("preset", ["minimal", "standard", "strong"])
def test_device_path_equals_the_opencv_loop(preset: str) -> None:
    batch = make_batch(16, 64)
    ours, theirs = (call() for call in both(preset, batch, seed=5))
    assert (ours["image"] - theirs["image"]).abs().mean() < 0.005
    # Nearest samples fall to one side or the other where a border runs through a pixel's centre.
    assert (ours["mask"] == theirs["mask"]).float().mean() > 0.99
    assert (ours["mask"] != batch["mask"]).any()


def test_standard_is_forty_launches_at_most_and_no_copy() -> None:
    counts = count_launches("standard")
    assert 0 < counts["launches"] <= 40
    assert counts["synchronisations"] == counts["copies from or to the host"] == 0
