"""Short options, and the sentence that answers each near miss and unknown name."""

import json
from pathlib import Path

import pytest
import yaml

from murmur.cli.options import SHORT
from murmur.runs.settings import json_schema, list_everything, with_options
from murmur.shared.config.section import known_names, nearest
from murmur.shared.process.errors import ConfigError
from tests.murmur.test_cli import murmur

GYMNASIUM = (
    "environment: {name: gymnasium, factory: 'gymnasium:make', arguments: {id: CartPole-v9}}"
)


def test_short_options_are_keys_and_refuse_the_same_key_twice() -> None:
    given = {
        "run.seed": 3,
        "run.max_minutes": 5.0,
        "learner.device": "cpu",
        "run.max_updates": None,
    }
    assert with_options(["algorithm.name=qmix"], given, SHORT) == [
        "algorithm.name=qmix",
        "run.seed=3",
        "run.max_minutes=5.0",
        'learner.device="cpu"',
    ]
    with pytest.raises(ConfigError, match=r"--seed 3 and --set run\.seed=4 .*give one"):
        with_options(["run.seed=4"], {"run.seed": 3}, SHORT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "spread", "--max-minutes", "5"], ["no option --max-minutes", "mean --minutes?"]),
        (["train", "spread", "--max-env-steps=5"], ["did you mean --steps?"]),
        (["train", "spread", "--num-workers", "2"], ["did you mean --workers?"]),
        (["train", "spread", "--gpu"], ["did you mean --device?"]),
        (["train", "spread", "--lr", "1"], ["--set algorithm.actor_lr=VALUE"]),
        (["sweep", "spread", "--seed", "1"], ["did you mean --seeds?"]),
        (["evaluate", "--seed", "1"], ["did you mean --first-seed?"]),
        (["train", "spread", "--seed", "3", "--set", "run.seed=4"], ["are the same key: give one"]),
        (["train", "spread", "--device", "gpu"], ["learner.device", "did you mean 'cuda'?"]),
        (["train", "spraed"], ["did you mean 'spread'? near it: ", "`murmur list` lists all"]),
        (
            ["train", "spread", "--set", "algorithm.lr=1"],
            ["unknown key 'algorithm.lr'; did you mean 'actor_lr'? near it: critic_lr"],
        ),
        (["train", "spread", "--set", "algorithm.actor_lr=abc"], ["it must be a valid number"]),
        (["train", "spread", "--set", "algorithm.name=mapo"], ["'mappo'", "`murmur list` lists"]),
        (
            ["train", "spread", "--set", "tracking.loggers=[wandbb]"],
            ["no tracker 'wandbb'; did you mean 'wandb'? known: tensorboard, wandb, mlflow"],
        ),
        (
            ["train", "spread", "--set", "evaluation.every_minutes=5"],
            ["every_updates=", "every_minutes=5", "set the others to 0"],
        ),
        (["train", "faces", "--episodes", "5"], ["has no episodes; set its epochs"]),
        (["train", "tab.yaml"], ["tab.yaml is no valid YAML: line 2, column 1: a tab stands"]),
        (
            ["train", "gym.yaml"],
            ["Gymnasium has no environment 'CartPole-v9'; did you mean 'CartPole-v1'?"],
        ),
        (["list", "algos"], ["nothing is called 'algos' here; did you mean 'algorithms'?"]),
    ],
    ids=lambda value: value[-1][:30] if isinstance(value, list) else None,
)
def test_a_near_miss_is_one_sentence_and_leaves_nothing(
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tab.yaml").write_text("learner:\n\tdevice: cpu\n")
    (tmp_path / "gym.yaml").write_text(f"{GYMNASIUM}\nalgorithm: {{name: ppo}}\n")
    code, _, err = murmur(monkeypatch, capsys, *arguments)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert line.count(words[0]) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"tab.yaml", "gym.yaml"}


def test_nearest_three_of_many_all_of_few() -> None:
    many = [f"name-{i}" for i in range(12)] + ["actor_lr", "critic_lr"]
    assert nearest("lr", many) == ["actor_lr", "critic_lr"]
    assert nearest("learning_rate", many)[0] == "actor_lr"
    assert known_names("name-7x", many, "murmur list").startswith(
        "did you mean 'name-7'? near it: "
    )
    assert known_names("name-7x", many, "murmur list").endswith("; `murmur list` lists all 14")
    assert known_names("zzz", many, "murmur list") == "`murmur list` lists all 14"
    assert known_names("zzz", ["a", "b"]) == "known: a, b"


def test_list_shows_every_kind_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = murmur(monkeypatch, capsys, "list", "--json", "-")
    assert code == 0
    found = json.loads(out)
    assert found == list_everything()
    assert found["algorithms"]["coma"].startswith("COMA: ")
    assert {"tensorboard", "wandb", "mlflow"} <= found["trackers"].keys()
    _, one, _ = murmur(monkeypatch, capsys, "list", "network")
    assert "mlp" in one
    assert "coma" not in one


def test_help_has_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = murmur(monkeypatch, capsys, "--help")
    titles = [line for line in out.splitlines() if line.startswith("╭")]
    assert [t.strip("╭─╮ ") for t in titles][1:] == [
        "Train",
        "Results",
        "Machine and speed",
        "Prepare",
    ]
    _, out, _ = murmur(monkeypatch, capsys, "train", "--help")
    for title in ("When the run ends, and its seed and device", "Machine", "Live page"):
        assert f"─ {title} ─" in out


def test_schema_accepts_what_comes_with_murmur_and_no_wrong_key() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from murmur.shared.config.files import CONFIG_DIRS

    validator = jsonschema.Draft202012Validator(json_schema())
    for file in CONFIG_DIRS[0].glob("*.yaml"):
        found = [e.message for e in validator.iter_errors(yaml.safe_load(file.read_text()))]
        assert not found, file
    for wrong in (
        {"learner": {"prot": 1}},
        {"algorithm": {"name": "coma", "lr": 1}},
        {"algorithm": {"name": "comma"}},
        {"nonsense": 1},
    ):
        assert not validator.is_valid({"extends": "spread", **wrong})
    assert validator.is_valid({"algorithm": {"name": "mine:Own", "anything": 1}})
    assert validator.is_valid({"env_server": {"num_workers": "auto"}})


def test_extends_finds_a_file_beside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "warehouse.yaml").write_text("extends: spread\nrun: {seed: 77}\n")
    (tmp_path / "more.yaml").write_text("extends: warehouse\n")
    _, out, _ = murmur(monkeypatch, capsys, "config", str(tmp_path / "more.yaml"))
    assert yaml.safe_load(out)["run"]["seed"] == 77
