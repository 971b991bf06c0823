"""Names of agents at the handshake: rows are put in the run's order, or the session is refused."""

import contextlib
import threading
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import murmur
from murmur.learner_service.serving.game import team_spec
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import ADJACENCY, STATE, ArraySpec, EnvSpec
from murmur.shared.wire.timestep import Array, TimeStep
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import FIRST, MID, row, vector_spec
from tests.murmur.runs.test_policy import COMMON, FEED_FORWARD, RECURRENT, save_untrained
from tests.wire import Client, Refused

NAMES = ("uav_0", "uav_1", "uav_2")
OTHER = ("uav_2", "uav_0", "uav_1")
ROWS = [NAMES.index(name) for name in OTHER]  # of the run, in the other order
N, STEPS = 3, 8


def reordered(timestep: TimeStep) -> TimeStep:
    """The time step of a worker that lists the agents in the other order."""
    return replace(
        timestep,
        reward=timestep.reward[:, ROWS],
        observation={name: x[:, ROWS] for name, x in timestep.observation.items()},
    )


def in_run_order(action: Array) -> Array:
    """Actions of the other order in that of the run."""
    back = np.empty_like(action)
    back[:, ROWS] = action
    return back


def refusal(port: int, spec: EnvSpec, **changes: Any) -> str:
    """What the learner says to a session of this spec."""
    with Client(port, spec, 1) as client, pytest.raises(Refused) as caught:
        client.hello(**changes)
    assert caught.value.code.name == "FAILED_PRECONDITION"
    return str(caught.value.details)


def named(config: ExperimentConfig, agents: tuple[str, ...]) -> EnvSpec:
    return replace(murmur.make_env(config).spec, agents=agents)


@pytest.mark.parametrize("sections", [FEED_FORWARD, RECURRENT], ids=["mlp", "recurrent"])
def test_each_agent_is_acted_for_by_its_name(sections: dict[str, Any], tmp_path: Path) -> None:
    """The network is fed the agents' numbers, so an exchange of two rows shows in the actions."""
    environment = {**sections["environment"], "num_agents": len(NAMES)}
    config = load({**COMMON, **sections, "environment": environment}, {}, {})
    spec = named(config, NAMES)
    save_untrained(tmp_path, config, spec)
    policy = murmur.load(tmp_path)
    assert policy.agents == NAMES
    game, seeds = murmur.make_env(config, N), np.arange(N, dtype=np.uint64)
    agents_differ = False
    with (
        running_learner(tmp_path, config, serve_only=True) as learner,
        Client(learner.port, replace(spec, agents=OTHER), N) as client,
    ):
        client.hello(mode=pb.MODE_EVALUATE)
        timestep = game.reset(seeds)
        for _ in range(STEPS):
            own, served = policy.act(timestep), client.exchange(reordered(timestep))
            np.testing.assert_array_equal(in_run_order(served), own)
            agents_differ |= bool((served != own).any())
            timestep = game.step(own, timestep.step_type == murmur.StepType.LAST, seeds)
    assert agents_differ


@pytest.mark.parametrize("unnamed", [NAMES, ()], ids=["worker", "checkpoint"])
def test_a_side_without_names_is_taken_as_it_is(unnamed: tuple[str, ...], tmp_path: Path) -> None:
    """Checkpoints of older releases hold no names."""
    config = load({**COMMON, **FEED_FORWARD}, {}, {})
    save_untrained(tmp_path, config, named(config, unnamed))
    game = murmur.make_env(config, N)
    spec = replace(game.spec, agents=() if unnamed else OTHER)
    policy, seeds = murmur.load(tmp_path), np.arange(N, dtype=np.uint64)
    assert policy.agents == (unnamed or ("agent_0", "agent_1", "agent_2"))
    with (
        running_learner(tmp_path, config, serve_only=True) as learner,
        Client(learner.port, spec, N) as client,
    ):
        client.hello(mode=pb.MODE_EVALUATE)
        timestep = game.reset(seeds)
        np.testing.assert_array_equal(client.exchange(timestep), policy.act(timestep))


def test_checkpoint_of_agents_with_own_networks_wants_its_order(tmp_path: Path) -> None:
    sections = {**FEED_FORWARD, "algorithm": {"name": "mappo", "share_parameters": False}}
    config = load({**COMMON, **sections}, {}, {})
    save_untrained(tmp_path, config, named(config, NAMES))
    with running_learner(tmp_path, config, serve_only=True) as learner:
        said = refusal(learner.port, named(config, OTHER), mode=pb.MODE_EVALUATE)
    wanted = "agents: uav_0, uav_1, uav_2 here, uav_2, uav_0, uav_1 there; list the agents in one "
    assert wanted in said


