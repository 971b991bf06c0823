"""Supervised runs whose processes are killed, each with real processes."""

from pathlib import Path

import pytest

from tests.chaos.cases_supply import damaged_images, learner_dies, server_dies

pytestmark = [pytest.mark.system, pytest.mark.long]


def test_a_killed_supply_server_costs_no_sample(tmp_path: Path) -> None:
    server_dies(tmp_path)


def test_damaged_images_and_masks_of_255_are_said(tmp_path: Path) -> None:
    damaged_images(tmp_path)


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_killed_learner_repeats_what_it_had_not_saved(sync: bool, tmp_path: Path) -> None:
    learner_dies(tmp_path, sync=sync)
