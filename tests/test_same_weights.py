"""Hashes of what was learned survive a renaming, and nothing else."""

import json
from pathlib import Path

import pytest
import torch

from tests import same_weights
from tests.same_weights import CASES, ROOT, Case, RunError, differences, digest, leaf_hashes, train

OLD = {"parts": {"critic": {"trunk.weight": torch.ones(2, 3), "bias": torch.zeros(3)}}, "n": 7}
NEW = {"n": 7, "parts": {"critic": {"bias": torch.zeros(3), "body.weight": torch.ones(2, 3)}}}


def rename(monkeypatch: pytest.MonkeyPatch, file: Path, *pairs: tuple[str, str]) -> None:
    file.write_text(json.dumps(pairs))
    monkeypatch.setattr(same_weights, "NAMES", file)


def test_a_renamed_tensor_is_compared_by_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert differences(leaf_hashes(OLD), leaf_hashes(NEW)) == [
        "/parts/critic/body.weight (theirs alone)",
        "/parts/critic/trunk.weight (ours alone)",
    ]
    rename(monkeypatch, tmp_path / "names.json", ("parts/critic/trunk.", "parts/critic/body."))
    assert digest(OLD) == digest(NEW)
    changed = {"bias": torch.zeros(3), "body.weight": torch.zeros(2, 3)}
    found = differences(leaf_hashes(OLD), leaf_hashes({"parts": {"critic": changed}, "n": 7}))
    assert found == ["/parts/critic/trunk.weight"]


def test_two_tensors_of_one_name_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rename(monkeypatch, tmp_path / "names.json", ("parts/critic/bias", "parts/critic/trunk.weight"))
    with pytest.raises(AssertionError, match="two tensors are called /parts/critic/bias"):
        leaf_hashes(OLD)


def test_shape_and_type_are_part_of_a_hash() -> None:
    kinds = [torch.zeros(2, 2), torch.zeros(4), torch.zeros(4, dtype=torch.int32), 0]
    assert len({digest({"x": kind}) for kind in kinds}) == 4


@pytest.mark.long
@pytest.mark.system
def test_a_case_repeats_and_one_that_cannot_run_says_so(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    case = CASES["mappo, memory, recurrent, resumed"]
    assert train(ROOT, case, folders[0]) == train(ROOT, case, folders[1])
    unknown = Case({"name": "spread", "no_such_option": 1}, case.algorithm, case.network)
    with pytest.raises(RunError, match="no_such_option"):
        train(ROOT, unknown, folders[2])
