"""The command line: what it prints, and that a user's mistake is one line and exit code 2."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from murmur.cli import main
from murmur.doctor.machine import ROOT
from murmur.runs.run_folder import RunFolder
from murmur.runs.settings import explain, list_everything
from murmur.runs.training import run_to_resume
from murmur.shared.config.extras import install_command
from murmur.shared.config.files import load, save

NO_TORCH = "import sys; sys.modules['torch'] = None; sys.modules['kornia'] = None; "


def murmur(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["murmur", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )


def test_config_lists_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = murmur(monkeypatch, capsys, "config")
    assert code == 0
    for word in ("terrain-demo", "terrain-reference", "spread: random", "coma", "cnn", "baselines"):
        assert word in out


def test_config_shows_every_default_and_can_be_loaded_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = murmur(
        monkeypatch, capsys, "config", "terrain-demo", "--set", "environment.budget=7"
    )
    assert code == 0
    data = yaml.safe_load(out)
    assert data["environment"]["budget"] == 7
    assert data["environment"]["spacing_m"] == 5.0  # the plug-in's own default
    assert data["learner"]["max_sessions"] == 64
    (tmp_path / "again.yaml").write_text(out)
    _, again, _ = murmur(monkeypatch, capsys, "config", str(tmp_path / "again.yaml"))
    assert yaml.safe_load(again) == data


@pytest.mark.parametrize("name", ["spread", "snakes"])
@pytest.mark.parametrize("option", ["network.hidden=[64,64]", "network.recurrent=64"])
def test_options_of_a_network_need_its_name_and_the_page_says_so(
    name: str,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = murmur(monkeypatch, capsys, "config", name, "--set", option)
    assert code == 2
    assert "'network.name' is missing: it is auto here" in err
    fix = "network.name=mlp"
    assert f"--set {fix}" in err
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert any(option in line and fix in line for line in page.splitlines())
    main_code, out, _ = murmur(monkeypatch, capsys, "config", name, "--set", fix, "--set", option)
    assert main_code == 0
    key, _, value = option.removeprefix("network.").partition("=")
    assert yaml.safe_load(out)["network"][key] == yaml.safe_load(value)


def test_config_explains_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = murmur(monkeypatch, capsys, "config", "spread", "--explain")
    assert code == 0
    assert "learner.max_policy_lag" in out
    assert "environment.local_ratio" in out


@pytest.mark.parametrize("terminal", [False, True])
def test_an_explained_key_is_whole_at_80_columns(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    monkeypatch.setattr(sys, "argv", ["murmur", "config", "terrain-demo", "--explain"])
    with pytest.raises(SystemExit):
        main()
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    text = "\n".join(lines)
    for key, _, _, meaning in explain(load("terrain-demo", [], {})):
        (line,) = (line for line in lines if line.startswith(f"{key} "))
        assert terminal or line.endswith(f"  {meaning}")
        assert " ".join(meaning.split()) in " ".join(text.split())
    assert not terminal or max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config", "terrain-dem"], ["terrain-dem", "did you mean 'terrain-demo'?"]),
        (["config", "spread", "--set", "learner.prot=1"], ["learner.prot", "did you mean 'port'?"]),
        (["config", "spread", "--set", "learner.port=high"], ["learner.port", "high"]),
        (["config", "spread", "--set", "nonsense"], ["section.key=value"]),
        (["config", "spread", "--set", "environment.num_agnets=2"], ["did you mean 'num_agents'?"]),
        (["config", "spread", "--set", "environment.name=spraed"], ["did you mean 'spread'?"]),
        (
            ["config", "spread", "--set", "evaluation.environment.num_agnets=2"],
            ["evaluation.environment.num_agnets", "did you mean 'num_agents'?"],
        ),
        (["train"], ["which configuration"]),
        (["train", "spread", "--set", "algorithm.name=cama"], ["did you mean 'coma'?"]),
        (["train", "--resume"], ["no run under 'runs'"]),
        (
            ["train", "faces", "--learners", "2", "--workers", "1"],
            ["leaves a learner without a session", "set env_server.num_workers=2"],
        ),
        (["learner", "spread", "--run", "r", "--serve", "--learners", "2"], ["takes one learner"]),
        (["report", "nowhere"], ["run folder 'nowhere' does not exist"]),
        (["evaluate", "."], ["holds no run"]),
        (["render", "nowhere"], ["does not exist"]),
        (["evaluate", "--baseline", "radnom", "--config", "spread"], ["did you mean 'random'?"]),
        (["bench", "nothing-of-this-name"], ["no benchmark"]),
        (["check-env", "no_such_module:make"], ["no_such_module"]),
        (["csv", "runs/one", "--out", "x"], ["`murmur csv` was removed", "metrics().to_csv("]),
        (["sweep", "spread", "--trials", "3"], ["removed: let Optuna call murmur.train"]),
        (["slurm", "spread", "--sbatch", "--time=9", "--gpus", "9"], ["--gpus-per-node 8"]),
        (["slurm", "spread", "--time", "9"], ["slurm --time` was removed", "--sbatch=--time="]),
        (["config", "spread", "--set", "run=5"], ["'run' = 5: it is a section with keys: name,"]),
        (["config", "spread", "--set", "environment=spread"], ["a section with keys: name"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = murmur(monkeypatch, capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not list(tmp_path.iterdir())  # a mistake leaves nothing behind


def test_resume_takes_the_run_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trial.yaml").write_text(
        "environment: {name: spread}\nrun: {name: first, directory: elsewhere}\n"
    )
    stamp = "20260101-120000"
    for path in (f"elsewhere/first-{stamp}", f"runs/trial-{stamp}", f"runs/trial-2-{stamp}"):
        config = load("spread", [], {})
        save(config, RunFolder.create(config, Path(path)).path / "config.yaml")
        Path(path, "checkpoints").mkdir()
        Path(path, "checkpoints", "update-000001.pt").touch()
    Path("runs/bare-1").mkdir()

    def chosen(config: str | None, *overrides: str, run: str | None = None) -> str:
        return str(run_to_resume(config, Path(run) if run else None, list(overrides)).path)

    assert chosen(None).startswith("runs/trial-")
    assert chosen("trial.yaml") == f"elsewhere/first-{stamp}"
    assert chosen("trial.yaml", "run.name=trial", "run.directory=runs") == f"runs/trial-{stamp}"
    assert chosen(f"runs/trial-{stamp}") == f"runs/trial-{stamp}"
    assert chosen("trial.yaml", run=f"runs/trial-2-{stamp}") == f"runs/trial-2-{stamp}"
    Path("spread").mkdir()  # is no run
    for name, words in (("runs/bare-1", "holds no run"), ("spread", "no run of 'spread'")):
        code, _, err = murmur(monkeypatch, capsys, "train", "--resume", name)
        assert code == 2
        assert words in err


def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(
            [
                *(sys.executable, "-m", "murmur", "learner", "spread", "--run", str(tmp_path)),
                *("--set", f"learner.port={port}", "--set", "learner.metrics_port=0"),
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=False,
        )
    assert result.returncode == 2
    assert str(port) in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_the_environment_side_needs_no_torch() -> None:
    code = NO_TORCH + "import murmur.env_service.app; from murmur.cli import main; main()"
    result = python(code, "env-server", "--help")
    assert result.returncode == 0, result.stderr
    assert "Needs no torch" in " ".join(result.stdout.split())


def test_config_lists_the_learners_plug_ins_without_torch() -> None:
    result = python(NO_TORCH + "from murmur.cli import main; main()", "config")
    assert result.returncode == 0, result.stderr
    for line in ("COMA: counterfactual multi-agent", "A multilayer perceptron over vector"):
        assert line in result.stdout


def test_a_missing_extra_is_named() -> None:
    result = python(
        NO_TORCH + "from murmur.cli import main; main()", "learner", "spread", "--run", os.devnull
    )
    assert result.returncode == 2
    assert "this needs 'torch', which is not installed" in result.stderr
    assert install_command("learner") in result.stderr
    assert "Traceback" not in result.stderr


def test_check_env(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = murmur(monkeypatch, capsys, "check-env", "spread", "--set", "num_agents=2")
    assert code == 0
    assert "keeps the contract" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("meet", "in meet.py as meet:Meet"),
        ("meet.py", "in meet.py as meet:Meet"),
        ("./meet.py", "in meet.py as meet:Meet"),
        ("meet.Meet", "in meet.py as meet:Meet"),
        ("plain", "in plain/__init__.py as plain:CLASS"),
        ("meet.yaml", "is a configuration; write its environment, meet:Meet, and its options"),
        ("mete", "no environment 'mete'; known: "),
    ],
)
def test_check_env_of_a_module_without_a_class(
    name: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meet.py").write_text("class Meet:\n    def step(self): ...\nclass Other: ...\n")
    (tmp_path / "meet.yaml").write_text("environment: {name: pettingzoo, factory: 'meet:Meet'}")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "__init__.py").touch()
    code, _, err = murmur(monkeypatch, capsys, "check-env", name)
    assert code == 2
    assert words in err


def test_every_baseline_is_described_by_itself() -> None:
    described = list_everything()["baselines"]
    by_environment: dict[str, list[str]] = {}
    for name, sentence in described.items():
        assert sentence, name
        by_environment.setdefault(name.partition(":")[0], []).append(sentence)
    for sentences in by_environment.values():
        assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(3600)", r"a step took longer than \d+ s, .* with seed 11 at step 1: it hangs"),
        ("os._exit(3)", "the process ended with code 3 in the episode with seed 11 at step 1: "),
        ("sys.exit(3)", "raised SystemExit: 3, in the episode with seed 11 .* at step 1"),
        ("os.abort()", "the process was killed by SIGABRT in the episode with seed 11 at step 1: "),
    ],
)
def test_check_env_of_a_step_that_never_returns(
    body: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    lines = [
        "import os, sys, time, gymnasium",
        "class Never(gymnasium.Env):",
        "    observation_space = action_space = gymnasium.spaces.Discrete(2)",
        "    def reset(self, seed=None, options=None):",
        "        return 0, {}",
        "    def step(self, action):",
        f"        {body}",
    ]
    (tmp_path / "never.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    code, out, err = murmur(monkeypatch, capsys, "check-env", "never:Never", "--step-limit", "1")
    assert (code, err) == (1, "")
    said = out.splitlines()
    assert said[0] == "checking 'never:Never' ..."
    assert len(said) == 2
    assert re.search(words, said[1])


def test_check_env_of_an_exception_in_no_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [
        "from murmur.env_service.environment import VectorEnvironment",
        "from murmur.env_service.envs.spread import Config, Spread",
        "class Bare(VectorEnvironment):",
        "    def __init__(self, num_envs):",
        "        self.spec, self.num_envs = Spread(Config(), 1).spec, num_envs",
        "    def step(self, action, restart, seeds): ...",
        "    def watch(self, at): self.lost",
    ]
    (tmp_path / "bare.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    code, out, _ = murmur(monkeypatch, capsys, "check-env", "bare:Bare")
    assert code == 1
    assert "raised AttributeError: 'Bare' object has no attribute 'lost', while it was" in out


def test_check_env_looks_again_with_other_hashes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [
        "from tests.env_service.test_notices import Rounds",
        "class Set(Rounds):",
        "    def __init__(self):",
        "        super().__init__('paid')",
        "        self.possible_agents = list({'a_0', 'a_1'})",
    ]
    (tmp_path / "of_set.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    code, out, err = murmur(monkeypatch, capsys, "check-env", "of_set:Set")
    assert (code, err) == (1, "")
    assert re.search(r"✗ the agents are (a_\d), (a_\d) here and \2, \1 in another process", out)
    assert "! agent 'a_0' was given 10.0 as reward at step 5" in out


def test_evaluate_a_baseline_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    arguments = ["--baseline", "random", "--config", "spread", "--episodes", "3"]
    arguments += ["--set", "evaluation.environment.episode_steps=7"]
    code, out, _ = murmur(monkeypatch, capsys, "evaluate", *arguments, "--json", str(file))
    assert code == 0
    assert "return" in out
    assert "95 %" in out
    record = json.loads(file.read_text())
    assert record["episodes"] == 3
    assert len(record["metrics"]["return"]) == 3
    assert len(record["mean_curves"]["return"]) == 8  # rows of seven steps


def test_evaluate_measures_one_policy_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--baseline", "random", "--learner", "127.0.0.1:1", "--config", "spread"]
    code, out, err = murmur(monkeypatch, capsys, "evaluate", *arguments)
    assert (code, out) == (2, "")
    assert "--baseline and --learner: give one of them" in err


def test_evaluate_says_at_once_which_learner_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound, so that no process listens there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--learner", address, "--config", "spread", "--episodes", "1"]
        arguments += ["--set", "env_server.give_up_after_s=0.001"]
        code, out, err = murmur(monkeypatch, capsys, "evaluate", *arguments)
    assert code == 2
    assert out.splitlines() == [
        "environment: spread, of configuration spread",
        f"waiting for the learner at {address}, at most 0:00 …",
    ]
    assert f"no learner at {address}" in err


def test_check_reports_and_exits_by_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = murmur(monkeypatch, capsys, "check", "--quick", "--json")
    data = json.loads(out)
    topics = {f["topic"]: f for f in data["findings"]}
    assert topics["packages: core"]["status"] != "fail"
    assert data["networks"] == []
    assert "GPU in torch" in topics
    assert code == 0
    if topics["GPU in torch"]["status"] != "ok":
        code, _, _ = murmur(monkeypatch, capsys, "check", "--quick", "--gpu")
        assert code == 1


def test_check_times_the_networks_of_configurations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = murmur(monkeypatch, capsys, "check", "--quick", "--json", "--config", "spread")
    assert code == 0
    timed = json.loads(out)["networks"]
    assert {(of["config"], of["precision"]) for of in timed} >= {
        ("spread", "fp32"),
        ("spread", "bf16"),
    }
    code, _, err = murmur(monkeypatch, capsys, "check", "--quick", "--config", "faces")
    assert code == 2
    assert "--config faces: it has no environment" in err


def test_a_run_is_fine_tuned_or_resumed_but_not_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start = ["--from", str(tmp_path)], ["--set", f"run.start_from={tmp_path}"]
    for arguments in start:
        code, _, error = murmur(monkeypatch, capsys, "train", "--resume", *arguments)
        assert code == 2
        assert "run.start_from (--from) starts a new run, resuming continues one" in error
