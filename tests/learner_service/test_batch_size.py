"""The largest batch that fits: the search, and what it finds on this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from learner_service import batch_size
from learner_service.batch_size import fit_batch_size, largest
from shared.config import ExperimentConfig, load
from shared.errors import ConfigError
from tests.learner_service.toys import vector_spec


@pytest.mark.parametrize("limit", [0, 1, 3, 255, 256, 300, 1000, 4095, 4096, 100_000])
def test_the_search_comes_within_a_sixteenth(limit: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest(fits, 256, 4096)
    best = min(limit, 4096)
    assert found <= best
    assert best - found <= max(1, best // 8) if best else found == 0
    assert len(tried) == len(set(tried)) <= 16
    assert max(tried) <= 4096


ROOT = Path(__file__).parents[2]


def config(budget_gib: float, *more: str) -> ExperimentConfig:
    settings = [
        "algorithm.batch_size=0",
        "algorithm.batch_number=1",
        "learner.device=cpu",
        "network.name=mlp",
        "network.hidden=[2048]",
        f"learner.memory_budget_gib={budget_gib}",
    ]
    return load("spread", [*settings, *more], {})


SIZE_IN_A_FRESH_PROCESS = """
import sys
from pathlib import Path
from learner_service.algorithm import algorithm_options
from learner_service.batch_size import fit_batch_size
from tests.learner_service.test_batch_size import config
from tests.learner_service.toys import vector_spec

fitted = fit_batch_size(config(float(sys.argv[1])), vector_spec(), Path(sys.argv[2]))
print(algorithm_options(fitted.algorithm)["batch_size"])
"""


def test_twice_the_memory_holds_about_twice_the_batch(tmp_path: Path) -> None:
    # In processes of their own, as a learner does it: what others have freed there is not counted.
    # And so large that the C library gives every tensor back: below 32 MiB it keeps some.
    sizes = []
    for budget in ("0.3", "0.6"):
        folder = tmp_path / budget
        folder.mkdir()
        command = [sys.executable, "-c", SIZE_IN_A_FRESH_PROCESS, budget, str(folder)]
        found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        sizes.append(int(found.stdout))
    assert 100 < sizes[0] < sizes[1]
    assert 1.7 < sizes[1] / sizes[0] < 2.4


def test_it_is_found_once_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit_batch_size(config(0.05), vector_spec(), tmp_path)
    assert (tmp_path / "batch-size.json").is_file()
    monkeypatch.setattr(batch_size, "seconds_per_row", None)  # nothing may be tried again
    assert fit_batch_size(config(0.05), vector_spec(), tmp_path) == found


def test_a_size_that_is_given_stays(tmp_path: Path) -> None:
    given = load("spread", [], {})
    assert fit_batch_size(given, vector_spec(), tmp_path) is given


def test_no_room_at_all_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raise learner\.memory_budget_gib"):
        fit_batch_size(config(1e-9), vector_spec(), tmp_path)
