"""Where a rank listens: the same ports on every machine, one for each rank of it."""

from pathlib import Path

import pytest

from murmur.learner_service.app import _with_own_ports
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate


def config(port: int, metrics_port: int) -> ExperimentConfig:
    learner = {"port": port, "metrics_port": metrics_port}
    return validate(ExperimentConfig, {"environment": {"name": "spread"}, "learner": learner})


def ports(found: ExperimentConfig) -> tuple[int, int]:
    return found.learner.port, found.learner.metrics_port


@pytest.mark.parametrize(
    ("rank", "local", "expected"),
    [
        (1, "1", (6001, 7001)),  # two ranks on one machine
        (1, "0", (6000, 7000)),  # a rank in each of two pods: one name finds both at one port
        (5, "1", (6001, 7001)),  # the second machine of four ranks each
        (3, "", (6003, 7003)),  # started by something else than torchrun
    ],
)
def test_ports_count_from_the_first_rank_of_a_machine(
    rank: int,
    local: str,
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    found = _with_own_ports(config(6000, 7000), Group(rank, 8), tmp_path / "learner-1.json")
    assert ports(found) == expected


def test_a_learner_alone_has_the_configured_ports(tmp_path: Path) -> None:
    alone = config(6000, 7000)
    assert _with_own_ports(alone, ALONE, tmp_path / "learner.json") is alone
