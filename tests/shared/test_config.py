"""Configuration: precedence, and errors that suggest what was meant."""

import datetime
import json
import os
import time
from enum import Enum
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import config_names, load
from murmur.shared.config.section import validate
from murmur.shared.config.text import one_line, to_yaml
from murmur.shared.process.errors import ConfigError

MINIMAL = "environment: {name: spread, num_agents: 3}\n"


def write(folder: Path, text: str, name: str = "trial.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_defaults_and_name_from_the_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL), environ={})
    assert config.run.name == "trial"
    assert config.env_server.sessions_per_worker == 2
    assert config.environment.options == {"num_agents": 3}
    assert config.total_envs == 0  # how many workers there will be is not chosen yet
    assert load(write(tmp_path, MINIMAL), ["env_server.num_workers=2"], {}).total_envs == 64


def test_set_beats_environment_beats_file(tmp_path: Path) -> None:
    file = write(
        tmp_path, MINIMAL + "learner: {port: 1}\nrun: {seed: 1}\nenv_server: {num_workers: 1}"
    )
    environ = {"MURMUR__LEARNER__PORT": "2", "MURMUR__RUN__SEED": "2", "OTHER": "x"}
    config = load(file, ["learner.port=3"], environ)
    assert (config.learner.port, config.run.seed, config.env_server.num_workers) == (3, 2, 1)


def test_extends_merges_sections_but_not_other_plugins_options(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "algorithm: {name: coma, lr: 1}\nrun: {seed: 5}", "base.yaml")
    top = f"extends: {base}\nenvironment: {{num_agents: 4}}\nalgorithm: {{name: masac, tau: 2}}\n"
    config = load(write(tmp_path, top), environ={})
    assert config.environment.options == {"num_agents": 4}
    assert config.environment.name == "spread"
    assert config.algorithm.options == {"tau": 2}
    assert config.run.seed == 5


def test_session_timeout_follows_the_turns_of_a_worker(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL)

    def chosen(*settings: str) -> float | None:
        return load(file, [f"env_server.{s}" for s in settings], {}).learner.session_timeout_s

    assert chosen() == 60
    assert chosen("sessions_per_worker=16") == 1.5 * 16 * 20
    assert chosen("sessions_per_worker=16", "step_timeout_s=1") == 60
    assert chosen("step_timeout_s=0") == 0  # never, as a step may take for ever
    with pytest.raises(ConfigError, match=r"session_timeout_s=60 must be more than .*=20 times"):
        load(file, ["env_server.sessions_per_worker=4", "learner.session_timeout_s=60"], {})
    with pytest.raises(ConfigError, match=r"=50 must be .*=20 times .*=2 times 2 \(imitation"):
        load(file, ["imitation.baseline=random", "learner.session_timeout_s=50"], {})


def test_evaluations_may_have_another_environment(tmp_path: Path) -> None:
    text = "environment: {name: spread, num_agents: 3, episode_steps: 9}\n"
    text += "evaluation: {environment: {num_agents: 5}}\n"
    config = load(write(tmp_path, text), environ={})
    assert config.for_evaluation().environment.options == {"num_agents": 5, "episode_steps": 9}
    assert config.environment.options == {"num_agents": 3, "episode_steps": 9}


def test_plugin_options_can_be_set(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL), ["environment.options_of=[1, 2]"], {})
    assert config.environment.options["options_of"] == [1, 2]


PLUGINS = MINIMAL + "algorithm: {name: coma, gae_lambda: 0.9, lr: 1}\nnetwork: {name: cnn}\n"


