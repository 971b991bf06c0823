"""`murmur render` of environments that draw themselves."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest
import yaml
from imageio_ffmpeg import count_frames_and_secs

from murmur.cli import main
from murmur.env_service.adapters.frames import with_frames
from murmur.env_service.environment import make_environment
from murmur.runs.evaluation import MOST_ROWS, Recorder, _serve_log
from murmur.runs.render import write_movie
from murmur.runs.run_folder import RunFolder
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import Array, StepType, TimeStep
from tests.chaos.cases_runs import small_disk

DARK = '''
import gymnasium

class Dark(gymnasium.Env):
    """Draws nothing."""
    metadata = {"render_modes": ["human"]}
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **options):
        pass

    def reset(self, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, True, False, {}

    def render(self):
        return None


def mute():
    return Dark()
'''


OF_MPE = ["environment.name=pettingzoo", "environment.factory=mpe2.simple_spread_v3:parallel_env"]


def configuration(folder: Path, name: str, factory: str, **arguments: Any) -> str:
    file = folder / "own.yaml"
    environment = {"name": name, "factory": factory, "arguments": arguments}
    file.write_text(yaml.safe_dump({"environment": environment, "algorithm": {"name": "mappo"}}))
    return str(file)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["murmur", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_an_environment_is_filmed_by_its_own_render(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    pytest.importorskip("mpe2")
    tag = configuration(tmp_path, "pettingzoo", "mpe2.simple_tag_v3:parallel_env", max_cycles=6)
    file = tmp_path / f"tag.{suffix}"
    where = ("--config", tag, "--out", str(file))
    assert run(monkeypatch, "render", "--baseline", "random", "--seed", "3", *where) == 0
    if suffix == "mp4":
        count, _ = count_frames_and_secs(str(file))
        assert count >= 7  # the start, six steps, and the end held
        return
    frames = [np.asarray(frame)[..., :3] for frame in imageio.mimread(file)]
    assert frames[0].shape == (700, 700, 3)  # MPE's
    assert (frames[0] != frames[-1]).any()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("Dark", r"own_dark:Dark' has no pictures: render\(\) gave None.*render modes: human"),
        ("mute", r"mute\(render_mode='rgb_array'\) raised TypeError"),
    ],
)
def test_one_that_draws_nothing_is_told_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factory: str,
    words: str,
) -> None:
    (tmp_path / "own_dark.py").write_text(DARK)
    monkeypatch.syspath_prepend(tmp_path)
    dark = configuration(tmp_path, "gymnasium", f"own_dark:{factory}")
    assert (
        run(monkeypatch, "render", "--baseline", "random", "--config", dark, "--out", "a.gif") == 2
    )
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(words, said), said


LIBRARIES = ("EGL", "GL", "GLU")  # what VMAS draws with where there is no display
VMAS = """
environment: {name: vmas, scenario: balance, arguments: {n_agents: 2}, max_episode_steps: 6}
algorithm: {name: mappo}
"""
WITHOUT_EGL = """
import pyglet
load = pyglet.lib.load_library
def without_egl(*names, **options):
    if "EGL" in names:
        raise ImportError("Library EGL not found.")
    return load(*names, **options)
