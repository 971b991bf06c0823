"""What the learner advises names options of the configured algorithm, also of a foreign one."""

import ast
import logging
import re
from pathlib import Path

import pytest

from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.tuning.warm_up import check_in_flight
from murmur.shared import config as options_of_murmur
from murmur.shared.config import PluginConfig
from tests.learner_service.networks.plugged import install
from tests.learner_service.running import experiment
from tests.learner_service.toys import CPU, vector_spec

OWN = '''"""An algorithm of another package, whose options have names of their own."""

from murmur.learner_service.learning.options import About, AlgorithmConfig


class Config(AlgorithmConfig):
    games: int = 3

    @property
    def about(self):
        return About(waiting_advice=f"raise algorithm.games={self.games}")
'''
SILENT = OWN[: OWN.index("    @property")]


def advice(caplog: pytest.LogCaptureFixture, name: str, **options: int) -> str:
    """What is advised where more environments come than two updates take."""
    config = experiment(env_server={"num_workers": 1, "envs_per_worker": 8}).model_copy(
        update={"algorithm": PluginConfig.model_validate({"name": name, **options})}
    )
    storage = RolloutStorage(vector_spec(2), 4, 2 * 4 * 2, 1, CPU, unrolls_per_update=2)
    storage.expect(8)
    with caplog.at_level(logging.WARNING):
        check_in_flight(config, storage)
    said = re.search(r"\d of 8 environments wait their turn: (.*)\. An update takes", caplog.text)
    assert said, caplog.text
    return said[1]


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("own", {"games": 5}, "raise algorithm.games=5, or raise learner.max_policy_lag"),
        ("silent", {}, "raise learner.max_policy_lag"),
        (
            "mappo",
            {"unrolls_per_update": 2},
            "set algorithm.unrolls_per_update=0, which chooses, or raise learner.max_policy_lag",
        ),
        ("coma", {}, "raise algorithm.batch_number, or raise learner.max_policy_lag"),
    ],
)
def test_waiting_environments_are_advised_on_by_the_algorithm(
    name: str,
    options: dict[str, int],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for own, source in (("own", OWN), ("silent", SILENT)):
        install(tmp_path, own, source, "algorithms")
    monkeypatch.syspath_prepend(tmp_path)
    assert advice(caplog, name, **options) == wanted


ROOMS = ("networks", "runtime", "serving", "storage", "telemetry", "training", "tools")


def test_no_other_room_names_an_option_of_an_algorithm() -> None:
    """`algorithm.name` is murmur's own, all else is for the algorithm to name."""
    root = Path(options_of_murmur.__file__).parents[2]
    files = [f for room in ROOMS for f in (root / "learner_service" / room).glob("*.py")]
    files += [*(root / "shared").rglob("*.py"), *(root / "env_service").rglob("*.py")]
    assert len(files) > 50
    named = [
        (file.name, node.value)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(r"\balgorithm\.(?!name\b)[a-z_]+", node.value)
    ]
    assert not named