@pytest.mark.parametrize(
    ("overrides", "environ"),
    [
        (["algorithm.name=qmix", "algorithm.lr=0.5"], {}),
        (["algorithm.lr=0.5", "algorithm.name=qmix"], {}),
        (["algorithm.name=masac", "algorithm.lr=0.5", "algorithm.name=qmix"], {}),
        (["algorithm.lr=0.5"], {"MURMUR__ALGORITHM__NAME": "qmix"}),
        (["algorithm.name=qmix"], {"MURMUR__ALGORITHM__LR": "0.5"}),
    ],
)
def test_options_of_another_plugin_are_dropped_with_a_log_line(
    tmp_path: Path,
    overrides: list[str],
    environ: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = load(write(tmp_path, PLUGINS), [*overrides, "network.name=mlp"], environ)
    assert config.algorithm == PluginConfig(name="qmix", lr=0.5)
    assert (config.network.name, config.environment.options) == ("mlp", {"num_agents": 3})
    assert caplog.messages == [
        "algorithm.name=qmix in place of coma, whose options are dropped: gae_lambda, lr"
    ]


@pytest.mark.parametrize("overrides", [["algorithm.name=coma"], ["algorithm.lr=1"]])
def test_the_same_plugin_keeps_its_options(
    tmp_path: Path, overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = load(write(tmp_path, PLUGINS), overrides, {})
    assert config.algorithm == PluginConfig(name="coma", gae_lambda=0.9, lr=1)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("learner: {prot: 1}", [], r"unknown key 'learner\.prot'; did you mean 'port'\?"),
        ("lerner: {}", [], r"unknown key 'lerner'; did you mean 'learner'\?"),
        ("run: {zzz: 1}", [], r"unknown key 'run\.zzz'; known: name, directory"),
        (
            "",
            ["learner.batcher.max_wait=1"],
            r"'learner\.batcher\.max_wait'; did you mean 'max_wait_ms",
        ),
        ("learner: {port: many}", [], r"'learner\.port' = 'many': it must be a valid integer"),
        ("learner: {port: 70000}", [], r"'learner\.port' = 70000: it must be less than"),
        ("learner: {device: tpu}", [], r"'learner\.device' = 'tpu': it must be 'auto'"),
        ("env_server: {envs_per_worker: 7}", [], "envs_per_worker 7 is no multiple of"),
        ("run: [1]", [], "'run' = "),
        (
            "evaluation: {environment: 5}",
            [],
            r"evaluation\.environment' = 5: it holds keys, evaluation\.environment\.KEY=VALUE",
        ),
        ("", ["security.folder="], r"valid string: --set 'security\.folder=\"\"', or in quotes"),
        ("", ["run.name=12"], r"'run\.name' = 12: .*: --set 'run\.name=\"12\"', or in quotes"),
        ("league: {checkpoints: a.pt}", [], r"checkpoints' = 'a\.pt': it is a list, \[a\.pt\]"),
        ("run: {seed: 1", [], "no valid YAML"),
        ("", ["learner.port"], "write it as section.key=value"),
        ("", ["environment.name.x=1"], "'name' is a value, not a section"),
    ],
)
def test_errors_name_key_value_and_fix(
    tmp_path: Path, text: str, overrides: list[str], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        load(write(tmp_path, MINIMAL + text), overrides, {})


def test_a_file_without_environment_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key 'environment' is missing"):
        load(write(tmp_path, ""), environ={})


def test_a_file_of_no_sections_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a list"):
        load(write(tmp_path, "[1, 2]"), environ={})


def test_a_file_that_extends_itself_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="extends itself"):
        load(write(tmp_path, f"extends: {tmp_path / 'trial.yaml'}"), environ={})


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"run: \xff", "is no valid YAML: 'utf-8' codec"),
        (b"run: 2026-13-40", "is no valid YAML: month must be in 1..12"),
        (b"[" * 2000, "is no valid YAML: maximum recursion depth"),
        (
            b"run:\n  name: [a\n  seed: 2",
            "line 3, column 7: expected .* begins at line 2, column 9",
        ),
        (b"extends: [spread]", r"extends is \['spread'\]; expected the name"),
        (b"extends: 5", "extends is 5; expected the name"),
    ],
)
def test_files_that_yaml_cannot_read_are_refused(
    tmp_path: Path, content: bytes, wanted: str
) -> None:
    """All found by fuzzing."""
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=wanted):
        load(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("name", ["\0", "x" * 5000])
def test_names_that_no_file_can_have_are_unknown(name: str) -> None:
    """Found by fuzzing."""
    with pytest.raises(ConfigError, match="no configuration"):
        load(name)


def test_an_override_that_looks_like_a_date_is_text(tmp_path: Path) -> None:
    """Found by fuzzing."""
    (tmp_path / "x.yaml").write_text("environment: {name: spread}")
    config = load(str(tmp_path / "x.yaml"), ["run.name=2026-99-99"])
    assert config.run.name == "2026-99-99"


def test_an_unknown_configuration_names_the_known() -> None:
    name = config_names()[0]
    with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
        load(name + "x", environ={})


@pytest.mark.parametrize("name", config_names())
def test_every_shipped_configuration_loads(name: str) -> None:
    assert load(name, environ={}).run.name == name


def test_a_config_survives_json_with_its_plugin_options() -> None:
    config = ExperimentConfig(environment=PluginConfig.model_validate({"name": "e", "a": [1]}))
    assert ExperimentConfig.model_validate_json(config.model_dump_json()) == config


def test_where_prefixes_the_key() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'environment\.x'"):
        validate(ExperimentConfig, {"environment": {"name": "e"}, "x": 1}, where="environment")


def bomb(levels: int) -> str:
    """Ten aliases of ten aliases of ...: 10 ** levels values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    return MINIMAL + "league: {checkpoints: *a0}\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (bomb(9).replace(" *a0}", " []}"), "more than 20000 values, each alias"),
        ("environment: &a {name: spread, x: [*a]}", "more than 20000 values, each alias"),
        ("a: &a {b: &b {<<: *a}}\n" + MINIMAL, "more than 20000 values|unconstructable|no valid"),
        ("[" * 100_000, "is no valid YAML"),
        ("- " * 100_000, "is no valid YAML"),
        ("#" * (1 << 19), "is larger than 256 KiB"),
        (MINIMAL + 'run: {directory: "a\\0b"}', "contains a NUL character"),
        (MINIMAL + 'run: {"na\\0me": b}', "contains a NUL character"),
    ],
)
def test_yaml_that_expands_is_refused_at_once(tmp_path: Path, text: str, why: str) -> None:
    file = write(tmp_path, text)
    began = time.process_time()
    with pytest.raises(ConfigError, match=why) as refused:
        load(file, environ={})
    assert time.process_time() - began < 3
    assert len(str(refused.value)) < 500


def test_aliases_of_ordinary_size_are_welcome(tmp_path: Path) -> None:
    text = "environment: {name: spread, a: &a [1, 2], b: *a, c: *a}"
    assert load(write(tmp_path, text), environ={}).environment.options["c"] == [1, 2]


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", ".", "a\tb", "x" * 201, "\ud800"])
def test_a_run_name_that_names_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=r"run\.name: .*(cannot name a folder|is longer than)"):
        load(file, [f"run.name={json.dumps(name)}"], {})
    assert load(file, ["run.name='a [b] ü'"], {}).run.name == "a [b] ü"


@pytest.mark.parametrize(
    "setting",
    [
        "run.max_minutes=.nan",
        "run.max_minutes=.inf",
        "run.seed=1" + "0" * 30,
        "run.seed=1" + "0" * 5000,
        "env_server.step_timeout_s=1e300",
        "learner.log_every_s=1e10",
        "learner.log_every_s=.inf",
    ],
)
def test_numbers_that_nothing_can_wait_or_count_to_are_refused(
    tmp_path: Path, setting: str
) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]) as refused:
        load(write(tmp_path, MINIMAL), [setting], {})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Simple_Spred", "did you mean 'simple-spread'"),
        ("https://host.example/a.yaml", "downloads nothing"),
        ("folder", "it is a folder; give a YAML file"),
        ("folder/run", "it is the folder of a run; `murmur train --resume --run"),
    ],
)
def test_a_name_of_no_configuration_says_what_it_is(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder/run").mkdir(parents=True)
    (tmp_path / "folder/run/config.yaml").touch()
    with pytest.raises(ConfigError, match=words):
        load(name)


def test_a_folder_that_may_not_be_read_is_named_as_that(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    file = write(folder, MINIMAL)
    tmp_path.chmod(0o755)
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:  # whom no mode keeps out
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="may not look into its folder; `chmod a\\+rX"):
            load(file)
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("MURMUR__LEARNR__PORT", "did you mean 'learner'.*variable MURMUR__LEARNR__PORT"),
        ("MURMUR_LEARNER__PORT", "MURMUR_LEARNER__PORT: write MURMUR__LEARNER__PORT"),
    ],
)
def test_a_wrong_environment_variable_is_named(variable: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("spread", [], {variable: "1", "MURMUR_LOG": "json", "MURMUR_CONFIG": "spread"})


SUPERVISED = "source: {name: faces, size: 128}\nalgorithm: {name: segmentation, epochs: 3}\n"


def test_a_run_has_a_source_or_an_environment(tmp_path: Path) -> None:
    config = load(write(tmp_path, SUPERVISED), ["supply.window=auto", "source.size=64"], {})
    assert config.supervised
    assert config.source.options == {"size": 64}
    data = config.model_dump(mode="json")
    assert "environment" not in data
    assert data["supply"] == {"cache": "auto", "window": 0}
    assert validate(ExperimentConfig, data) == config
    other = load(write(tmp_path, MINIMAL), [], {})
    assert not other.supervised
    assert not {"source", "supply"} & other.model_dump(mode="json").keys()


def test_a_source_beside_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment '\w+' and source 'faces' are both"):
        load(write(tmp_path, MINIMAL + "source: {name: faces}\n"), [], {})


def test_a_source_with_opponents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a run with a source has no opponents"):
        load(write(tmp_path, SUPERVISED), ["league.size=2"], {})


def test_password_of_a_tracking_server_is_in_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MURMUR_MLFLOW_URI", raising=False)
    uri = "https://me:hunter2@host.example/x"
    tracking = load(write(tmp_path, MINIMAL), [f"tracking.mlflow_uri={uri}"], {}).tracking
    assert tracking.mlflow_uri == "https://***@host.example/x"
    assert tracking.whole_mlflow_uri() == uri
    monkeypatch.setenv("MURMUR_MLFLOW_URI", "https://me:hunter2@other.example/x")
    with pytest.raises(ConfigError, match="set the environment variable MLFLOW_TRACKING_URI"):
        tracking.whole_mlflow_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert tracking.whole_mlflow_uri() == uri


GYM = "environment: {name: gymnasium, factory: 'a:B', arguments: {toll: 1.0, steps: {0: 1}}}\n"


def test_arguments_of_evaluations_are_merged(tmp_path: Path) -> None:
    text = GYM + "evaluation: {environment: {arguments: {steps: {1: 2}}}}\n"
    config = load(write(tmp_path, text), environ={})
    evaluated = config.for_evaluation().environment.options["arguments"]
    assert evaluated == {"toll": 1.0, "steps": {0: 1, 1: 2}}
    assert config.environment.options["arguments"] == {"toll": 1.0, "steps": {0: 1}}
    with pytest.raises(ConfigError, match=r"evaluation\.environment: name='other': evaluations"):
        load(write(tmp_path, GYM), ["evaluation.environment={name: other}"], {})


def test_sections_called_like_plugins_are_merged_below_the_top(tmp_path: Path) -> None:
    base = write(tmp_path, GYM.replace("{toll", "{network: {name: a, x: 1}, toll"), "base.yaml")
    top = f"extends: {base}\nenvironment: {{arguments: {{network: {{name: b}}}}}}\n"
    arguments = load(write(tmp_path, top), environ={}).environment.options["arguments"]
    assert arguments["network"] == {"name": "b", "x": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "run: {seed: 1}\nlearner: {}\nrun: {seed: 2}",
            "trial.yaml has 'run' twice, in lines 2 and 4",
        ),
        ("run:\n  seed: 1\n  'seed': 2", r"has 'run\.seed' twice, in lines 3 and 4"),
        ("run: {<<: {seed: 1}, seed: 2, seed: 3}", r"has 'run\.seed' twice, in line 2"),
        ("evaluation: {environment: {1: a, 0x1: b}}", r"twice \(once as 1\), in line 2"),
        (
            "evaluation: {environment: {a: 010}}",
            "010 is not the same in YAML 1.1 and .* digits alone",
        ),
        ("evaluation: {environment: {a: 12:30}}", 'alone, or "12:30" in quotes'),
        (
            "evaluation: {environment: {a: on}}",
            'on is not the same .*; write true or false, or "on" in quotes',
        ),
        ("evaluation: {environment: {no: 1}}", 'write true or false, or "no" in quotes'),
        ("algorithm: {name: coma, lr: [yes]}", r"line 2: algorithm\.lr: yes is not"),
        (
            "evaluation: {environment: {a: 1e400}}",
            r"environment\.a: '1e400' is beyond the range of a float",
        ),
        (
            "evaluation: {environment: {a: 2024-01-31 10:20:30.1234567}}",
            r"line 2: evaluation\.environment\.a: .* has parts of a microsecond",
        ),
        (
            "evaluation: {environment: {a: !own b}}",
            "no valid YAML: line 2, column 31: could not determine",
        ),
        ("run: {max_env_steps: 9007199254740993.0}", "not exact as a whole number: write all its"),
        ("run: {max_env_steps: 1.5}", "max_env_steps"),
        ("evaluation: {environment: {a: !!set {b: 1}}}", "is a set; a configuration holds"),
        ("evaluation: {environment: {a: !!int ''}}", "'' is no int"),
    ],
)
def test_what_can_be_misread_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path, MINIMAL + text), environ={})


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("environment.arguments.x={a: 1, a: 2}", r"has 'environment\.arguments\.x\.a' twice"),
        ("environment.arguments.x=yes", "yes is not the same in YAML 1.1"),
        ("environment.arguments.steps.on=1", "on is not the same in YAML 1.1"),
        ("environment.arguments.x=[1", "no valid YAML.*put text in quotes"),
        ("environment.arguments.x=!own b", "no valid YAML.*put text in quotes"),
    ],
)
def test_items_and_variables_follow_the_rules_of_files(
    tmp_path: Path, item: str, words: str
) -> None:
    file = write(tmp_path, GYM)
    with pytest.raises(ConfigError, match=words):
        load(file, [item], {})
    key, _, value = item.partition("=")
    with pytest.raises(ConfigError, match=words):
        load(file, [], {"MURMUR__" + key.upper().replace(".", "__").replace("__ON", "__on"): value})


def test_whole_numbers_and_keys_of_items(tmp_path: Path) -> None:
    items = ["run.max_env_steps=1e6", "environment.arguments.steps.0=5", "learner.compile=no"]
    variables = {"MURMUR__ENVIRONMENT__ARGUMENTS__maxSteps": "1e-3"}
    config = load(write(tmp_path, GYM), items, variables)
    assert config.run.max_env_steps == 1_000_000
    assert config.environment.options["arguments"]["steps"] == {0: 5}
    assert config.environment.options["arguments"]["maxSteps"] == 0.001
    assert config.learner.compile is False


def test_a_time_is_written_with_its_offset_or_not_at_all() -> None:
    day = datetime.datetime(2024, 1, 31)
    named = datetime.timezone(datetime.timedelta(hours=1), "CET")
    assert to_yaml({"at": day.replace(tzinfo=named)}) == "at: 2024-01-31 00:00:00+01:00\n"
    odd = datetime.timezone(datetime.timedelta(seconds=61))
    for value in (day.replace(fold=1), day.replace(tzinfo=odd)):
        for write_value in (lambda x: to_yaml({"at": x}), one_line):
            with pytest.raises(ConfigError, match="has a time zone that YAML cannot say"):
                write_value(value)


def test_text_that_looks_like_a_time_is_written_in_quotes() -> None:
    text = "2024-01-31 10:20:30.1234567"
    assert to_yaml({"at": text}) == f"at: '{text}'\n"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (frozenset({1}), "is a frozenset"),
        (1j, "is a complex"),
        ({"a": [object()]}, r"x\.a\.0: <object"),
        ({1: {2: b"\0" * 3, 3: 10**5000}}, r"x\.1\.3: a whole number of more than 4000 digits"),
        (datetime.time(1), "is a time"),
        (Enum("Color", "RED").RED, "is a Color"),
        ({1}, "is a set"),
        (
            datetime.datetime(2024, 1, 31, tzinfo=ZoneInfo("Europe/Rome")),
            "has a time zone that YAML",
        ),
    ],
)
def test_python_values_that_no_file_can_keep_are_refused(value: object, words: str) -> None:
    sections = {"environment": {"name": "gymnasium", "factory": "a:B", "arguments": {"x": value}}}
    with pytest.raises(ConfigError, match=words):
        load(sections, (), {})
    with pytest.raises(ConfigError, match=words):
        load("spread", {"environment.arguments": {"x": value}}, {})
