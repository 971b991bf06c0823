"""The league: who plays, how well, and that what happened to the other team is not learned from."""

import json
import shutil
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.algorithms.mappo import Config, Mappo
from murmur.learner_service.checkpoint.contents import saved_spec, spec_text
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.ranks.group import Group
from murmur.learner_service.serving.game import Opponent, Pairing, check_opponent, team_spec
from murmur.learner_service.serving.league import League
from murmur.learner_service.serving.requests import EnvSession
from murmur.learner_service.serving.staging import HostStaging
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import LeagueConfig
from murmur.shared.process.errors import CheckpointError, SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.seeding import episode_seeds, uniform
from murmur.shared.wire.spec import EXPERT_ACTION, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import TimeStep
from tests.learner_service.running import experiment, learner_process, play, running_learner
from tests.learner_service.test_loop import same, start_player
from tests.learner_service.toys import CPU, FIRST, LAST, MID, MatrixGame, row, vector_spec
from tests.ranks.processes import Ranks
from tests.waiting import wait_until
from tests.wire import Client, Refused

BOTH = vector_spec(num_agents=4, masked=True)  # two teams of two


def mappo(seed: int, recurrent: int = 0) -> Mappo:
    network = PluginConfig(name="mlp", hidden=(8,), recurrent=recurrent)
    return Mappo(Config(), team_spec(BOTH), network, Precision("fp32", CPU), CPU, seed)


def staging() -> HostStaging:
    return HostStaging(torch.Generator(), None, Graphs(CPU))


def league(**options: Any) -> League:
    return League(LeagueConfig(**{"size": 3, **options}), 1, CPU)


def opponents(*points: float) -> tuple[Opponent, ...]:
    return tuple(Opponent(str(i), mappo(i).make_policy(), p) for i, p in enumerate(points))


def rows(types: list[int], reward: list[list[float]]) -> TimeStep:
    n = len(types)
    return TimeStep(
        np.array(types, np.uint8), np.array(reward, np.float32), np.ones(n, np.float32), {}
    )


def test_a_team_is_half_of_the_agents() -> None:
    assert team_spec(BOTH) == vector_spec(num_agents=2, masked=True)
    with pytest.raises(SpecError, match=r"'toy' has 3 agents: .*environment.control=both"):
        team_spec(vector_spec(num_agents=3))


def test_each_team_is_given_its_agents() -> None:
    spec = EnvSpec(
        "toy",
        4,
        (ArraySpec("view", "float32", (1,)), ArraySpec("clock", "float32", (1,), False)),
        Discrete(2),
    )
    both = row(spec, 1, MID)
    both.reward[:] = [[1, 2, 3, 4]]
    both.observation["view"][:] = np.array([[[5], [6], [7], [8]]])
    session = EnvSession("w", spec, 1, 0, np.zeros(1, np.int64))
    own, other = (session.of_agents(both, team) for team in (slice(2), slice(2, None)))
    assert (own.reward.tolist(), other.reward.tolist()) == ([[1, 2]], [[3, 4]])
    assert own.observation["view"].ravel().tolist() == [5, 6]
    assert other.observation["view"].ravel().tolist() == [7, 8]
    assert other.observation["clock"].tolist() == own.observation["clock"].tolist()


def _shared(group: Group, noted: list[list[float]]) -> list[tuple[float, int]]:
    """Points after each rank has noted its results against three opponents."""
    pool = League(LeagueConfig(every_updates=5), 1, CPU, group)
    for name in "abc":
        pool.add(name, mappo(0).make_policy())
    for opponent, points in zip(pool.opponents, noted[group.rank], strict=True):
        opponent.points, opponent.episodes = points, int(8 * points)
    pool.share_points(4)  # not due
    pool.share_points(5)
    return [(opponent.points, opponent.episodes) for opponent in pool.opponents]


def test_ranks_share_points_by_episodes_played() -> None:
    """0.75 of 6 episodes and 0.25 of 2: 0.625; of one rank's alone: its own; of none: as before."""
    with Ranks() as two:
        both = two.call(_shared, [[0.75, 0.5, 0.0], [0.25, 0.0, 0.0]])
    assert both == [[(0.625, 0), (0.5, 0), (0.0, 0)]] * 2


