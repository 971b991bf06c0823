"""A learner says which classes no mask holds, and ends if masks hold none."""

from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from murmur.shared.wire.notices import FILE, read_notices
from murmur.shared.wire.sample_codec import Grant
from murmur.shared.wire.samples import SPLITS
from tests.learner_service.images.test_supply import SOURCE, Supplier, config
from tests.learner_service.running import learner_process, running_learner

Mask = Callable[[str, int], list[int]]  # split and index -> values that the mask holds


def supply(port: int, mask_of: Mask) -> None:
    """A session of samples with other masks, until the run ends."""

    def read(grant: Grant, index: int) -> dict[str, np.ndarray]:
        sample = SOURCE.read(SPLITS[grant.split], index)
        sample["mask"][:] = np.resize(mask_of(SPLITS[grant.split], index), sample["mask"].shape)
        return sample

    try:
        with Supplier(port).welcomed() as supplier:
            while True:
                grant = supplier.grant()
                samples = [read(grant, index) for index in grant.indices]
                for message in supplier.codec.messages(grant, samples, []):
                    supplier.send(message)
    except (grpc.RpcError, StopIteration):
        return


@pytest.mark.parametrize(
    ("mask_of", "said"),
    [
        (
            lambda split, index: [0, 1, 255],
            [
                "class 'two' (2) is in none of 24 training samples: not learned. 255 is ignored "
                "(source.ignore_index): if it means 'two', write 2 in its place, or set "
                "source.values=[0, 1, 255]",
                "class 'two' (2) is in none of 4 validation samples: f_score and miou are means "
                "over the other 2",
            ],
        ),
        (
            lambda split, index: [0, 1] if split == "train" or index else [0, 2],
            [
                "class 'two' (2) is in none of 24 training samples: not learned",
                "class 'two' (2) is in validation samples alone: the score of each is about 0",
            ],
        ),
        (lambda split, index: [0, 2 if index == 3 else 1], []),
    ],
    ids=["nowhere", "validation alone", "one sample"],
)
def test_a_class_that_no_mask_holds_is_said_once(
    tmp_path: Path, mask_of: Mask, said: list[str]
) -> None:
    with running_learner(tmp_path, config()) as learner:
        supply(learner.port, mask_of)
    assert [notice.text for notice in read_notices(tmp_path / FILE)] == said


def test_masks_that_are_ignored_everywhere_end_the_run(tmp_path: Path) -> None:
    with learner_process(tmp_path, config()) as learner:
        supply(learner.port, lambda split, index: [255])
        code, errors = learner.wait()
    assert code == 2
    assert "all masks of 24 training samples hold 255 alone, which is ignored" in errors
    assert "Traceback" not in errors
