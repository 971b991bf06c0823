"""Where a rank listens: the same ports on every machine, one for each rank of it."""

import json
from pathlib import Path

import pytest

from murmur.learner_service.app import _ports_to_bind
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.shared.config.learner import METRICS_PORT, PORT, LearnerConfig

SET = LearnerConfig(port=6000, metrics_port=7000)
ANY = LearnerConfig(port=0, metrics_port=0)


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
    assert _ports_to_bind(SET, Group(rank, 8), tmp_path / "learner-1.json") == expected


def test_a_learner_alone_has_the_configured_ports(tmp_path: Path) -> None:
    none = tmp_path / "learner.json"
    assert _ports_to_bind(SET, ALONE, none) == (6000, 7000)
    assert _ports_to_bind(ANY, ALONE, none) == (0, 0)
    assert _ports_to_bind(LearnerConfig(), ALONE, none) == (PORT, METRICS_PORT)
    assert _ports_to_bind(LearnerConfig(), Group(3, 8), none) == (PORT + 3, METRICS_PORT + 3)


def test_a_restarted_learner_is_where_its_servers_know_it(tmp_path: Path) -> None:
    had = tmp_path / "learner.json"
    had.write_text(json.dumps({"port": 6500, "metrics_port": 7500}))
    for group in (ALONE, Group(3, 8)):
        assert _ports_to_bind(ANY, group, had) == (6500, 7500)
        assert _ports_to_bind(LearnerConfig(), group, had)[0] == 6500
    assert _ports_to_bind(SET, ALONE, had) == (6000, 7000)
