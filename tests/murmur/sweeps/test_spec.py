"""What a sweep consists of: files, options, their mistakes, and the runs that result."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from murmur.cli.many import _seeds
from murmur.shared.config.files import load
from murmur.shared.config.section import validate
from murmur.shared.config.text import difference, parse_yaml
from murmur.shared.process.errors import ConfigError
from murmur.sweeps.capacity import PROCESS_GIB, Gpu, cores_of, measure_capacity, memory_of, shares
from murmur.sweeps.folder import SweepFolder
from murmur.sweeps.run import open_sweep
from murmur.sweeps.spec import SweepConfig, load_spec, varied

FILE = """
configs: [spread, formation]
seeds: 2
set: {run.max_env_steps: 1000}
vary:
  algorithm: [{name: mappo, gamma: 0.9}, {name: coma}]
"""


def spec(**data: Any) -> SweepConfig:
    return validate(SweepConfig, {"configs": "spread", **data})


def test_a_file_gives_all_combinations(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE)
    sweep = SweepFolder.create(load_spec([str(file)], {"seeds": 3}), tmp_path / "made")
    sweep.lock.release()
    assert len(sweep.runs) == 12
    # The first seed of everything comes first: an early comparison has all groups.
    assert [run.name for run in sweep.runs[:4]] == [
        *("spread-mappo-seed-1", "spread-coma-seed-1"),
        *("formation-mappo-seed-1", "formation-coma-seed-1"),
    ]
    config = load(str(sweep.config_file(sweep.runs[0])))
    assert config.algorithm.options["gamma"] == 0.9
    assert (config.run.max_env_steps, config.run.seed) == (1000, 1)
    assert (config.learner.port, config.learner.metrics_port) == (0, 0)  # several share a machine
    again = SweepFolder.open(sweep.path)
    assert again.runs == sweep.runs


def test_options_are_read_as_yaml() -> None:
    assert varied(["a.b=1,x,[2, 3]", "d=[4, 5]"]) == {"a.b": [1, "x", [2, 3]], "d": [4, 5]}
    assert (_seeds("1,7"), _seeds("5"), _seeds(None)) == ([1, 7], 5, None)
    for seeds in ("0", "a", "1,", "-1"):
        with pytest.raises(ConfigError, match="--seeds"):
            _seeds(seeds)
    with pytest.raises(ConfigError, match=r"write it as section\.key=value,value"):
        varied(["a.b"])


def test_overrides_are_the_same_in_all_runs(tmp_path: Path) -> None:
    given = {"seeds": [1, 7], "vary": None}
    sweep = open_sweep(["spread"], given, ["run.max_updates=3"], tmp_path / "sweep", resume=False)
    configs = [load(str(sweep.config_file(run))).run for run in sweep.runs]
    assert [(config.seed, config.max_updates) for config in configs] == [(1, 3), (7, 3)]
    sweep.lock.release()
    with pytest.raises(ConfigError, match="leave out seeds, set"):
        open_sweep([], given, ["run.max_updates=3"], sweep.path, resume=True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"seeds": [1, 1]}, "seeds are different numbers"),
        ({"vary": {"run.seed": [1]}}, "'run.seed' is chosen by the sweep; set its `seeds`"),
        ({"vary": {"a": {"uniform": [0, 1]}}}, "for a search let Optuna call murmur.train"),
        ({"vary": {"a": [{"integers": [0, 1]}]}}, "for a search let Optuna call murmur.train"),
        ({"vary": {"a": 3}}, "3 says no values: write a list"),
        ({"vary": {"a": [1, 1]}}, "has a value twice; for repeats use `seeds`"),
        ({"vary": {"a": []}}, r"\[\] says no values: write a list"),
        ({"vary": {"a": [1]}, "set": {"a": 1}}, "'a' is in both"),
        ({"method": "random", "vary": {"a": [1]}}, "'method' is no key any more: .* let Optuna"),
        ({"trials": 2}, "'trials' is no key any more"),
        ({"sedes": 2}, "did you mean 'seeds'"),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec(**data)


def test_a_wrong_setting_ends_the_sweep_before_it_begins(tmp_path: Path) -> None:
    for vary, words in (
        ({"algorithm.gama": [1]}, "unknown key 'algorithm.gama'; did you mean 'gamma'"),
        ({"algorithm.name": ["mapo"]}, "no algorithm 'mapo'"),
        ({"learner.prot": [1]}, "unknown key 'learner.prot'"),
    ):
        with pytest.raises(ConfigError, match=words):
            SweepFolder.create(spec(vary=vary), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_capacity_divides_cores_and_gpus() -> None:
    config = load("spread", ["learner.device=auto"], environ={})
    sync = load("spread", ["learner.pipeline=sync"], environ={})
    busy = load("spread", ["env_server.num_workers=3", "learner.num_threads=2"], environ={})
    assert [cores_of(c) for c in (config, sync, busy)] == [2, 1, 5]
    alone = ["run.offline=true", "imitation.dataset=data"]  # no worker ever starts
    offline = load("spread", [*alone, "env_server.num_workers=3"], environ={})
    assert cores_of(offline) == 1
    assert memory_of(offline) == memory_of(config) - PROCESS_GIB
    gpus = [Gpu("H200", "0", 100.0), Gpu("H200", "1", 100.0)]
    told = measure_capacity([config] * 12, 8, gpus)
    assert (told.parallel, told.reason) == (8, "as set")
    assert told.gpu_limit_gib == 21.2  # 85 % of 100 GiB for four runs on each
    assert "8 runs at once (as set)" in told.text()
    assert "on H200, H200, 21.2 GiB of its memory each" in told.text()
    assert "learner.memory_limit_gib=21.2" in shares(config, told)
    assert shares(busy, told) == ["learner.memory_limit_gib=21.2"]  # what it sets itself stays
    none = measure_capacity([config] * 12, 1, [])
    assert (none.parallel, none.gpu_limit_gib) == (1, 0)
    assert measure_capacity([config] * 3, 8, []).parallel == 3
    small = measure_capacity([sync] * 500, 0, [Gpu("small", "0", 3.0)])
    assert (small.parallel, small.reason) == (1, "3.0 GiB of GPU memory free")
    with pytest.raises(ConfigError, match=r"learner\.device=cuda, but no GPU"):
        measure_capacity([load("spread", ["learner.device=cuda"], environ={})], 0, [])


ARGUMENTS = "{prices: {0: 1.0}, budget: .inf, day: 2024-01-31, kinds: [a, b], rate: 1e-3}"


def test_a_sweep_keeps_arguments_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "gym.yaml").write_text(
        "environment: {name: gymnasium, factory: 'gymnasium:make', arguments: {id: CartPole-v1}}\n"
        "algorithm: {name: ppo}\n"
    )
    (tmp_path / "sweep.yaml").write_text(
        f"configs: [{tmp_path}/gym.yaml]\n"
        f"set: {{environment.arguments.own: {ARGUMENTS}, run.max_env_steps: 1e6}}\n"
        "vary: {environment.arguments.day: [2024-01-31, 2024-02-01]}\n"
        "seeds: 1e0\n"
    )
    spec = load_spec([str(tmp_path / "sweep.yaml")], {})
    sweep = SweepFolder.create(spec, tmp_path / "sweep")
    sweep.lock.release()
    wanted = parse_yaml(ARGUMENTS, "wanted")
    days = []
    for run in sweep.runs:
        config = load(str(sweep.config_file(run)), (), {})
        arguments = config.environment.options["arguments"]
        assert difference(arguments["own"], wanted) is None
        assert config.run.max_env_steps == 1_000_000
        days.append(arguments["day"])
    assert days == [datetime.date(2024, 1, 31), datetime.date(2024, 2, 1)]
    assert load_spec([str(tmp_path / "sweep" / "sweep.yaml")], {}) == spec
    (tmp_path / "sweep.yaml").write_text(
        f"configs: [{tmp_path}/gym.yaml]\nvary: {{environment.arguments.x: [yes, no]}}\n"
    )
    with pytest.raises(ConfigError, match=r"yes is not the same in YAML 1\.1 and YAML 1\.2"):
        load_spec([str(tmp_path / "sweep.yaml")], {})


@pytest.mark.parametrize("wrong", [{"minutes": None}, {"state": "gone"}, {"settings": 5}])
def test_an_index_with_a_wrong_value_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    sweep = SweepFolder.create(load_spec(["spread"], {}), tmp_path / "sweep")
    sweep.lock.release()
    index = json.loads((sweep.path / "sweep.json").read_text())
    index["runs"][0] |= wrong
    (sweep.path / "sweep.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"is no index of a sweep: .*{next(iter(wrong))}"):
        SweepFolder.open(sweep.path)


def test_a_sweep_of_former_versions_opens(tmp_path: Path) -> None:
    sweep = SweepFolder.create(load_spec(["spread"], {"seeds": 2, "parallel": 3}), tmp_path / "old")
    sweep.lock.release()
    file = sweep.path / "sweep.yaml"
    data = parse_yaml(file.read_text(), "sweep.yaml")
    drawn = {"method": "optuna", "trials": 9, "vary": {"algorithm.gamma": {"uniform": [0, 1]}}}
    file.write_text(json.dumps({**data, **drawn, "search_seed": 1, "prune": True}))
    index = json.loads((sweep.path / "sweep.json").read_text())
    index["runs"][0] |= {"state": "pruned", "trial": 0}
    for method in ("random", "optuna"):
        (sweep.path / "sweep.json").write_text(json.dumps({**index, "method": method}))
        again = SweepFolder.open(sweep.path)
        assert ([run.state for run in again.runs], again.parallel) == (["pruned", "waiting"], 3)
    with pytest.raises(ConfigError, match=r"is a search .* by Optuna, which cannot be continued"):
        SweepFolder.open(sweep.path, lock=True)
