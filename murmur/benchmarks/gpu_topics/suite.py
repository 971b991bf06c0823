"""Topic `tests`: the tests that need a GPU, where there is a checkout and pytest."""

import re
import subprocess
import sys
from importlib.util import find_spec

from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics.figures import Figure, Value
from murmur.benchmarks.gpu_topics.topics import Context
from murmur.doctor.machine import ROOT

_PASSED, _FAILED = "tests of the GPU: passed", "tests of the GPU: failed"


def plan_tests(context: Context) -> list[Figure]:
    """Plan the outcomes of all tests marked `gpu`."""
    del context
    return [Figure(_PASSED), Figure(_FAILED, 0, expected=0)]


def tests(context: Context) -> dict[str, Value]:
    """Run them, or say why not."""
    if not (ROOT / "tests").is_dir() or find_spec("pytest") is None:
        return {_PASSED: "not run: they need a checkout and the extra dev"}
    if context.effort is Effort.SMOKE:
        return {_PASSED: "not run in smoke"}
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return outcome(done.stdout, done.stderr)


def files() -> list[str]:
    """Return files with tests marked `gpu`: others may need packages that are not installed."""
    folder = ROOT / "tests"
    found = (p for p in folder.rglob("test_*.py") if "mark.gpu" in p.read_text())
    return sorted(str(path.relative_to(ROOT)) for path in found)


def outcome(printed: str, errors: str = "") -> dict[str, Value]:
    """Return counts, and the tests that failed, from pytest's output."""
    lines = printed.strip().splitlines()
    last = lines[-1] if lines else ""
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)
    }
    if not counts:
        return {_FAILED: f"pytest did not run: {(last or errors.strip()[-300:])}"}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    named = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    values: dict[str, Value] = {_PASSED: counts.get("passed", 0), _FAILED: failed}
    if counts.get("skipped"):
        values["tests of the GPU: skipped"] = counts["skipped"]
    return values | {f"test {i + 1} that failed": name for i, name in enumerate(named)}
