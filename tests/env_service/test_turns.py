"""PettingZoo's AEC environments behind the contract: one agent acts at a time."""

from typing import Any

import numpy as np
import pytest

from murmur.env_service.adapters.kinds import recognise
from murmur.env_service.adapters.sequential import SequentialVectorEnv
from murmur.env_service.checks import assert_environment, check_environment, describe_environment
from murmur.env_service.environment import RandomPolicy, VectorEnvironment, make_environment
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.codec import RowCheck
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, TURN_MASK, ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import StepType, TimeStep
from tests.turns import SCRIPTS, Scripted

# PettingZoo's own, of the way in which its classic games are named.
pytestmark = pytest.mark.filterwarnings("ignore:The old environment creation API")

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def plugin(factory: str = "tests.turns:Scripted", **options: Any) -> PluginConfig:
    return PluginConfig.model_validate({"name": "pettingzoo", "factory": factory, **options})


def game(num_envs: int = 1, *, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    made = make_environment(plugin(arguments=arguments, **(options or {})), num_envs)
    assert isinstance(made, SequentialVectorEnv)
    return made


def episode(environment: VectorEnvironment, action: Any = 1) -> list[TimeStep]:
    """Time steps of one episode in copy 0; every agent always gives this action."""
    n, spec = environment.num_envs, environment.spec
    t = environment.reset(np.zeros(n, np.uint64))
    steps = [copy(t)]
    shape = (n, spec.num_agents) if isinstance(spec.action, Discrete) else (n, spec.num_agents, 1)
    dtype = np.int32 if isinstance(spec.action, Discrete) else np.float32
    while t.step_type[0] != LAST:
        actions = np.full(shape, action, dtype)
        t = environment.step(actions, np.zeros(n, np.bool_), np.zeros(n, np.uint64))
        steps.append(copy(t))
    return steps


def copy(t: TimeStep) -> TimeStep:
    observation = {name: array.copy() for name, array in t.observation.items()}
    metrics = {name: array.copy() for name, array in t.metrics.items()}
    return TimeStep(t.step_type.copy(), t.reward.copy(), t.discount.copy(), observation, metrics)


def column(steps: list[TimeStep], name: str) -> list[Any]:
    return [t.observation[name][0].tolist() for t in steps]


def test_only_the_agent_with_the_turn_sees_acts_and_is_paid() -> None:
    environment = game()
    steps = episode(environment)
    assert column(steps, TURN_MASK) == [[1, 0], [1, 0], [0, 1], [1, 0], [0, 1], [0, 0]]
    assert [int(t.step_type[0]) for t in steps] == [FIRST, MID, MID, MID, MID, LAST]
    # b's 10 and 20 come with its first turn; at the end a gets the 5 that b's move brought.
    assert [t.reward[0].tolist() for t in steps] == [
        [0, 0],
        [1, 0],
        [0, 30],
        [2, 0],
        [0, 0],
        [5, 7],
    ]
    # An agent sees the moves made at its turn, and keeps that until the next one.
    assert [[x[0] for x in seen] for seen in column(steps, "observation")] == [
        [0, 0],
        [1, 0],
        [1, 102],
        [3, 102],
        [3, 104],
        [5, 105],
    ]
    own, waits = [0, 1, 1], [1, 0, 0]
    turns = [[own if turn else waits for turn in row] for row in column(steps, TURN_MASK)]
    assert column(steps, ACTION_MASK) == turns
    assert [t.discount[0] for t in steps] == [1, 1, 1, 1, 1, 0]
    assert steps[-1].metrics["return/a"] == [8]
    assert steps[-1].metrics["return/b"] == [37]
    taken = environment._environments[0].env.taken
    assert [agent for agent, _ in taken] == [agent for agent, _, _ in SCRIPTS["twice"]]


def test_an_agent_that_leaves_is_paid_and_acts_no_more() -> None:
    steps = episode(game(script="leaves"))
    assert column(steps, AGENT_MASK) == [[1, 1, 1]] * 4 + [[1, 0, 1]] * 3
    assert [row.index(1) for row in column(steps, TURN_MASK)[:-1]] == [0, 1, 2, 0, 2, 0]
    assert [t.reward[0].tolist() for t in steps[4:]] == [[0, -3, 0], [3, 0, 0], [6, 0, 10]]
    assert steps[-1].metrics["return/b"] == [-3]


def test_all_agents_see_their_last_observation_at_a_truncation() -> None:
    steps = episode(game(script="truncated"))
    assert steps[-1].discount[0] == 1
    assert steps[-1].observation["observation"][0].tolist() == [[2], [102]]
    assert steps[-1].reward[0].tolist() == [3, 3]
    assert column(steps, AGENT_MASK)[-1] == [1, 1]


def test_options_of_an_episode_reach_the_game() -> None:
    envs = game(2)
    envs.require_options({"level": 1})
    envs.set_options(0, {"level": 2})
    envs.reset(np.zeros(2, np.uint64))
    assert [e.env.unwrapped.options for e in envs._environments] == [{"level": 2}, None]


def test_nothing_of_an_episode_is_seen_in_the_next() -> None:
    environment = game()
    first, second = episode(environment), episode(environment)
    for before, after in zip(first, second, strict=True):
        for name, array in before.observation.items():
            assert (after.observation[name] == array).all()


@pytest.mark.parametrize("continuous", [False, True])
def test_actions_of_agents_that_wait_never_reach_the_game(continuous: bool) -> None:
    environment = game(masks=False, continuous=continuous)
    masked = environment.spec.observation(ACTION_MASK) is not None
    assert masked != continuous
    t, given = environment.reset(np.zeros(1, np.uint64)), []
    for k in range(5):
        dtype = np.float32 if continuous else np.int32
        action = np.array([[k / 10, -k / 10]] if continuous else [[k % 3, (k + 1) % 3]], dtype)
        given.append(action[0, t.observation[TURN_MASK][0].argmax()])
        shaped = action[..., None] if continuous else action
        t = environment.step(shaped, np.zeros(1, np.bool_), np.zeros(1, np.uint64))
    assert t.step_type[0] == LAST
    taken = [float(np.squeeze(action)) for _, action in environment._environments[0].env.taken]
    assert taken == pytest.approx(given)


@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize("masks", [True, False])
def test_games_of_turns_keep_the_contract(script: str, masks: bool) -> None:
    arguments = {"script": script, "masks": masks}
    assert_environment(lambda n: game(n, **arguments), 40)


def test_an_episode_may_be_cut_by_its_number_of_moves() -> None:
    steps = episode(game(options={"max_episode_steps": 2}))
    assert [t.reward[0].tolist() for t in steps] == [[0, 0], [1, 0], [0, 30]]
    # An agent that waits gets what it would get at its next turn.
    steps = episode(game(options={"max_episode_steps": 1}))
    assert [t.reward[0].tolist() for t in steps] == [[0, 0], [1, 10]]
    assert steps[-1].discount[0] == 1
    assert steps[-1].observation["observation"][0].tolist() == [[1], [101]]
    assert column(steps, TURN_MASK)[-1] == [0, 0]


def test_teams_of_a_game_are_the_agents_unless_they_are_named() -> None:
    assert game().spec.metrics[:2] == ("return/a", "return/b")
    named = game(options={"teams": {"one": ["a", "b"]}})
    assert named.spec.metrics[0] == "return/one"


@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3"])
def test_pettingzoos_classic_games_are_played_by_their_name(name: str) -> None:
    pytest.importorskip(
        "pygame", reason="PettingZoo's classic games need pygame: the extra classic"
    )
    factory = f"pettingzoo.classic.{name}:env"
    assert recognise(factory, {}) == "pettingzoo"
    assert_environment(lambda n: make_environment(plugin(factory), n), 30)
    environment = make_environment(plugin(factory), 3)
    assert "one agent acts at a time" in " ".join(
        describe_environment(lambda n: make_environment(plugin(factory), n), 60)
    )
    random, t = RandomPolicy(environment), environment.reset(np.arange(3, dtype=np.uint64))
    for _ in range(60):
        over = t.step_type == LAST
        t = environment.step(random.act(t), over, np.arange(3, dtype=np.uint64))
        turns = t.observation[TURN_MASK].sum(1)
        assert (turns == (t.step_type != LAST)).all()


def test_a_module_with_an_aec_environment_alone_is_named_by_env() -> None:
    pytest.importorskip(
        "pygame", reason="PettingZoo's classic games need pygame: the extra classic"
    )
    with pytest.raises(
        ConfigError, match=r"take turns: write pettingzoo\.classic\.tictactoe_v3:env"
    ):
        make_environment(plugin("pettingzoo.classic.tictactoe_v3:parallel_env"), 1)


class TwoAtOnce(VectorEnvironment):
    """A game of one step in which a wrong number of agents has the turn."""

    def __init__(self, num_envs: int, turns: int) -> None:
        self.num_envs, self._turns = num_envs, turns
        arrays = ArraySpec("x", "float32", (1,)), ArraySpec(TURN_MASK, "uint8", ())
        self.spec = EnvSpec("two", 2, arrays, Discrete(2))

    def step(self, action: Any, restart: Any, seeds: Any) -> TimeStep:
        turn = np.zeros((self.num_envs, 2), np.uint8)
        turn[restart, : self._turns] = 1
        return TimeStep(
            np.where(restart, FIRST, LAST).astype(np.uint8),
            np.zeros((self.num_envs, 2), np.float32),
            np.where(restart, 1, 0).astype(np.float32),
            {"x": np.ones((self.num_envs, 2, 1), np.float32), TURN_MASK: turn},
            {},
        )


@pytest.mark.parametrize(
    ("turns", "problem"), [(0, "gives no agent the turn"), (1, ""), (2, "where one agent acts")]
)
def test_one_agent_has_the_turn_while_an_episode_lasts(turns: int, problem: str) -> None:
    found = check_environment(lambda n: TwoAtOnce(n, turns), 4)
    assert [problem in said for said in found] == [True] * bool(problem)


class Cycles(Scripted):
    """Says its longest episode in cycles, as PettingZoo does: a turn of each agent."""

    max_cycles = 3


def test_a_cycle_is_a_step_of_each_agent() -> None:
    environment = make_environment(plugin(f"{__name__}:Cycles"), 1)
    assert environment.spec.max_episode_steps == 6
    episode(environment)
    assert environment.notices.pending == []


def test_rows_that_give_two_agents_the_turn_are_refused() -> None:
    environment = game(2)
    t = environment.reset(np.zeros(2, np.uint64))
    check = RowCheck(environment.spec, 2)
    assert check.passes(t)
    t.observation[TURN_MASK][1] = 1
    assert not check.passes(t)
    assert check.broken(t) == {
        1: "a turn_mask that gives agent 'a' and agent 'b' the turn, where one agent acts on FIRST"
    }
    t.observation[TURN_MASK][1] = 0
    t.step_type[0] = LAST
    assert not check.passes(t)
    assert check.broken(t) == {
        0: "a turn_mask that gives agent 'a' the turn, where no agent acts on LAST",
        1: "a turn_mask that gives no agent the turn, where one agent acts on FIRST",
    }
    t.step_type[1] = StepType.ABORTED
    t.observation[TURN_MASK][:] = 0
    assert check.passes(t)


def test_a_turn_mask_of_another_layout_is_refused() -> None:
    with pytest.raises(SpecError, match="'turn_mask' as float32"):
        EnvSpec("x", 2, (ArraySpec(TURN_MASK, "float32", ()),), Discrete(2))