def test_points_and_weights_by_hand() -> None:
    opponent = Opponent("a", mappo(0).make_policy())
    assert opponent.weight == 0.25  # (1 - 0.5)^2
    opponent.record_result(1.0)
    assert opponent.points == pytest.approx(0.51)  # 0.5 + 0.5 / 50
    opponent.points = 1.0
    assert opponent.weight == 0.05  # never quite forgotten


def test_whoever_has_more_reward_wins() -> None:
    one = league()
    pairing = Pairing([*opponents(0.5), None, None], np.zeros(3), [None] * 3)
    noted = {name: deque[float]() for name in ("points_past", "points_latest")}
    one.score(pairing, rows([MID] * 3, [[1, 2]] * 3), rows([MID] * 3, [[4, 0]] * 3), noted)
    assert pairing.lead.tolist() == [-1, -1, -1]
    last = [LAST, LAST, MID]
    one.score(pairing, rows(last, [[2, 0], [1, 0], [9, 9]]), rows(last, [[0, 0]] * 3), noted)
    # leads 1, 0, and 17 in an episode that continues
    assert noted == {"points_past": deque([1.0]), "points_latest": deque([0.5])}
    assert pairing.opponents[0] is not None
    assert pairing.opponents[0].points == pytest.approx(0.51)


def test_a_game_is_drawn_though_its_rewards_are_rounded() -> None:
    pairing, noted = Pairing.of(1), {"points_latest": deque[float]()}
    own, other = rows([LAST], [[0.8, 0.6]]), rows([LAST], [[1.4, 0.0]])
    league().score(pairing, own, other, noted)
    assert pairing.lead[0] != 0  # 1e-7, in float32
    assert noted == {"points_latest": deque([0.5])}


