"""Files of algorithms are mostly algorithm, by the rule of tests.count_algorithm_lines."""

import pytest

from murmur.doctor.machine import ROOT
from tests.count_algorithm_lines import FILES, FOLDER, kinds, share_of_algorithm

SOURCE = '''"""A module."""

import torch  # a comment


class Config:
    rate: float = 0.1  # 2 lines of options


class Learner:
    """3 lines of building: the header, and the constructor."""

    def __init__(self):
        self.network = 1

    def _learn(self, rows):  # 4 lines of algorithm, 1 of checks
        assert rows
        loss = self._loss(
            rows,
        )
        return {  # 3 lines of metrics
            "loss": loss,
        }

    def _loss(self, rows):  # 2 lines of algorithm, used by `_learn`
        return rows**2

    def publish(self, policy):  # 2 lines of building
        policy.load(self._loss)


def require(rows):  # 2 lines of checks
    raise ValueError(rows)
'''


def test_lines_are_counted_by_kind() -> None:
    assert kinds(SOURCE) == {
        "imports": 1,
        "options": 2,
        "building": 5,
        "algorithm": 6,
        "checks": 3,
        "metrics": 3,
    }
    assert share_of_algorithm(kinds(SOURCE)) == pytest.approx(6 / 19)


@pytest.mark.parametrize("name", FILES)
def test_an_algorithms_file_is_its_equations(name: str) -> None:
    source = (ROOT / FOLDER / f"{name}.py").read_text(encoding="utf-8")
    # Segmentation has two losses and one step: its options and its evaluation are as many lines.
    assert share_of_algorithm(kinds(source)) >= (0.4 if name == "segmentation" else 0.5)