def test_first_session_names_the_agents_of_an_older_checkpoint(tmp_path: Path) -> None:
    algorithm = {"name": "mappo", "share_parameters": False}
    config = load({**COMMON, **FEED_FORWARD, "algorithm": algorithm}, {}, {})
    save_untrained(tmp_path, config, named(config, ()))
    spec = named(config, NAMES)
    with (
        running_learner(tmp_path, config, resume=True) as learner,
        Client(learner.port, spec, 1) as first,
    ):
        first.hello()
        assert "uav_2, uav_0, uav_1 there" in refusal(learner.port, replace(spec, agents=OTHER))
        with Client(learner.port, spec, 1) as second:
            second.hello()


TOY = replace(vector_spec(num_agents=3), agents=NAMES)
SHARED = (ArraySpec(STATE, "float32", (2,), per_agent=False),)
HEARS = (ArraySpec(ADJACENCY, "uint8", (3,)),)  # its columns are agents, too


@pytest.mark.parametrize(
    ("algorithm", "changes", "agents", "words"),
    [
        ({"share_parameters": False}, {}, OTHER, "possible_agents = sorted(...)"),
        ({"share_parameters": [0, 0, 1]}, {}, OTHER, "uav_2, uav_0, uav_1 there"),
        ({}, {"observations": TOY.observations + SHARED}, OTHER, "list the agents in one order"),
        ({}, {"observations": TOY.observations + HEARS}, OTHER, "list the agents in one order"),
        ({}, {}, ("b_0", "b_1", "b_2"), "b_0, b_1, b_2 there; give the agents the same names"),
        ({}, {}, ("uav_0", "uav_1", "uav_3"), "uav_0, uav_1, uav_3 there; give the agents"),
        ({}, {}, (*NAMES, "uav_3"), "num_agents: 3 here, 4 there"),
    ],
    ids=["own", "groups", "state", "adjacency", "other names", "one other name", "one more"],
)
def test_other_agents_are_refused_by_name(
    algorithm: dict[str, Any],
    changes: dict[str, Any],
    agents: tuple[str, ...],
    words: str,
    tmp_path: Path,
) -> None:
    spec = replace(TOY, **changes)
    config = experiment(algorithm=algorithm)
    with running_learner(tmp_path, config) as learner, Client(learner.port, spec, 1) as first:
        first.hello()
        said = refusal(learner.port, replace(spec, agents=agents, num_agents=len(agents)))
        assert words in said
        assert "(here: the learner, there: the worker)" in said
        first.exchange(row(spec, 1, FIRST))  # the first session is not disturbed


def test_sessions_that_begin_a_run_at_once_share_one_order(tmp_path: Path) -> None:
    orders = list(permutations(NAMES))
    welcomes: list[int] = []
    config = experiment(env_server={"num_workers": 3})

    def come(port: int, agents: tuple[str, ...]) -> None:
        spec = replace(TOY, agents=agents, metrics=TOY.metrics)
        with Client(port, spec, 1) as client:
            welcomes.append(client.hello().first_slot)
            client.exchange(row(spec, 1, FIRST))

    with running_learner(tmp_path, config) as learner:
        threads = [threading.Thread(target=come, args=(learner.port, o)) for o in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(welcomes) == len(orders)


def test_teams_of_a_league_are_the_same_in_every_session(tmp_path: Path) -> None:
    """The second half plays, too, though the policy acts for the first."""
    names = ("red_0", "red_1", "blue_0", "blue_1")
    spec = replace(vector_spec(num_agents=4), agents=names)
    assert team_spec(spec).agents == names[:2]
    config = experiment(league={"size": 1})
    with running_learner(tmp_path, config) as learner, Client(learner.port, spec, 1) as first:
        first.hello()
        for agents in (names[:2] + names[:1:-1], names[2:] + names[:2]):
            assert "agents: red_0, red_1" in refusal(learner.port, replace(spec, agents=agents))
        with Client(learner.port, spec, 1) as same:
            same.hello()


def test_resumed_episodes_get_actions_in_the_worker_s_order(tmp_path: Path) -> None:
    spec = replace(TOY, max_episode_steps=0)
    taken: list[Array] = []
    for max_updates, agents in ((2, NAMES), (4, OTHER)):
        config = experiment(
            env_server={"num_workers": 1, "envs_per_worker": 2, "sessions_per_worker": 1},
            learner={"pipeline": "sync"},
            evaluation={"every_updates": 0},
            run={"max_updates": max_updates},
        )
        with (
            running_learner(tmp_path, config, resume=max_updates > 2) as learner,
            Client(learner.port, replace(spec, agents=agents), 2) as client,
        ):
            starts = client.hello(preferred_first_slot=0).slots
            for env, start in enumerate(starts):
                before = np.frombuffer(start.actions, np.int32).reshape(-1, 3)
                assert (len(before) > 3) == (agents == OTHER)
                if agents == OTHER:
                    wanted = np.array(taken)[: len(before), env][:, ROWS]
                    np.testing.assert_array_equal(before, wanted)
            with contextlib.suppress(Refused):  # when the run is complete
                while True:
                    rows = row(spec, 2, MID if taken else FIRST)
                    taken.append(client.exchange(rows).copy())
