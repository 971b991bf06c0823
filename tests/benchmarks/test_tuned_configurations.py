"""Configurations for tasks of MPE, LBF and VMAS: those that the figures were measured with."""

import json
from pathlib import Path

import pytest

from benchmarks.acceptance.task import experiment, load_task
from murmur.doctor.machine import RESULTS
from murmur.env_service.environment import make_environment
from murmur.learner_service.algorithms.maddpg import Config
from murmur.learner_service.tuning.probe import Probe
from murmur.runs.settings import config_summary, resolved_data
from murmur.shared.config.files import config_names, find_config, load
from murmur.shared.config.section import validate

TUNED = {  # configuration: test of the acceptance suite, its algorithm
    "simple-spread": ("A5", "maddpg"),
    "simple-speaker-listener": ("A4", "mappo"),
    "lbf-5x5": ("A3", "qmix"),
    "lbf-8x8": ("A8", "mappo"),
    "vmas-balance": ("A6", "mappo"),
    "vmas-navigation": ("A7", "maddpg"),
}


@pytest.mark.parametrize("name", TUNED)
def test_a_tuned_configuration_is_the_one_measured(name: str) -> None:
    test, algorithm = TUNED[name]
    ours, measured = load(name, [], {}), experiment(test, load_task(test), algorithm, seed=1)
    for section in ("environment", "algorithm", "network"):
        assert resolved_data(ours)[section] == resolved_data(measured)[section]
    assert ours.learner.pipeline == measured.learner.pipeline
    for key in ("envs_per_worker", "sessions_per_worker", "num_workers"):
        assert getattr(ours.env_server, key) == getattr(measured.env_server, key)
    entries = json.loads((RESULTS / f"acceptance-{test}.json").read_text())["entries"]
    steps = [line["env_steps"] for line in entries[algorithm]["lines"]]
    assert ours.run.max_env_steps == max(steps)


PUBLISHED = {  # configuration: package of its environment, agents, rows of an update
    "simple-tag": ("mpe2", 4, 1024),
    "simple-adversary": ("mpe2", 3, 1024),
    "simple-reference": ("mpe2", 2, 128 * 25 * 2),
    "rware-tiny-2ag": ("rware", 2, 10 * 500 * 2),
    "hopper": ("mujoco", 1, 256),
    "halfcheetah": ("mujoco", 1, 256),
    "mamujoco-halfcheetah": ("gymnasium_robotics", 2, 20 * 200 * 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_fit_their_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, agents, rows = PUBLISHED[name]
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it is
    config = load(name, [], {})
    environment = make_environment(config.environment, 1)
    spec = environment.spec
    environment.close()
    assert spec.num_agents == agents
    assert spec.max_episode_steps in (25, 500, 1000)
    assert config.evaluation.best_metric in ("return", *spec.metrics)
    Probe(config, spec)  # builds the algorithm
    options = config.algorithm.options
    replay = options.get("replay", {})
    assert replay.get("batch_size", options.get("batch_size")) == rows
    assert options.get("batch_number", 1) == 1


@pytest.mark.parametrize("name", config_names())
def test_every_configuration_resolves_and_says_what_it_is(name: str) -> None:
    whole = resolved_data(load(name, [], {}))
    assert whole["source" if "source" in whole else "environment"]["name"]
    assert len(config_summary(name)) > 20


def test_the_name_of_a_task_with_underscores_is_found() -> None:
    assert find_config("simple_spread") == find_config("simple-spread")


def test_eight_ranks_of_snakes_ddpg_learn_as_eight_learners_did() -> None:
    one, eight = (algorithm_settings(name) for name in ("snakes-ddpg", "snakes-ddpg-8"))
    share = eight.for_rank(8).model_dump()
    assert share.pop("exploration_env_steps") == 8 * one.exploration_env_steps  # rows of all ranks
    assert share == one.model_dump(exclude={"exploration_env_steps"})


def algorithm_settings(name: str) -> Config:
    return validate(Config, load(name, [], {}).algorithm.options, "algorithm")


@pytest.mark.parametrize("budget", [14, 10, 8, 6])
def test_terrain_of_every_budget_updates_from_64_episodes(budget: int) -> None:
    name = "terrain-reference" if budget == 14 else f"terrain-budget-{budget}"
    config, reference = load(name, [], {}), load("terrain-reference", [], {})
    environment = make_environment(config.environment, 1)
    assert environment.spec.max_episode_steps == budget + 1
    rows = config.algorithm.options["batch_size"] * config.algorithm.options["batch_number"]
    assert rows == 64 * environment.spec.num_agents * (budget + 1)
    exploring = config.algorithm.options["epsilon_env_steps"] / (budget + 1)
    wanted = reference.algorithm.options["epsilon_env_steps"] / 15
    assert exploring == pytest.approx(wanted, rel=0.01)
    ours, theirs = resolved_data(config), resolved_data(reference)
    assert ours["environment"] == theirs["environment"] | {"budget": budget}
    assert ours["network"] == theirs["network"]
