"""Benchmarks are listed without what they need, named if they cannot run, and saved with care."""

import ast
import io
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from murmur import bench, results
from murmur.bench import Topic, find_topic, topics
from murmur.benchmarks.effort import Effort
from murmur.shared.process.errors import ConfigError
from murmur.text import number

# What the documented installation, `pip install -e '.[env,learner,report]'`, does not bring.
_DEV = ("pytest", "hypothesis", "onnx")
_OTHERS = ("gymnasium", "pettingzoo", "mpe2", "lbforaging", "vmas", "cv2", *_DEV)
_WITHOUT = """\
import sys, importlib.util
class Without:
    names = {others}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *p: None if name in {others} else real(name, *p)
"""


def without(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python in which the modules of the other extras cannot be imported."""
    program = _WITHOUT.format(others=_OTHERS) + code
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def test_only_what_can_be_run_is_a_benchmark() -> None:
    found = topics()
    assert {"transport", "training_rate", "coma_update", "terrain", "faults"} <= set(found)
    assert "learning" not in found  # a command of its own, with its own arguments
    assert all(topic.description for topic in found.values())


def test_the_list_needs_no_benchmark() -> None:
    """With the documented installation alone every topic is listed, and says what it needs."""
    code = 'sys.argv = ["murmur", "bench"]\nfrom murmur.cli import main\nmain()'
    run = without(code)
    assert run.returncode == 0, run.stderr
    words = " ".join(run.stdout.split())
    for name in topics():
        assert name in words
    assert "it needs vmas" in re.sub(r"\s+", " ", words)


def test_a_benchmark_says_what_it_needs_before_it_starts() -> None:
    code = 'sys.argv = ["murmur", "bench", "{}"]\nfrom murmur.cli import main\nmain()'
    run = without(code.format("adapters"))
    words = " ".join(run.stderr.split())
    assert run.returncode == 2, run.stderr
    assert "'adapters' cannot run: it needs gymnasium, pettingzoo, mpe2: " in words
    assert "[zoo]" in words


def test_what_a_benchmark_imports_is_what_it_says() -> None:
    """Topics that name no other extra can be imported without any; no topic needs a test tool."""
    found = sorted(topics().values(), key=lambda topic: bool(topic.needs))
    code = [f"import {t.module}" for t in found]
    code.insert(sum(not t.needs for t in found), f"Without.names = {_DEV}")
    code.append("from tests.chaos.cases import all_cases; assert all_cases()")
    run = without("\n".join(code))
    assert run.returncode == 0, run.stderr


def test_what_a_benchmark_names_when_it_runs_is_what_it_says() -> None:
    """Imports inside functions, and factories in configurations, are of what NEEDS says."""
    foreign = re.compile(r"(gymnasium|pettingzoo|mpe2|lbforaging|vmas)[.:]")
    for topic in topics().values():
        file = bench.ROOT / (topic.module.replace(".", "/") + ".py")
        named = set()
        for node in ast.walk(ast.parse(file.read_text())):
            texts: list[str] = []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts = [node.value]
            elif isinstance(node, ast.ImportFrom):
                texts = [f"{node.module}."]
            elif isinstance(node, ast.Import):
                texts = [f"{alias.name}." for alias in node.names]
            named |= {found[1] for text in texts if (found := foreign.match(text))}
        assert named <= set(topic.needs), topic.name


def test_faults_need_a_checkout_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench._PACKAGES, "tests.chaos", tmp_path / "chaos")
    assert {"faults", "kills"} <= set(topics())
    with pytest.raises(
        ConfigError,
        match="'faults' cannot run: it needs murmur installed from a checkout, with pip",
    ):
        find_topic("faults")


def test_faults_are_murmurs_own_beside_other_tests(tmp_path: Path) -> None:
    """A user's folder `tests` in the working directory is not mistaken for murmur's."""
    other = tmp_path / "tests" / "chaos"
    other.mkdir(parents=True)
    for file in (tmp_path / "tests" / "__init__.py", other / "__init__.py"):
        file.touch()
    (other / "faults.py").write_text("raise SystemExit('the wrong tests')\n")
    code = "from murmur.bench import _import, topics\nprint(_import(topics()['faults']).__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert not Path(run.stdout.strip()).is_relative_to(tmp_path)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source that differs from its commit, whatever it does here."""
    monkeypatch.setattr(results, "changed_files", lambda: ["shared/wire/codec.py"])


@pytest.mark.usefixtures("changed")
def test_changed_source_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(topic: Topic) -> None:
        measured.append(topic)

    monkeypatch.setattr(bench, "_import", measure)
    with pytest.raises(ConfigError, match=r"1 files differ .*\(shared/wire/codec\.py\).*--dirty"):
        bench.run_benchmark("replay", Effort.SMOKE, Console(), save=True, folder=tmp_path)
    assert not measured
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "module",
    [
        "benchmarks.learning spread",
        "benchmarks.segmentation_learning faces",
        "benchmarks.acceptance A1",
        "benchmarks.soak",
        "benchmarks.snakes_matches . --topic x",
        "tests.fuzz --save",
    ],
)
@pytest.mark.usefixtures("changed")
def test_commands_that_save_refuse_changed_source(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = module.split()
    name = {"benchmarks.acceptance": f"{name}.run", "tests.fuzz": f"{name}.__main__"}.get(
        name, name
    )
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(ConfigError, match="--dirty"):
        import_module(name).main()


def test_a_saved_result_says_where_it_comes_from(tmp_path: Path) -> None:
    origin = results.provenance()
    file = results.save_result("toy", {"rate": 1.5}, origin, folder=tmp_path)
    saved = json.loads(file.read_text())
    assert saved["result"] == {"rate": 1.5}
    assert {"date", "machine", "commit", "command", "versions"} <= saved.keys()


def test_a_saved_result_is_readable() -> None:
    page = results._readable(
        {
            "benchmark": "toy",
            "command": "murmur bench toy --save",
            "date": "2030-01-02T03:04:05+00:00",
            "commit": "abc",
            "machine": {"cores": 2, "cpu": "CPU", "gpu": None},
            "result": {"rate": 12.5, "by size": {"small": {"ms": 1.0}, "large": {"ms": 2.0}}},
        }
    )
    assert page.startswith("# toy\n")
    assert "`murmur bench toy --save`, 2030-01-02, commit abc, 2 cores (CPU), GPU: none." in page
    for part in ("rate", "12.5", "small", "large"):
        assert part in page


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_wide_result_shows_every_figure_in_lines_that_fit(width: int) -> None:
    """Three cases with long names and nine figures: neither way round fits into 80 characters."""
    cases = [f"IPPO, shared trunk, {n} environments a message, 2 sessions" for n in (1, 2, 3)]
    metrics = [f"metric_with_a_long_name_{i}" for i in range(9)]
    result = {case: {m: 1000.0 * (9 * j + i) for i, m in enumerate(metrics)}
              for j, case in enumerate(cases)}  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    for table in results.result_tables(result, width=width):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    words = shown.split()
    for i, metric in enumerate(metrics):
        assert metric in words
        assert all(number(1000.0 * (9 * j + i)) in words for j in range(3))
    assert words.count("environments") >= 3
