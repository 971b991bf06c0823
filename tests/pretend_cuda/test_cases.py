"""Whole runs on the pretended GPU: nothing mixes devices, waits where it should not, or races."""

from pathlib import Path
from typing import Any

import pytest

from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE
from tests.pretend_cuda import pretend_cuda
from tests.pretend_cuda.cases import Case, every_case, make_spec, some_cases
from tests.pretend_cuda.driven import DrivenRun
from tests.pretend_cuda.known import ALLOWED, unknown


def live(case: Case, folder: Path, **sections: dict[str, Any]) -> list[str]:
    """Play and learn until updates are captured; returns what is found and not known."""
    updates = CALLS_TO_CAPTURE + 1
    with pretend_cuda(ALLOWED) as cuda:
        with DrivenRun(case.config(**sections), make_spec(case.space), folder) as run:
            players = [run.player(3), run.player(2)]
            run.play_until(updates, *players)
            run.end(players[0])  # in the middle of an unroll
            run.play_rows(1, players[1])
        assert run.updates >= updates
    return unknown(list(cuda.report.faults))


@pytest.mark.parametrize("case", list(some_cases()), ids=str)
def test_a_run_is_clean(case: Case, tmp_path: Path) -> None:
    assert not live(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_every_run_is_clean(case: Case, tmp_path: Path) -> None:
    assert not live(case, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        Case("mappo", "discrete", "groups", False, "fp32"),
        pytest.param(Case("masac", "continuous", "groups", False, "bf16"), marks=pytest.mark.long),
        pytest.param(
            Case("qmix-sequences", "discrete", "groups", True, "fp32"), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_a_run_with_frozen_agents_is_clean(case: Case, tmp_path: Path) -> None:
    assert not live(case, tmp_path, algorithm={"frozen_agents": [2]})


@pytest.mark.parametrize(
    "case",
    [
        Case("mappo", "discrete", "groups", True, "bf16"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                Case("masac", "continuous", "own", False, "fp32"),
                Case("qmix-sequences", "discrete", "shared", True, "fp32"),
                Case("ippo", "pixels", "shared", False, "fp16"),
            )
        ),
    ],
    ids=str,
)
def test_a_run_with_normalised_rows_is_clean(case: Case, tmp_path: Path) -> None:
    network = {**case.network, "normalize_observations": True}
    assert not live(case, tmp_path, network=network, algorithm={"normalize_rewards": True})


@pytest.mark.parametrize(
    ("sharing", "groups"), [("groups", 2), pytest.param("own", 3, marks=pytest.mark.long)]
)
def test_happo_captures_two_graphs_of_a_group(sharing: str, groups: int, tmp_path: Path) -> None:
    """Each group has its steps and its ratio, all have their rows and returns; none is added."""
    case = Case("happo", "discrete", sharing, False, "fp32")
    with (
        pretend_cuda(ALLOWED),
        DrivenRun(case.config(), make_spec(case.space), tmp_path) as run,
    ):
        players = [run.player(3), run.player(2)]
        counts = []
        for updates in (20, 24):
            run.play_until(updates, *players)
            learner = run.run.context.learner
            assert learner is not None
            counts.append(dict(learner.algorithm.graphs.captures))
    assert sum(counts[0].values()) == 2 * groups + 2
    assert counts[0] == counts[1]
    assert counts[0]["ratio"] == groups
