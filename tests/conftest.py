"""The order of files, threads of a test process, and the result of `make test-long`.

With two workers the long files go first, so that both end together.
"""

import os
from pathlib import Path
from typing import Any

import pytest

# Each of the two test processes has one core: more threads would spin for the other one's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
# More than half a minute each, longest first.
LONG = (
    "system/test_training.py",
    "murmur/benchmarks/test_smoke.py",
    "chaos/test_contract.py",
    "learner_service/algorithms/test_contract.py",
    "murmur/test_conformance.py",
    "learner_service/algorithms/test_masac.py",
    "system/test_services.py",
    "murmur/test_your_environment.py",
    "system/test_replay_training.py",
    "learner_service/tuning/test_batch_size.py",
    "system/test_security.py",
    "system/test_league.py",
    "env_service/test_check_environment.py",
    "env_service/test_env_server.py",
    "murmur/doctor/test_profile.py",
    "learner_service/algorithms/test_mappo.py",
    "monitoring/test_live.py",
    "benchmarks/test_acceptance.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--save-result`: keep counts and seconds under benchmarks/results."""
    parser.addoption("--save-result", action="store_true", help="write benchmarks/results")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files not listed come after those that are, as they were."""
    place = {HERE / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Check LONG: a name that is no file any more would be overlooked; and the source."""
    assert all((HERE / name).is_file() for name in LONG)
    if session.config.getoption("--save-result") and not hasattr(session.config, "workerinput"):
        from murmur.results import provenance, require_clean_source

        require_clean_source(dirty=False)
        session.config.stash[_ORIGIN] = provenance("pytest")


_ORIGIN = pytest.StashKey[dict[str, Any]]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write the result that `--save-result` asks for."""
    if _ORIGIN not in config.stash:
        return
    from murmur.results import save_result

    stats = terminalreporter.stats
    kinds = ("passed", "failed", "error", "skipped")
    seconds: dict[str, float] = {}
    for report in (r for kind in kinds for r in stats.get(kind, [])):
        # A file that is skipped as a whole has no duration.
        duration = getattr(report, "duration", 0.0)
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + duration
    counts = {kind: len(stats.get(kind, [])) for kind in kinds}
    result = {**counts, "seconds": {name: {"s": round(s, 1)} for name, s in seconds.items()}}
    file = save_result("test-long", result, config.stash[_ORIGIN])
    terminalreporter.write_line(f"written: {file}")
