"""What a process of murmur leaves of its surroundings: standard output, variables of others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from murmur.runs.child import Child, child_environment
from murmur.shared.process.errors import ResourceError

TALKS = """
import os, gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

class Talks(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,), np.float32), Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        print("simulator: new game")
        os.write(1, b"simulator: from C\\n")
        os.system("echo simulator: from a process")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t >= 7, False, {}

    def close(self):
        print("simulator: closed")
"""


def murmur(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "murmur", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.getcwd()} | variables,
        timeout=120,
        check=False,
    )


def test_what_an_environment_prints_is_no_part_of_the_json(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    (tmp_path / "talks.yaml").write_text(
        'environment: {name: gymnasium, factory: "talks:Talks"}\nalgorithm: {name: ppo}\n'
    )
    play = ("evaluate", "--baseline", "random", "--config", "talks.yaml", "--episodes", "2")
    done = murmur(tmp_path, *play, "--json", "-")
    assert json.loads(done.stdout)["episodes"] == 2, done.stderr
    for words in ("new game", "from C", "from a process", "closed"):
        assert f"simulator: {words}" in done.stderr
    # Without it the prints stay where they were.
    assert "simulator: closed" in murmur(tmp_path, *play).stdout


@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_metrics_go_to_no_other_program_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    assert variable not in child_environment()
    play = ("evaluate", "--baseline", "random", "--config", "spread", "--episodes", "2")
    done = murmur(tmp_path, *play)
    assert done.returncode == 0, done.stderr


def test_a_deleted_working_directory_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = f"rmdir {folder}; exec {sys.executable} -m murmur config spread"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    command = ["sh", "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the working directory was deleted" in done.stderr


def test_a_process_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("")
    child = Child("learner", lambda _: [str(python)], tmp_path / "log")
    with pytest.raises(ResourceError, match=f"cannot start learner: {python}: Permission denied"):
        child.start()
