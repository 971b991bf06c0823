"""A league of unequal teams: which agents learn, and who may play the others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import murmur
from benchmarks.teams import hiding_configuration
from murmur.learner_service.checkpoint.contents import spec_text
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.learning.team_specs import View
from murmur.learner_service.serving.game import Game, opponent_view
from murmur.learner_service.serving.requests import EnvSession
from murmur.shared.config.experiment import LeagueConfig
from murmur.shared.process.errors import CheckpointError, MurmurError
from murmur.shared.wire.spec import ADJACENCY, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, TimeStep

TAG = EnvSpec(
    "tag",
    3,
    (ArraySpec("view", "float32", (2,)), ArraySpec("clock", "float32", (1,), False)),
    Discrete(5),
    agents=("hunter_0", "prey_0", "hunter_1"),
)
FILE = Path("opponent.pt")


def game(*agents: int | str, **options: Any) -> Game:
    config = LeagueConfig(**{"agents": agents, "checkpoints": ("x",), **options})
    return Game.of(TAG, config)


def test_the_named_agents_learn_and_the_others_are_played() -> None:
    for named in (("hunter",), (0, "hunter_1"), (0, 2)):
        found = game(*named)
        assert found.team.spec.agents == ("hunter_0", "hunter_1")
        assert found.others.spec.agents == ("prey_0",)
        assert found.own_rows == [0, 2]
        assert found.other_rows == slice(1, 2)
        assert found.order == [0, 2, 1]  # of hunter_0, hunter_1, prey_0


@pytest.mark.parametrize(
    ("agents", "options", "error"),
    [
        (("prei",), {}, r"league.agents: 'tag' has no agent 'prei'; did you mean 'prey'"),
        ((3,), {}, r"no agent 3; 0 to 2 are there"),
        (("hunter", "prey"), {}, r"are all agents of 'tag'"),
        (("hunter",), {"latest": 0.5}, r"acts for 2 agents of 'tag' and cannot play the other 1"),
        (("hunter",), {"size": 4}, r"league.size=4"),
    ],
)
def test_agents_that_no_league_can_have_are_refused(
    agents: tuple[int | str, ...], options: dict[str, Any], error: str
) -> None:
    with pytest.raises(MurmurError, match=error):
        game(*agents, **options)


def test_named_agents_need_opponents_and_play_no_latest_policy() -> None:
    assert LeagueConfig(agents=("prey",), checkpoints=("x",)).latest == 0
    assert LeagueConfig(checkpoints=("x",)).latest == 0.5
    with pytest.raises(ValueError, match="the other agents need opponents"):
        LeagueConfig(agents=("prey",))


def test_an_opponent_acts_for_the_others_or_for_all() -> None:
    tag = game("hunter")
    whole = View.of("", (0, 1, 2), TAG, centralized=False)
    for view, wanted in ((tag.others, (1,)), (whole, (0, 1, 2))):
        state = {"spec": spec_text(view.spec)}
        assert opponent_view(FILE, state, tag, plays_itself=False).agents == wanted
    state = {"spec": spec_text(tag.team.spec)}
    with pytest.raises(CheckpointError, match=r"a run that acts for prey_0, or for all agents"):
        opponent_view(FILE, state, tag, plays_itself=False)


def test_a_team_is_shown_whom_of_its_own_it_hears() -> None:
    spec = replace(TAG, observations=(*TAG.observations, ArraySpec(ADJACENCY, "uint8", (3,))))
    found = Game.of(spec, LeagueConfig(agents=("hunter",), checkpoints=("x",)))
    assert found.team.spec.observation(ADJACENCY) == ArraySpec(ADJACENCY, "uint8", (2,))
    edges = np.array([[[0, 1, 0], [1, 0, 1], [1, 0, 0]]], np.uint8)
    seen: dict[str, Array] = {
        "view": np.zeros((1, 3, 2), np.float32),
        "clock": np.zeros((1, 1), np.float32),
        ADJACENCY: edges,
    }
    rows = TimeStep(
        np.ones(1, np.uint8), np.zeros((1, 3), np.float32), np.ones(1, np.float32), seen
    )
    session = EnvSession("x", spec, 1, 0, np.zeros(1, np.int64))
    assert session.of_agents(rows, found.own_rows).observation[ADJACENCY].tolist() == [
        [[0, 0], [1, 0]]
    ]


class Sums(Policy):
    """Acts by what it sees, and remembers the sum."""

    memory_size = 1

    def act(self, observation: Any, generator: Any, memory: Any = None) -> dict[str, torch.Tensor]:
        total = memory + observation["view"].sum(-1, keepdim=True)
        return {"action": total[..., 0].int(), "memory": total}


@pytest.mark.parametrize("told", [(1,), (0, 1, 2)])
def test_a_seated_policy_plays_its_agents_and_remembers(told: tuple[int, ...]) -> None:
    tag = game("hunter")
    policy = tag.assign(Sums(), View.of("", told, TAG, centralized=False))
    view = torch.tensor([[[1.0, 1.0], [2.0, 3.0], [4.0, 0.0]]])
    memory = torch.zeros(1, 3, 1)
    for total in (5, 10):  # of 2 + 3
        acted = policy.act({"view": view, "clock": torch.zeros(1, 1)}, None, memory)
        memory = acted["memory"]
        assert acted["action"].tolist() == [[total]]
        assert memory.shape == (1, 3, 1)


@pytest.mark.long
@pytest.mark.system
def test_seekers_learn_against_hiders_of_other_runs(tmp_path: Path) -> None:
    """One opponent acts for all agents, by teams of other networks, the other for the hider."""

    runs = {}

    def learn(name: str, lure: int, **sections: Any) -> str:
        config = hiding_configuration(1, lure, 1024, **sections)
        runs[name] = murmur.train(config, run=tmp_path / name, progress=False)
        return str(next((tmp_path / name / "checkpoints").glob("update-*.pt")))

    teams = {"seeker": {"gamma": 0.5}, "hider": {"network": {"hidden": [8], "recurrent": 4}}}
    both = learn("all", 1, algorithm={"teams": teams})
    policy = murmur.load(tmp_path / "all", "latest")
    assert policy.act(np.zeros((3, 5), np.float32)).shape == (3,)
    hider = learn("hider", 2, league={"agents": ["hider"], "checkpoints": [both]})
    league = {"agents": ["seeker"], "checkpoints": [both, hider]}
    seekers = learn("seekers", 1, league=league)
    assert 0 <= runs["seekers"].evaluate(episodes=4).summary()["return"].mean <= 2
    assert murmur.load(tmp_path / "seekers", "latest").agents == ("seeker_0", "seeker_1")
    with pytest.raises(MurmurError, match=r"a run that acts for hider_0, or for all agents"):
        learn("wrong", 1, league={"agents": ["seeker"], "checkpoints": [seekers]})
