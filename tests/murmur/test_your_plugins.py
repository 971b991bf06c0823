"""Plug-ins of your own: what `murmur new` writes, and the tutorials, done as they say."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from murmur import testing
from murmur.doctor.machine import ROOT
from murmur.kit.new import write_skeleton
from murmur.runs.settings import resolved_data
from murmur.shared.config.files import load
from murmur.shared.config.plugin_folders import look_in
from murmur.shared.process.errors import ConfigError
from tests.murmur.test_cli import murmur

PAGES = {
    "algorithm": ("your-algorithm.md", "reinforce"),
    "network": ("your-network.md", "attention"),
    "environment": ("vectorised-environment.md", "crossing"),
}
CHECKS: dict[Any, Any] = {
    "algorithm": testing.assert_algorithm,
    "network": testing.assert_network,
    "environment": testing.assert_environment,
    "source": testing.assert_source,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which modules are found, and forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    look_in()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def blocks(page: str, language: str) -> list[str]:
    """A page's blocks of one language; "" are commands and what they print."""
    parts = (ROOT / "docs" / page).read_text().split("```")
    return [p.partition("\n")[2] for p in parts[1::2] if p.partition("\n")[0] == language]


@pytest.mark.parametrize("kind", CHECKS)
def test_a_new_plugin_keeps_its_contract(kind: Any, here: Path) -> None:
    files, named = write_skeleton(kind, "my-own_Thing", here)
    assert named == "my_own_thing:MyOwnThing"
    assert [f.name for f in files] == [
        *("my_own_thing.py", "test_my_own_thing.py", "my_own_thing.yaml"),
    ]
    config = load("my_own_thing.yaml", [], {})
    assert resolved_data(config)[kind]["name"] == named
    assert f'assert_{kind}("{named}")' in files[1].read_text()
    CHECKS[kind](named)
    assert "skeleton" not in "".join(f.read_text() for f in files).lower()


@pytest.mark.parametrize("kind", PAGES)
def test_a_tutorial_shows_what_new_writes(kind: Any, here: Path) -> None:
    page, name = PAGES[kind]
    files, _ = write_skeleton(kind, name, here)
    assert files[0].read_text() == blocks(page, "python")[0]
    assert len(files[0].read_text().splitlines()) <= 80


def test_the_intrinsic_reward_of_the_tutorial_keeps_its_contract(here: Path) -> None:
    _, code = blocks("your-algorithm.md", "python")
    (here / "rnd.py").write_text(code)
    testing.assert_algorithm("rnd:Rnd")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("taken", r"taken\.py exists already"),
        ("json", r"module 'json' \(/.*\) would hide yours"),
        ("murmur", r"module 'murmur' \(/.*\) would hide yours"),
        ("3d", "cannot name a Python module"),
        ("class", "cannot name a Python module"),
        ("../up", "cannot name a Python module"),
        ("", "cannot name a Python module"),
    ],
)
def test_new_refuses_a_name_that_cannot_be(name: str, words: str, here: Path) -> None:
    (here / "taken.py").write_text("mine")
    with pytest.raises(ConfigError, match=words):
        write_skeleton("network", name, here)
    assert [f.name for f in here.iterdir()] == ["taken.py"]
    assert (here / "taken.py").read_text() == "mine"