pyglet.lib.load_library = without_egl
from murmur.cli import main
main()
"""


def render_vmas(folder: Path, *program: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("vmas")
    (folder / "own.yaml").write_text(VMAS)
    options = ("render", "--config", "own.yaml", "--baseline", "random", "--out", "own.gif")
    return subprocess.run(
        [sys.executable, *program, *options],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "DISPLAY"} | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.skipif(not all(map(find_library, LIBRARIES)), reason="VMAS draws with OpenGL")
def test_vmas_draws_itself_without_a_display(tmp_path: Path) -> None:
    done = render_vmas(tmp_path, "-m", "murmur")
    assert done.returncode == 0, done.stdout + done.stderr
    frames = [np.asarray(frame)[..., :3] for frame in imageio.mimread(tmp_path / "own.gif")]
    assert frames[0].shape == (700, 700, 3)  # VMAS's
    assert (frames[0] != frames[-1]).any()


@pytest.mark.long
def test_vmas_that_cannot_draw_says_what_it_lacks(tmp_path: Path) -> None:
    done = render_vmas(tmp_path, "-c", WITHOUT_EGL)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "VMAS could not draw scenario 'balance': " in said
    assert "install EGL (libegl1, libgl1, libglu1-mesa), or give it a display" in said
    assert not (tmp_path / "own.gif").exists()


def test_a_kind_of_file_is_refused_before_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "render", "--baseline", "random", "--config", "spread", "--out", "a") == 2
    )
    assert "pictures are written as .gif or .mp4" in capsys.readouterr().err


def test_drawing_keeps_the_arguments_that_are_configured() -> None:
    options = [
        *OF_MPE,
        "environment.arguments.N=2",
        "evaluation.environment={arguments: {N: 4, render_mode: human}}",
    ]
    config = with_frames(load("spread", options, {}))
    assert config.environment.options["arguments"]["render_mode"] == "rgb_array"
    assert config.environment.options["arguments"]["N"] == 2
    own = config.for_evaluation().environment.options["arguments"]
    assert own == {"N": 4, "render_mode": "human"}  # said so, so it stays


class Numbered:
    """Draws the number of its row."""

    frames_per_second = 50

    def __init__(self, name: str = "rgb_array") -> None:
        self.row, self._name = 0, name

    def render_state(self, index: int) -> dict[str, Array]:
        return {self._name: np.full((2, 2, 3), self.row % 256, np.uint8)}


def record_rows(environment: Numbered, recorder: Recorder, rows: int) -> None:
    for row in range(rows):
        kind = StepType.FIRST if row == 0 else StepType.LAST if row == rows - 1 else StepType.MID
        environment.row = row
        step = TimeStep(np.array([kind], np.uint8), np.zeros((1, 1)), np.ones(1), {}, {})
        recorder.take(environment, step)  # type: ignore[arg-type] # all that it uses


def test_states_that_are_no_frames_are_all_kept() -> None:
    """A picture draws the path through all rows of an episode; formation's has 1,000."""
    recorder = Recorder()
    record_rows(Numbered("agents"), recorder, 1000)
    assert (len(recorder.snapshots), recorder.every) == (1000, 1)


def test_long_episodes_are_thinned_to_a_bounded_number_of_frames() -> None:
    recorder, rows = Recorder("numbered"), 1000
    record_rows(Numbered(), recorder, rows)
    assert len(recorder.snapshots) <= 2 * MOST_ROWS + 1
    every = 4
    frames = [int(row.state["rgb_array"][0, 0, 0]) for row in recorder.snapshots]
    assert frames[:-1] == [row % 256 for row in range(0, rows, every)]
    assert frames[-1] == (rows - 1) % 256
    assert (recorder.every, recorder.frames_per_second) == (every, 50)


@pytest.mark.parametrize("folder", ["logs/serve.log", ""])
def test_a_run_whose_log_cannot_be_written_is_served(tmp_path: Path, folder: str) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    if folder:
        (run.path / folder).mkdir(parents=True)
    else:
        run.logs.write_text("no folder")
    assert _serve_log(run, tmp_path) == tmp_path / "serve.log"


def test_a_frame_comes_only_where_it_was_asked_for() -> None:
    pytest.importorskip("mpe2")
    environment = make_environment(load("spread", OF_MPE, {}).environment, 1)
    environment.reset(np.zeros(1, np.uint64))
    with pytest.raises(NotImplementedError, match="cannot be rendered"):
        environment.render_state(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the writer
def test_a_movie_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder) as disk:
        if disk is None:
            pytest.skip("no right to mount")
        files = [disk / "episode.gif", disk / "episode.mp4"]
        for file in files:
            file.write_text("good")
        with (disk / "rest").open("wb", buffering=0) as rest, suppress(OSError):
            while True:
                rest.write(bytes(1 << 12))
        noise = np.random.default_rng(1).integers(0, 256, (4, 64, 64, 3), np.uint8)
        for file in files:
            with pytest.raises(ConfigError, match=f"cannot write '{file}': No space left"):
                write_movie(file, list(noise))
            assert file.read_text() == "good"