def test_opponents_are_drawn_by_their_weights() -> None:
    one, n = league(latest=0.4), 20_000
    one._past_policies = opponents(0.5, 0.8, 1.0)  # weights 0.25, 0.05 (at least), 0.05
    pairing, again = Pairing.of(n), Pairing.of(n)
    begins, slots = np.ones(n, np.bool_), np.arange(n)
    episodes = np.zeros(n, np.int64)
    one.draw(pairing, begins, slots, episodes)
    drawn = Counter(o.file if o else "latest" for o in pairing.opponents)
    shares = {"latest": 0.4, "0": 0.6 * 5 / 7, "1": 0.6 / 7, "2": 0.6 / 7}
    for name, share in shares.items():
        assert drawn[name] / n == pytest.approx(share, abs=0.015)
    # The draw is a pure function of slot and episode, and leaves running episodes alone.
    begins[::2] = False
    again.lead[:] = 7
    one.draw(again, begins, slots, episodes)
    assert again.opponents[1::2] == pairing.opponents[1::2]
    assert again.opponents[::2] == [None] * (n // 2)
    assert again.lead.tolist() == [7, 0] * (n // 2)
    one.draw(again, ~begins, slots, episodes + 1)
    assert again.opponents[::2] != pairing.opponents[::2]


def test_an_episodes_seed_does_not_tell_who_plays() -> None:
    one, n = league(latest=0.4), 20_000
    one._past_policies = opponents(0.5)
    pairing, slots, episodes = Pairing.of(n), np.arange(n), np.zeros(n, np.int64)
    one.draw(pairing, np.ones(n, np.bool_), slots, episodes)
    latest = np.array([o is None for o in pairing.opponents])
    told = uniform(episode_seeds(1, slots, episodes), 1)[0] < 0.4  # the league's run seed is 1
    assert (told == latest).mean() == pytest.approx(0.4**2 + 0.6**2, abs=0.02)  # by chance alone


def test_everybody_acts_on_the_rows_where_he_plays() -> None:
    one = league()
    a, b = opponents(0.5, 0.5)
    latest = mappo(9).make_policy()
    pairing = Pairing([a, None, b, a, None], np.zeros(5), [None] * 5)
    other = row(team_spec(BOTH), 5, MID)
    view = np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32)
    seen = {"view": view, "action_mask": np.ones((5, 2, 3), np.uint8)}
    other = TimeStep(other.step_type, other.reward, other.discount, seen)
    (action,) = one.act([(pairing, other)], latest, None, staging())
    tensors = {k: torch.from_numpy(v) for k, v in seen.items()}
    for env, policy in enumerate([a.policy, latest, b.policy, a.policy, latest]):
        alone = policy.act({k: v[env : env + 1] for k, v in tensors.items()}, None)
        assert action[env].tolist() == alone["action"][0].tolist()
    assert action.dtype == np.int32


def test_opponents_act_once_on_the_rows_of_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    one, latest = league(), mappo(9).make_policy()
    a, b = opponents(0.5, 0.5)
    random, games, alone, calls = np.random.default_rng(0), [], [], []
    for players in ([a, None, b], [b, a], [None]):
        n = len(players)
        view = random.normal(size=(n, 2, 4)).astype(np.float32)
        seen = {"view": view, "action_mask": np.ones((n, 2, 3), np.uint8)}
        step = TimeStep(
            np.full(n, MID, np.uint8), np.zeros((n, 2), np.float32), np.ones(n, np.float32), seen
        )
        games.append((Pairing(list(players), np.zeros(n), [None] * n), step))
    for game in games:
        alone += one.act([game], latest, None, staging())
    for policy in (a.policy, b.policy, latest):
        act = policy.act

        def counted(*args: Any, act: Any = act) -> Any:
            calls.append(act)
            return act(*args)

        monkeypatch.setattr(policy, "act", counted)
    together = one.act(games, latest, None, staging())
    assert len(calls) == 3
    for mine, its in zip(together, alone, strict=True):
        assert mine.tolist() == its.tolist()


def test_opponents_remember_until_their_episode_ends() -> None:
    one = league(latest=0.0)
    policy = mappo(0, recurrent=3).make_policy()
    one.add("/opponent.pt", policy)
    pairing, n = Pairing.of(2), 2
    view = np.random.default_rng(0).normal(size=(3, n, 2, 4)).astype(np.float32)
    mask = np.ones((n, 2, 3), np.uint8)
    memory = torch.zeros(n, 2, 3)
    slots, episodes = np.arange(n), np.zeros(n, np.int64)
    for t, types in enumerate([[FIRST, FIRST], [MID, MID], [MID, FIRST]]):
        begins = np.array(types) == FIRST
        one.draw(pairing, begins, slots, episodes)
        memory[begins] = 0
        seen = {"view": view[t], "action_mask": mask}
        rewards = np.zeros((n, 2), np.float32)
        other = TimeStep(np.array(types, np.uint8), rewards, np.ones(n, np.float32), seen)
        (action,) = one.act([(pairing, other)], mappo(9).make_policy(), None, staging())
        acted = policy.act({k: torch.from_numpy(v) for k, v in seen.items()}, None, memory)
        memory = acted["memory"].clone()
        assert action.tolist() == acted["action"].tolist()
        for env in range(n):
            assert torch.equal(pairing.memory[env], memory[env])  # type: ignore[arg-type]


def test_oldest_policy_leaves_and_configured_opponents_stay() -> None:
    one = league(size=2, every_updates=5)
    assert [u for u in range(1, 16) if one.wants(u)] == [5, 10, 15]
    one.add("/opponent.pt", mappo(0).make_policy())
    for name in ("a", "b", "c"):
        one.keep(name, mappo(1).make_policy())
    assert [o.file for o in one.opponents] == ["/opponent.pt", "b", "c"]
    assert not league(size=0).wants(50)


def test_a_league_is_saved_and_restored() -> None:
    one = league(size=2)
    one.add("/opponent.pt", mappo(0).make_policy())
    for name in ("a", "b"):
        one.keep(name, mappo(1).make_policy())
    pairing = one.pair(np.array([4, 5]))
    left = Opponent("long gone", mappo(2).make_policy())
    pairing.opponents[:], pairing.lead[:] = [one.opponents[1], left], [2.0, -1.0]
    one.opponents[0].points = 0.9
    two = league(size=2)
    two.add("/opponent.pt", mappo(0).make_policy())
    loaded: list[str] = []

    def load(file: str) -> Any:
        loaded.append(file)
        return mappo(1).make_policy()

    two.load_state_dict(one.state_dict(), load)
    assert loaded == ["a", "b", "long gone"]
    assert [(o.file, o.points) for o in two.opponents] == [
        ("/opponent.pt", 0.9),
        ("a", 0.5),
        ("b", 0.5),
    ]
    again = two.pair(np.array([3, 4, 5]))
    assert [o.file if o else None for o in again.opponents] == [None, "a", "long gone"]
    assert again.opponents[1] is two.opponents[1]
    assert again.lead.tolist() == [0, 2, -1]


def test_opponent_removed_from_the_configuration_leaves() -> None:
    one = league(size=2)
    one.add("/opponent.pt", mappo(0).make_policy())
    one.keep("a", mappo(1).make_policy())
    pairing = one.pair(np.array([0, 1]))
    pairing.opponents[:] = one.opponents
    pairing.memory[0] = torch.ones(1, 3)
    two = league(size=2)
    loaded: list[str] = []

    def load(file: str) -> Any:
        loaded.append(file)
        return mappo(1).make_policy()

    two.load_state_dict(one.state_dict(), load)
    assert loaded == ["a"]
    assert [o.file for o in two.opponents] == ["a"]
    again = two.pair(np.array([0, 1]))  # the current policy plays in place of the removed one
    assert again.opponents == [None, two.opponents[0]]
    assert again.memory[0] is None


# ---------------------------------------------------------------- in a learner

LEAGUE: dict[str, Any] = {
    "learner": {"pipeline": "sync", "checkpoint_every_updates": 2},
    "league": {"size": 2, "every_updates": 4, "latest": 0.5},
    "algorithm": {"name": "mappo"},
}


def league_run(
    run_dir: Path, updates: int, resume: bool = False, recurrent: int = 0
) -> dict[str, Any]:
    """Two sessions of two matrix games, one agent against another; stops at `updates`."""
    network = {"recurrent": recurrent}
    config = experiment(run={"max_updates": updates}, network=network, **LEAGUE)
    with running_learner(run_dir, config, resume=resume) as learner:
        for player in [start_player(learner, slot, 10_000) for slot in (0, 2)]:
            player.join(60)
    return CheckpointFolder(run_dir, 1).load_latest()[1]


@pytest.mark.parametrize("recurrent", [0, 4])
def test_a_league_run_resumes_to_the_bit(tmp_path: Path, recurrent: int) -> None:
    whole = league_run(tmp_path / "whole", 16, recurrent=recurrent)
    league_run(tmp_path / "parts", 8, recurrent=recurrent)
    parts = league_run(tmp_path / "parts", 16, resume=True, recurrent=recurrent)
    if recurrent:
        assert all(memory.abs().sum() > 0 for *_, memory in whole["league"]["seats"])
    names = {p.name for p in (tmp_path / "whole" / "checkpoints").iterdir()}
    assert {f"league-{n:06d}.pt" for n in (4, 8, 12, 16)} <= names
    assert [file for file, _ in whole["league"]["opponents"]] == [
        "league-000012.pt",
        "league-000016.pt",
    ]
    for key in ("algorithm", "league", "slots", "generator"):
        assert same(whole[key], parts[key]), key


def test_only_the_own_team_is_learned_from(tmp_path: Path) -> None:
    config = experiment(evaluation={"every_updates": 100}, **LEAGUE | {"learner": {}})
    with running_learner(tmp_path, config) as learner:
        game = MatrixGame(MatrixGame.CLIMBING, 4, 5)
        with Client(learner.port, game.spec, 4) as client:
            play(client, client.hello(), game, 60)
        # An evaluation may bring the team alone, or both teams.
        alone = team_spec(game.spec)
        for spec in (alone, game.spec):
            with Client(learner.port, spec, 3) as client:
                client.hello(mode=pb.MODE_EVALUATE)
                assert client.exchange(row(spec, 3, FIRST)).shape == (3, spec.num_agents)
    state = CheckpointFolder(tmp_path, 1).load(tmp_path / "checkpoints" / "league-000004.pt")
    assert saved_spec(state) == alone
    lines = [json.loads(x) for x in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert lines[-1]["agent_steps"] == lines[-1]["env_steps"]  # a team of one


def test_a_full_disk_costs_a_policy_and_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = experiment(
        algorithm={"name": "mappo"},
        league={"size": 2, "every_updates": 1},
        evaluation={"every_updates": 1},
    )
    folder, game = tmp_path / "checkpoints", MatrixGame(MatrixGame.CLIMBING, 4, 5)
    with running_learner(tmp_path, config) as learner:

        def train_and_evaluate() -> None:
            with Client(learner.port, game.spec, 4) as client:
                play(client, client.hello(), game, 20)
            alone = team_spec(game.spec)
            with Client(learner.port, alone, 3) as client:
                client.hello(mode=pb.MODE_EVALUATE)
                for kind in (FIRST, MID, LAST):
                    client.exchange(row(alone, 3, kind, 2.0))

        folder.write_text("nothing can be written here")
        train_and_evaluate()
        for file in ("league-000001.pt", "best.pt"):
            words = f"cannot write checkpoint {folder / file}: "
            wait_until(lambda words=words: words in caplog.text)  # type: ignore[misc]
        wait_until(lambda: learner.metric("checkpoint_failures_total") >= 2)
        updates = learner.metric("updates_total")
        folder.unlink()  # there is room again
        train_and_evaluate()
        wait_until((folder / "best.pt").is_file)  # though its score is no better
        assert learner.metric("updates_total") > updates
    state = CheckpointFolder(tmp_path, 1).load_latest()[1]
    assert state["best"] == CheckpointFolder(tmp_path, 1).load(folder / "best.pt")["best"]
    assert all((folder / file).is_file() for file, _ in state["league"]["opponents"])


def test_a_league_needs_two_teams(tmp_path: Path) -> None:
    spec = vector_spec(num_agents=3)
    with (
        running_learner(tmp_path, experiment(**LEAGUE)) as learner,
        Client(learner.port, spec, 2) as client,
        pytest.raises(Refused, match="two equal teams, environment 'toy' has 3 agents"),
    ):
        client.hello()


def test_an_opponent_may_have_imitated() -> None:
    plain = team_spec(BOTH)
    told = replace(plain, observations=(*plain.observations, ArraySpec(EXPERT_ACTION, "int32", ())))
    check_opponent(Path("told.pt"), {"spec": spec_text(told)}, plain)
    check_opponent(Path("plain.pt"), {"spec": spec_text(plain)}, told)


def test_an_opponent_of_another_game_is_refused(tmp_path: Path) -> None:
    league_run(tmp_path / "other", 4)
    file = tmp_path / "opponent.pt"
    shutil.copy(tmp_path / "other" / "checkpoints" / "league-000004.pt", file)
    config = experiment(**{**LEAGUE, "league": {"checkpoints": [str(file)]}})
    game = MatrixGame(MatrixGame.CLIMBING, 2, 7)  # seven rounds, not five
    with learner_process(tmp_path / "run", config) as process:
        with Client(process.port, game.spec, 2) as client, pytest.raises(Refused):
            client.hello()
        code, errors = process.wait()
    assert code == 2
    assert f"opponent {file} was trained on something else than this run's team" in errors
    assert "max_episode_steps: 7 here, 5 there" in errors
    assert "Traceback" not in errors


def test_missing_opponent_is_an_error_with_a_message(tmp_path: Path) -> None:
    config = experiment(**{**LEAGUE, "league": {"checkpoints": ["nowhere.pt"]}})
    with (
        pytest.raises(CheckpointError, match=r"no checkpoint 'nowhere\.pt'"),
        running_learner(tmp_path, config),
    ):
        pytest.fail("it must not start")
