"""The order of files: with two workers the long ones go first, so that both end together."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# More than half a minute each, longest first.
LONG = (
    "system/test_training.py",
    "chaos/test_contract.py",
    "learner_service/algorithms/test_contract.py",
    "murmur/test_conformance.py",
    "learner_service/algorithms/test_masac.py",
    "system/test_services.py",
    "murmur/test_your_environment.py",
    "system/test_replay_training.py",
    "learner_service/tools/test_batch_size.py",
    "system/test_security.py",
    "system/test_league.py",
    "env_service/test_check_environment.py",
    "env_service/test_env_server.py",
    "murmur/test_profile.py",
    "learner_service/algorithms/test_mappo.py",
    "monitoring/test_live.py",
    "murmur/benchmarks/test_acceptance.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files not listed come after those that are, as they were."""
    place = {HERE / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


def pytest_sessionstart() -> None:
    """A name in LONG that is no file any more would be overlooked."""
    assert all((HERE / name).is_file() for name in LONG)