def test_the_command_says_what_to_do_next(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = murmur(monkeypatch, capsys, "new", "network", "mine")
    assert code == 0
    assert "written: mine.py" in out
    assert "pytest test_mine.py" in out
    assert "murmur train mine.yaml" in out
    assert murmur(monkeypatch, capsys, "new", "network", "mine")[0] == 2


SPOILED = {
    "algorithm": [
        ("self.keep(optimizer=self.optimizer)", "pass", "with its saved state another one learns"),
        ('"loss": loss.detach()', '"loss": loss.detach() / 0', "update returns loss = "),
        ("norm = self.step(", "norm = (lambda *_: loss.detach())(", "updates change nothing of"),
    ],
    "network": [
        ("own = self.encode(vector)", "own = self.encode(vector - vector.mean(0))", "depend on"),
        ("score.softmax(-1) @ value", "value.detach()", "no gradient reaches attend.weight"),
        ("self.decide = ", "self.lost = nn.Linear(2, 2)\n        self.decide = ", "reaches lost"),
        ('    """An enc', '    STACKED = True\n    """An enc', "it says STACKED"),
    ],
    "environment": [
        ("uniform(seeds[restart], 2)", "np.random.rand(2, restart.sum())", "another episode"),
    ],
    "source": [
        ('default_rng([split == "valid", index])', "default_rng()", "is another when read again"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, i) for kind, cases in SPOILED.items() for i in range(len(cases))]
)
def test_a_broken_plugin_fails_its_test_with_a_message(kind: Any, number: int, here: Path) -> None:
    right, wrong, words = SPOILED[kind][number]
    (file, *_), named = write_skeleton(kind, f"spoiled{number}", here)
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    look_in()
    with pytest.raises((AssertionError, ConfigError), match=words):
        CHECKS[kind](named)


def test_a_critic_is_added_as_the_tutorial_says(here: Path) -> None:
    (file, *_), named = write_skeleton("algorithm", "critical", here)
    (block,) = [b for b in blocks("your-algorithm.md", "") if "self.critic = " in b]
    built, used = (indent(part, 8 * " ") for part in block.split("...\n"))
    built += """\
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), config.lr)
        self.keep(critic=self.critic, critic_optimizer=self.critic_optimizer)
"""
    used += """\
        critic_loss = (weight * (value[:-1] - returns).square()).sum()
        self.step(critic_loss, self.critic_optimizer, c.max_grad_norm)
        returns = returns - value[:-1].detach()
"""
    source = file.read_text()
    for before, added in (("    def update(", built), ("        # 2. Advantages", used)):
        assert source.count(before) == 1
        source = source.replace(before, added + before)
    imports = """
from murmur.learner_service.layers.building import build_network, input_options
from murmur.learner_service.layers.inputs import CriticInputs
"""
    source = source.replace("\nimport torch\n", f"\nimport torch\n{imports}", 1)
    file.write_text(source)
    look_in()
    testing.assert_algorithm(named)
    # The critic learns: from what was saved without its optimiser another one learns otherwise.
    file.write_text(source.replace(", critic_optimizer=self.critic_optimizer", ""))
    file.rename(here / "forgetful.py")
    look_in()
    with pytest.raises(AssertionError, match="with its saved state another one learns"):
        testing.assert_algorithm("forgetful:Critical")


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One command of a page, as a user types it; runs and evaluations are short."""
    settings = {
        "MURMUR__RUN__MAX_UPDATES": "6",
        "MURMUR__EVALUATION__EPISODES": "4",
        "MURMUR__LEARNER__PORT": "0",
        "MURMUR__LEARNER__METRICS_PORT": "0",
        "MURMUR__ENV_SERVER__METRICS_PORT": "0",
        "MURMUR__ENV_SERVER__NUM_WORKERS": "1",
        "COLUMNS": "300",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    program, *arguments = shlex.split(command, comments=True)
    assert program in ("murmur", "pytest")
    return subprocess.run(
        [sys.executable, "-P", "-m", program, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | settings | variables,
        timeout=240,
        check=False,
    )


def commands(page: str) -> list[str]:
    """The page's commands but for those of other pages."""
    lines = [line.strip() for block in blocks(page, "") for line in block.splitlines()]
    found = [line for line in lines if re.match("(murmur|pytest) ", line)]
    return [line for line in found if "--config spread" not in line]


@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(900)  # ten commands, each its own process
@pytest.mark.parametrize("kind", PAGES)
def test_every_command_of_a_tutorial_works(kind: str, tmp_path: Path) -> None:
    page, name = PAGES[kind]
    todo = commands(page)
    assert todo[0] == f"murmur new {kind} {name}"
    for command in todo:
        more = {"MURMUR__RUN__MAX_UPDATES": "9"} if "--resume" in command else {}
        done = run(command, tmp_path, **more)
        assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for command in (
        f"murmur train --resume --run {folder} --set run.max_updates=12",
        f"murmur evaluate {folder} --episodes 2 --json result.json",
        f"murmur export {folder}",
        f"murmur report {folder} --episodes 2",
    ):
        done = run(command, elsewhere, MURMUR__RUN__MAX_UPDATES="12")
        assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
    assert (elsewhere / "result.json").exists()
    assert f"{name}:" in (folder / "config.yaml").read_text()
    # Moved, it is missing, and where it was looked for is said.
    (tmp_path / f"{name}.py").rename(elsewhere / f"{name}_moved.py")
    lost = run(f"murmur evaluate {folder}", elsewhere)
    assert lost.returncode == 2
    assert f"no package '{name}'" in lost.stderr
    assert str(tmp_path) in lost.stderr


@pytest.mark.system
@pytest.mark.long
def test_plugins_of_all_kinds_work_in_one_run(tmp_path: Path) -> None:
    names = {kind: write_skeleton(kind, name, tmp_path)[1] for kind, (_, name) in PAGES.items()}
    network = tmp_path / "attention.py"
    width = "        width: int"
    network.write_text(network.read_text().replace(width, f"        recurrent: int = 0\n{width}"))
    (tmp_path / "mine.yaml").write_text(
        f"""# mine.yaml: nothing of it is murmur's.
environment: {{name: "{names["environment"]}"}}
algorithm: {{name: "{names["algorithm"]}", batch_rows: 256}}
network: {{name: "{names["network"]}", recurrent: 8}}
"""
    )
    for command in (
        "murmur train mine.yaml",
        "murmur train --resume --set run.max_updates=9",
        "murmur evaluate --json result.json",
        "murmur export",
    ):
        more = {"MURMUR__RUN__MAX_UPDATES": "9"} if "--resume" in command else {}
        done = run(command, tmp_path, **more)
        assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    lines = (folder / "progress.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["updates"] == 9
    assert "crossed" in (tmp_path / "result.json").read_text()
    assert "next_memory" in done.stdout  # the exported policy is recurrent


@pytest.mark.system
@pytest.mark.long
def test_plugins_changed_before_a_resume_are_named_once(tmp_path: Path) -> None:
    names = {
        kind: write_skeleton(kind, PAGES[kind][1], tmp_path)[1]
        for kind in ("environment", "network")
    }
    settings = " ".join(f"--set {kind}.name={name}" for kind, name in names.items())
    first = run(f"murmur train spread {settings} --run run", tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    resume = "murmur train --resume --run run --set run.max_updates="
    for updates, changed in ((8, []), (10, [*names]), (12, [])):
        for kind in changed:
            file = tmp_path / f"{PAGES[kind][1]}.py"
            file.write_text(file.read_text() + "\n# Another task from here on.\n")
        done = run(f"{resume}{updates}", tmp_path)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == 0, said
        assert said.count("has changed since the checkpoint was written") == len(changed), said
        for kind in changed:
            assert f"plug-in {tmp_path / PAGES[kind][1]}.py has changed" in said, said


SHORT = [("environment", "import")]  # the others are long
FAILING = {
    "import": ("raise OSError('no licence')\n", "raised OSError: no licence", "own.py:1"),
    "missing": ("", "'own' has no 'Own'", ""),
    "signature": ("def Own(): ...\n", "it is called with", ""),
    "raises": ("def Own(*given):\n    raise KeyError('lost')\n", "KeyError: 'lost'", "own.py:2"),
    "other": ("def Own(*given):\n    return 3\n", "own:Own' gave", ""),
}


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, fault, marks=() if (kind, fault) in SHORT else pytest.mark.long)
        for kind in ("environment", "network", "algorithm")
        for fault in FAILING
    ],
)
def test_a_failing_plugin_ends_the_run_at_once(kind: str, fault: str, tmp_path: Path) -> None:
    source, *words = FAILING[fault]
    (tmp_path / "own.py").write_text(source)
    began = time.monotonic()
    done = run(f"murmur train spread --set {kind}.name=own:Own --run run", tmp_path)
    said = done.stdout + done.stderr
    last = " ".join(said.split("error:")[-1].split())
    assert done.returncode == 2, said
    assert f"{kind} 'own:Own'" in last
    for word in words:
        assert word in last
    assert "starting it again" not in said
    assert time.monotonic() - began < 120
