"""Former refusals are legal today, or their messages say what to do instead.

`ROWS` is the table "Formerly refused" of CHANGELOG.md. Each row is tried as a user would write it,
up to the specs and networks of a run. Trainings of what is legal are tests of their own, named in
the comments of the rows.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import typer
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, OneOf, Text, Tuple
from pettingzoo import ParallelEnv

from murmur.cli import app
from murmur.env_service.environment import make_environment
from murmur.env_service.sessions.worker import guarded_environment
from murmur.env_service.watchdog.faults import FaultCount
from murmur.learner_service.checkpoint.contents import spec_text
from murmur.learner_service.checkpoint.resize import with_agents
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.serving.game import Game, opponent_view
from murmur.runs.settings import with_plugin_defaults
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import (
    AugmentConfig,
    ExperimentConfig,
    ImitationConfig,
    LeagueConfig,
)
from murmur.shared.config.section import validate
from murmur.shared.process.errors import MurmurError
from murmur.shared.wire import spec as contract
from murmur.shared.wire.spec import (
    ACTION_MASK,
    ADJACENCY,
    EXPERT_ACTION,
    STATE,
    ArraySpec,
    Continuous,
    EnvSpec,
)
from tests.env_service.sessions.test_expert import expert_of
from tests.learner_service.export.test_policy import checkpoint
from tests.learner_service.toys import CPU
from tests.turns import Scripted

env = Scripted  # as PettingZoo's modules name games of turns

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
HEADING = "### Formerly refused"
INF = float("inf")
HYBRID = Dict({"say": Discrete(3), "go": Box(-1, 1, (2,))})
FREE = Box(-INF, INF, (2,))
HALF = Box(0, INF, (2,))
LARGE = MultiDiscrete([20, 20, 20])
SEEN = ArraySpec("seen", "float32", (2,))
IMAGE = ArraySpec("image", "uint8", (3, 16, 16))
THREE = contract.Discrete(3)
OFF_POLICY = "maddpg", "matd3", "masac", "ddpg", "td3", "sac"
ONE_CHOICE = "coma", "qmix", "vdn", "iql", "qplex"


class Play(gymnasium.Env):  # type: ignore[misc]
    """Observes noise, and acts in the space that it is given."""

    def __init__(self, acts: Any = None, sees: Any = None) -> None:
        self.action_space = acts or Discrete(3)
        self.observation_space = sees or Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        return self.observation_space.sample(), 0.0, False, True, {}


class Masked(Play):
    """Tells a mask in which all is legal."""

    def __init__(self, acts: Any, size: int) -> None:
        super().__init__(acts)
        self._info = {ACTION_MASK: np.ones(size, np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return super().reset(seed=seed)[0], self._info

    def step(self, action: Any) -> tuple[Any, ...]:
        return *super().step(action)[:4], self._info


class Team(ParallelEnv):  # type: ignore[misc]
    """Agents a and b, each with spaces of its own."""

    def __init__(self, acts: Any = None, sees: Any = None, state: Any = None) -> None:
        self.possible_agents = ["a", "b"]
        self._acts = acts or {}
        self._sees = sees or {}
        self._state = state
        self.state_space = state

    def action_space(self, agent: str) -> Any:
        return self._acts.get(agent, Discrete(3))

    def observation_space(self, agent: str) -> Any:
        return self._sees.get(agent, Box(-1, 1, (2,)))

    def state(self) -> Any:
        return self._state.sample()

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents = list(self.possible_agents)
        seen = {agent: self.observation_space(agent).sample() for agent in self.agents}
        return seen, {agent: {} for agent in self.agents}


def made(
    factory: str = "Play", algorithm: str = "mappo", *, options: Any = None, **arguments: Any
) -> EnvSpec:
    """The spec of an environment of this file, as a run with that algorithm gets it."""
    name = "pettingzoo" if factory == "Team" else "gymnasium"
    path = factory if ":" in factory else f"{__name__}:{factory}"
    if ":" in factory:
        name = "pettingzoo"
    section = {"name": name, "factory": path, "arguments": arguments, **(options or {})}
    plugin = validate(ExperimentConfig, {"environment": section}).environment
    return make_environment(plugin, 1, algorithm).spec


def spec(action: contract.ActionSpec = THREE, *observations: ArraySpec, agents: int = 2) -> EnvSpec:
    names = tuple("abcde"[:agents])
    return EnvSpec("toy", agents, observations or (SEEN,), action, agents=names)


def learner(
    algorithm: str = "mappo",
    of: EnvSpec | None = None,
    network: Mapping[str, Any] = {"name": "mlp", "hidden": [8]},
    *,
    imitation: ImitationConfig | None = None,
    augment: AugmentConfig | None = None,
    **options: Any,
) -> EnvSpec:
    """Build what a learner of that environment learns by; with options of a replay, that too."""
    of = of or spec()
    built = build_algorithm(
        validate(PluginConfig, {"name": algorithm, **options}),
        of,
        validate(PluginConfig, dict(network)),
        Precision("fp32", CPU),
        CPU,
        0,
        augment,
        imitation,
    )
    if "replay" in options:
        built.make_storage(of, 1)
    return of


def played(factory: str = "Play", algorithm: str = "mappo", **arguments: Any) -> EnvSpec:
    return learner(algorithm, made(factory, algorithm, **arguments))


def config(**sections: Any) -> ExperimentConfig:
    """A configuration, completed as at the start of a run."""
    return with_plugin_defaults(
        validate(ExperimentConfig, {"environment": {"name": "spread"}, **sections})
    )


def episodes(**options: Any) -> None:
    """Make an environment whose episodes differ by these options."""
    name = options.pop("name", "gymnasium")
    factory = {} if name != "gymnasium" else {"factory": f"{__name__}:Play"}
    section = {"name": name, **factory, **options}
    experiment = validate(ExperimentConfig, {"environment": section})
    guarded_environment(experiment, 1, FaultCount(0, lambda reason, episodes: None))


def game(**options: Any) -> Game:
    """A league's game of three agents."""
    return Game.of(spec(agents=3), validate(LeagueConfig, options))


def opponent(agents: tuple[str, ...]) -> None:
    """Let a policy that acts for these of the agents a, b, c play against a."""
    saved = EnvSpec("toy", len(agents), (SEEN,), THREE, agents=agents)
    against = game(agents=["a"], checkpoints=["x"])
    opponent_view(Path("x"), {"spec": spec_text(saved)}, against, plays_itself=False)


def resized(network: Mapping[str, Any]) -> None:
    """Let a policy that was trained for two agents act for five."""
    with_agents(checkpoint(spec(), {"name": "mappo"}, dict(network)), "best.pt", 5)


def command(name: str) -> None:
    assert name in typer.main.get_command(app).commands  # type: ignore[attr-defined]


def every(names: tuple[str, ...], attempt: Callable[[str], object]) -> None:
    """Try something with each algorithm; where it is refused, all must refuse it alike."""
    refused = []
    for name in names:
        try:
            attempt(name)
        except MurmurError as error:
            refused.append(error)
    if refused:
        assert len(refused) == len(names)
        assert len({re.sub(r"^\w+ ", "", str(error)) for error in refused}) == 1
        raise refused[0]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        before: what the earlier release said; … stands for words that are left out.
        today: what is said today, alike; of what is legal how to write it.
        attempt: what was refused.
        legal: whether it is legal today.
    """

    before: str
    today: str
    attempt: Callable[[], object]
    legal: bool = False

    @property
    def line(self) -> str:
        """The row as it stands in the table."""
        return f"| {self.before} | {'**legal**' if self.legal else 'refused'}: {self.today} |"


legal = partial(Row, legal=True)
TURNS = "tests.turns:Scripted"
SMALL = {"capacity_rows": 640, "start_rows": 64}
MEMORY = {"name": "mlp", "hidden": [8], "recurrent": 8}
LSTM = {**MEMORY, "recurrent_cell": "lstm"}
TEAMS = {"x": {"agents": ["a"], "actor_lr": 1e-3, "network": {"hidden": [4]}}, "y": {"agents": [1]}}
STATES = Dict({"a": Box(-1, 1, (3,)), "b": Box(-1, 1, (3,))})
CLONE = ImitationConfig(baseline="random")
ADVICE = ArraySpec(EXPERT_ACTION, "int32", ())
SHIFT = AugmentConfig(preset="random-shift")
CNN = {"name": "cnn", "hidden": [8]}
GRAPH = {"name": "graph", "width": 8, "heads": 2}

ROWS = (
    # Trainings: benchmarks/actions.py, tests/learner_service/algorithms/test_composite_actions.py.
    legal(
        "acts in a Tuple space; murmur takes Discrete, MultiDiscrete, MultiBinary and Box",
        "as it is, with `mappo`, `happo`, `ippo`, `ppo`; of choices alone with all algorithms",
        lambda: (
            played(acts=Tuple((Discrete(3), FREE, MultiBinary(2)))),
            every(ONE_CHOICE, lambda name: played("Play", name, acts=Tuple([Discrete(3)] * 2))),
        ),
    ),
    legal(
        "acts in a Dict space; murmur takes Discrete, MultiDiscrete, MultiBinary and Box",
        "the same",
        lambda: every(("mappo", "happo", "ippo", "ppo"), lambda n: played("Play", n, acts=HYBRID)),
    ),
    legal(
        "acts in Box(-inf, …), which has no bounds to scale [-1, 1] to",
        "as it is, also with one bound alone, with `mappo`, `happo`, `ippo`, `ppo`",
        lambda: (played(acts=FREE), played(acts=HALF)),
    ),
    legal(
        "acts in MultiDiscrete(…): 8000 combinations, more than 4096",
        "as it is, each choice by itself, with `mappo`, `happo`, `ippo`, `ppo`",
        lambda: (played(acts=LARGE), played(acts=MultiBinary(13))),
    ),
    legal(
        "agents … have continuous actions, … discrete ones; all must be of one kind",
        "as it is, with `mappo`, `happo`, `ippo`, `ppo`",
        lambda: played("Team", acts={"a": Discrete(3), "b": Box(-1, 1, (2,))}),
    ),
    legal(
        "gives an 'action_mask', but its actions are not Discrete",
        "the masks of all choices, one after the other or in a tuple",
        lambda: played("Masked", acts=MultiDiscrete([3, 4]), size=7),
    ),
    Row(
        "acts in a Text space; …",
        "agent 'agent' acts in a Text space; murmur takes Discrete, MultiDiscrete, MultiBinary, "
        "Box, and Tuple and Dict of them: wrap the environment in a factory of your own",
        lambda: made(acts=Text(5)),
    ),
    Row(
        "acts in a Dict space; … (of a space that is still not taken)",
        "agent 'agent' acts in a OneOf space at 'say.1'; murmur takes …",
        lambda: made(acts=Dict({"say": Tuple((Discrete(2), OneOf((Discrete(2), Discrete(3)))))})),
    ),
    Row(
        "'agent' observes a Text space; …",
        "'agent' observes a Text space; murmur takes Box, Discrete, MultiDiscrete, MultiBinary, "
        "and Dict and Tuple of them: wrap the environment in a factory of your own",
        lambda: made(sees=Text(5)),
    ),
    Row(
        "gives an 'action_mask', but its actions are not Discrete (of a Box)",
        "gives an 'action_mask', but its actions are numbers, of which none can be illegal; take "
        "the mask away in a factory of your own",
        lambda: made("Masked", acts=Box(-1, 1, (2,)), size=2),
    ),
    Row(
        "declares 'action_mask', but its actions are continuous; leave it out",
        "environment 'toy' declares 'action_mask', but its actions are continuous; leave it out",
        lambda: spec(Continuous(2), SEEN, ArraySpec(ACTION_MASK, "uint8", (2,))),
    ),
    Row(
        "acts in MultiDiscrete(…): 8000 combinations, more than 4096 (`coma`, `qmix`, `masac` …)",
        "agent 'agent' acts in MultiDiscrete([20 20 20]): 8000 combinations, more than 4096; use "
        "mappo, happo, ippo or ppo with environment.joint_actions: false, or choose some of them "
        "in a factory of your own",
        lambda: every((*ONE_CHOICE, *OFF_POLICY), lambda name: made("Play", name, acts=LARGE)),
    ),
    Row(
        "acts in a Dict space; … (`coma`, `qmix`, `masac` …)",
        "agent 'agent' acts in Dict(…), choices and numbers at once; only mappo, happo, ippo and "
        "ppo take both (environment.joint_actions: false); or wrap the environment in a factory "
        "of your own that gives continuous actions some fixed values to choose from",
        lambda: every((*ONE_CHOICE, *OFF_POLICY), lambda name: made("Play", name, acts=HYBRID)),
    ),
    Row(
        "agents … have continuous actions, … discrete ones; … (`coma`, `qmix`, `masac` …)",
        "agents 'b' have continuous actions, 'a' discrete ones; only mappo, happo, ippo and ppo "
        "take both …",
        lambda: every(
            (*ONE_CHOICE, *OFF_POLICY),
            lambda name: made("Team", name, acts={"b": Box(-1, 1, (2,))}),
        ),
    ),
    Row(
        "acts in Box(-inf, …), which has no bounds … (`maddpg`, `masac` …)",
        "needs actions with finite bounds, the same for all numbers; 'toy' has [-inf, inf]; use "
        "mappo, happo, ippo or ppo, or bound the actions in a factory of your own, for example "
        "with gymnasium.wrappers.TransformAction",
        lambda: every(OFF_POLICY, lambda name: learner(name, spec(Continuous(2, -INF, INF)))),
    ),
    Row(
        "acts in Box(0.0, inf, …), which has no bounds … (`maddpg`, `masac` …)",
        "needs actions with finite bounds, the same for all numbers; … has [0, inf]; use mappo, "
        "happo, ippo or ppo, or bound the actions …",
        lambda: every(OFF_POLICY, lambda name: played("Play", name, acts=HALF)),
    ),
    Row(
        "coma needs discrete actions; … use mappo, maddpg or masac",
        "needs discrete actions; 'toy' has Continuous(size=2, low=-1.0, high=1.0); use mappo, "
        "happo, ippo or ppo, or maddpg, matd3, masac, ddpg, td3 or sac",
        lambda: every(ONE_CHOICE, lambda name: learner(name, spec(Continuous(2, -1.0, 1.0)))),
    ),
    Row(
        "acts in Box(0.0, inf, …), which has no bounds … (`coma`, `qmix` …)",
        "needs discrete actions; … has 2 numbers with the bounds [0, inf]; use mappo, happo, "
        "ippo or ppo",
        lambda: every(ONE_CHOICE, lambda name: played("Play", name, acts=HALF)),
    ),
    Row(
        "zero-size array to reduction operation maximum … (of a Box without a number)",
        "has choices among [] alternatives and no number: nothing to learn; give it a choice among "
        "2 or more",
        lambda: made(acts=Box(-1, 1, (0,))),
    ),
    Row(
        "environment.team: true wants Tuple spaces with one entry for each agent; …",
        "environment.team: true wants Tuple spaces with one entry for each agent; this "
        "environment observes Box(…) and acts by Tuple(…)",
        lambda: made(acts=Tuple((Discrete(2), Discrete(2))), options={"team": True}),
    ),
    Row(
        "agent 'b' sees 'image' as …, another agent as …",
        "agent 'b' sees 'image' as …, another agent as …; set environment.resize to one "
        "size for all, or environment.images: none to flatten them",
        lambda: made(
            "Team",
            sees={
                "a": Box(0, 255, (40, 40, 3), np.uint8),
                "b": Box(0, 255, (48, 40, 3), np.uint8),
            },
        ),
    ),
    # Trainings: tests/benchmarks/test_turns.py.
    legal(
        "whose metadata does not say is_parallelizable: its agents take turns (AEC), and murmur "
        "steps all agents at once",
        "its name: `factory: pettingzoo.classic.connect_four_v3:env`, with `mappo`, `ippo`, `ppo`",
        lambda: every(("mappo", "ippo", "ppo"), lambda name: played(TURNS, name)),
    ),
    Row(
        "has no 'parallel_env': its agents take turns (AEC), …",
        "has no 'parallel_env': its agents take turns: write tests.test_former_refusals:env",
        lambda: made(f"{__name__}:parallel_env"),
    ),
    Row(
        "its agents take turns (AEC), … (`qmix`, `masac`, `coma` …)",
        "algorithm 'coma' learns from every agent in every step, and in 'scripted' agents take "
        "turns; set mappo, ippo or ppo",
        lambda: learner("coma", made(TURNS)),
    ),
    # Updates: tests/learner_service/algorithms/test_recurrent_actor_critic.py.
    legal(
        "network.recurrent = 64, but this algorithm has no use for memory",
        "as it is, with every algorithm",
        lambda: every(
            (*OFF_POLICY, *ONE_CHOICE, "happo"), lambda name: learner(name, network=MEMORY)
        ),
    ),
    legal(
        "unknown key 'network.recurrent_cell'",
        "`network: {name: mlp, recurrent: 64, recurrent_cell: lstm}`",
        lambda: every(
            (*OFF_POLICY, *ONE_CHOICE, "happo"), lambda name: learner(name, network=LSTM)
        ),
    ),
    Row(
        "algorithm.replay.prioritized=true is not supported with a recurrent network, …",
        "algorithm.replay.prioritized=true is not supported with a recurrent network: it is for "
        "single rows, and memory is learned from whole sequences; set it to false, or "
        "network.recurrent=0",
        lambda: learner("masac", network=MEMORY, replay={**SMALL, "prioritized": True}),
    ),
    Row(
        "algorithm.replay.n_step=3 is not supported with a recurrent network, …",
        "algorithm.replay.n_step=3 is not supported …; set it to 1, or network.recurrent=0",
        lambda: learner("qmix", network=MEMORY, replay={**SMALL, "n_step": 3}),
    ),
    Row(
        "network.frame_stack and network.recurrent cannot be combined with a replay; …",
        "network.frame_stack=2 and network.recurrent cannot be combined with a replay; set "
        "network.frame_stack=1, or network.recurrent=0",
        lambda: learner(
            "qmix",
            spec(THREE, IMAGE),
            {**CNN, "recurrent": 8, "frame_stack": 2},
            replay=SMALL,
        ),
    ),
    Row(
        "augment: a recurrent network with a replay learns from whole sequences, …",
        "augment: a recurrent network with a replay learns from whole sequences, which are not "
        "augmented; leave out the section augment, or set network.recurrent=0",
        lambda: learner(
            "qmix", spec(THREE, IMAGE), {**CNN, "recurrent": 8}, augment=SHIFT, replay=SMALL
        ),
    ),
    Row(
        "algorithm.critic_network.recurrent: policy and critic are fed and remember alike",
        "algorithm.critic_network.recurrent: policy and critic are fed and remember alike; set "
        "network.recurrent for both",
        lambda: learner(network=MEMORY, critic_network={"recurrent": 0}),
    ),
    # Trainings: tests/system/test_training.py, case "curriculum".
    legal(
        "unknown key 'environment.curriculum'",
        "`environment.curriculum: {wind: {from: 0, to: 10, over_env_steps: 1e6}}`",
        lambda: episodes(curriculum={"wind": {"from": 0, "to": 10, "over_env_steps": 1e6}}),
    ),
    legal(
        "unknown key 'environment.randomize'",
        "`environment.randomize: {mass: [0.5, 2]}`",
        lambda: episodes(randomize={"mass": [0.5, 2]}),
    ),
    Row(
        "unknown key 'environment.randomize' (of an environment that has no such option)",
        "environment 'memory' takes no option 'mass' of an episode, which environment.curriculum "
        "or environment.randomize names; …",
        lambda: episodes(name="memory", randomize={"mass": [0.5, 2]}),
    ),
    # Trainings: tests/learner_service/learning/test_teams.py.
    legal(
        "unknown key 'algorithm.teams'",
        "`algorithm.teams: {x: {agents: [a], actor_lr: 1e-3}, y: {agents: [1]}}`, with `mappo`, "
        "`happo`, `ippo`, `ppo`",
        lambda: every(("mappo", "happo", "ippo", "ppo"), lambda name: learner(name, teams=TEAMS)),
    ),
    Row(
        "unknown key 'algorithm.teams' (`coma`, `qmix`, `masac` …)",
        "teams: this algorithm trains all agents together, from one replay or by critics that see "
        "what all of them do; set algorithm.name to mappo, happo, ippo or ppo, or leave teams "
        "out: share_parameters gives agents networks of their own",
        lambda: every((*ONE_CHOICE, *OFF_POLICY), lambda name: learner(name, teams=TEAMS)),
    ),
    # Trainings: tests/learner_service/layers/test_own_state.py.
    legal(
        "declares 'state' … of each agent; the name is reserved for … all agents together",
        '`ArraySpec("state", "float32", (3,))`, which is `per_agent=True`',
        lambda: every(
            ("mappo", "coma", "qmix", "qplex", "maddpg", "masac", "happo"),
            lambda name: learner(name, spec(THREE, SEEN, ArraySpec(STATE, "float32", (3,)))),
        ),
    ),
    legal(
        "state() gives a Dict(…)",
        "a Dict with a state of each agent",
        lambda: learner(of=made("Team", state=STATES, options={"state": True})),
    ),
    Row(
        "state() gives a Dict(…) (of other parts)",
        "state() gives a Dict(…); give one array, a Dict with a state of each agent (a, b), or "
        "set environment.state: false",
        lambda: made("Team", state=Dict({"x": FREE, "y": FREE}), options={"state": True}),
    ),
    # A training: tests/learner_service/serving/test_unequal_league.py, its long test.
    legal(
        "a league plays two equal teams, environment 'toy' has 3 agents",
        "`league: {agents: [a], checkpoints: [FILE]}`",
        lambda: game(agents=["a"], checkpoints=["x"]),
    ),
    legal(
        "opponent … was trained on something else than this run's team",
        "a policy of all agents, or of the agents that do not learn",
        lambda: (opponent(("a", "b", "c")), opponent(("b", "c"))),
    ),
    Row(
        "a league plays two equal teams, … (without `league.agents`)",
        "a league plays two equal teams, environment 'toy' has 3 agents: let the learner act for "
        "both (in snakes: environment.control=both), name the agents that learn by "
        "league.agents, or set league.size=0 and league.checkpoints=[]",
        lambda: game(size=4),
    ),
    Row(
        "opponent … was trained on something else than this run's team: … (of other agents)",
        "opponent x was trained on something else than what league.agents leaves to opponents: …; "
        "name a checkpoint of a run that acts for b, c, or for all agents, or take it out of "
        "league.checkpoints",
        lambda: opponent(("a",)),
    ),
    # Trainings: tests/learner_service/networks/test_team_networks.py.
    legal(
        "no network 'attention'",
        "`network: {name: attention}`",
        lambda: learner(
            of=spec(THREE, SEEN, ArraySpec("foes", "float32", (3, 2))),
            network={"name": "attention", "width": 8, "heads": 2},
        ),
    ),
    legal(
        "no network 'graph'",
        "`network: {name: graph}`",
        lambda: learner(of=spec(THREE, SEEN, ArraySpec(ADJACENCY, "uint8", (2,))), network=GRAPH),
    ),
    legal(
        "unknown key 'environment.arrays'",
        "`environment.arrays: [foes]` keeps a key of a Dict observation an array",
        lambda: made(sees=Dict({"foes": Box(-1, 1, (3, 2))}), options={"arrays": ["foes"]}),
    ),
    Row(
        "no network 'lstm'; known: …",
        "no network 'lstm'; lstm is network: {name: mlp, recurrent: 64, recurrent_cell: lstm}",
        lambda: learner(network={"name": "lstm"}),
    ),
    Row(
        "no network 'gnn'; did you mean 'cnn'?",
        "no network 'gnn'; gnn is network: {name: graph}",
        lambda: learner(network={"name": "gnn"}),
    ),
    Row(
        "no network 'transformer'; did you mean 'segformer'?",
        "no network 'transformer'; it is not built here; the nearest is network: {name: attention}",
        lambda: learner(network={"name": "transformer"}),
    ),
    Row(
        "network … has one parameter group for all agents, 2 are wanted; …",
        "network 'graph' has one parameter group for all agents, 2 are wanted; let all agents "
        "share their parameters (algorithm.share_parameters: true), or use a network that "
        "declares STACKED, such as mlp or cnn",
        lambda: learner(
            of=spec(THREE, SEEN, ArraySpec(ADJACENCY, "uint8", (2,))),
            network=GRAPH,
            share_parameters=False,
        ),
    ),
    # Trainings: tests/learner_service/test_resize.py.
    legal(
        "checkpoint … is of another environment: num_agents: …",
        "`murmur evaluate RUN` by the environment's number of agents, `murmur.load(RUN, "
        "num_agents=5)`, `murmur export --agents 5`",
        lambda: resized({"name": "mlp", "hidden": [8], "agent_id": False}),
    ),
    Row(
        "checkpoint … is of another environment: num_agents: … (of a network that is fed it)",
        "checkpoint best.pt is of 2 agents and cannot act for 5: network.agent_id=true feeds each "
        "agent's number; train with false",
        lambda: resized({"name": "mlp", "hidden": [8]}),
    ),
    # Trainings: test_happo.py and test_qplex.py in tests/learner_service/algorithms.
    legal(
        "no algorithm 'happo'; it is not built here",
        "`algorithm.name: happo`",
        lambda: learner("happo"),
    ),
    legal(
        "no algorithm 'qplex'; it is not built here",
        "`algorithm.name: qplex`",
        lambda: learner("qplex"),
    ),
    Row(
        "no algorithm 'dmaq'; …",
        "no algorithm 'dmaq'; dmaq is algorithm: {name: qplex}",
        lambda: learner("dmaq"),
    ),
    Row(
        "no algorithm 'hatrpo'; … the nearest is … {name: mappo, share_parameters: false}",
        "no algorithm 'hatrpo'; it is not built here; the nearest is algorithm: {name: happo}",
        lambda: learner("hatrpo"),
    ),
    Row(
        "no algorithm 'qtran'; … the nearest is algorithm: {name: qmix}",
        "no algorithm 'qtran'; it is not built here; the nearest is algorithm: {name: qplex}",
        lambda: learner("qtran"),
    ),
    Row(
        "no algorithm 'wqmix'; … the nearest is algorithm: {name: qmix}",
        "no algorithm 'wqmix'; it is not built here; the nearest is algorithm: {name: qplex}",
        lambda: learner("wqmix"),
    ),
    Row(
        "no algorithm 'mat'; …",
        "no algorithm 'mat'; it is not built here; the nearest is algorithm: {name: mappo}",
        lambda: learner("mat"),
    ),
    Row(
        "no algorithm 'maac'; …",
        "no algorithm 'maac'; it is not built here; the nearest is algorithm: {name: masac}",
        lambda: learner("maac"),
    ),
    # Trainings: tests/system/test_offline_training.py, tests/learner_service/test_offline.py.
    legal(
        "No such command 'record'",
        "`murmur record RUN --out FOLDER`",
        lambda: command("record"),
    ),
    legal(
        "unknown key 'algorithm.replay.dataset'",
        "`algorithm: {name: masac, replay: {dataset: FOLDER}}`",
        lambda: config(algorithm={"name": "masac", "replay": {"dataset": "x"}}),
    ),
    legal(
        "unknown key 'imitation.dataset'",
        "`imitation.dataset: FOLDER`",
        lambda: config(imitation={"dataset": "x"}, algorithm={"name": "mappo"}),
    ),
    legal(
        "unknown key 'run.offline'",
        "`run: {offline: true}` with one of the two datasets",
        lambda: config(
            run={"offline": True}, imitation={"dataset": "x"}, algorithm={"name": "mappo"}
        ),
    ),
    legal(
        "declares 'expert_action', but its actions are continuous; leave it out",
        "`imitation.dataset` clones actions of every kind",
        lambda: learner(of=spec(Continuous(2, -1.0, 1.0)), imitation=ImitationConfig(dataset="x")),
    ),
    Row(
        "imitation.baseline: algorithm 'masac' does not imitate; set coma, mappo, ippo or ppo, …",
        "imitation: algorithm 'masac' does not imitate; set coma, mappo, happo, ippo or ppo, or "
        "leave imitation out: its replay takes recorded episodes, algorithm.replay.dataset",
        lambda: learner("masac", spec(THREE, SEEN, ADVICE), imitation=CLONE),
    ),
    Row(
        "imitation.baseline=…: actions of … are continuous; imitation needs discrete ones",
        "imitation.baseline=random: actions of … are continuous; imitation needs discrete ones; to "
        "clone others, record episodes (murmur record --baseline random) and set imitation.dataset",
        lambda: expert_of(
            "random", name="gymnasium", factory=f"{__name__}:Play", arguments={"acts": FREE}
        ),
    ),
    Row(
        "imitation: a run with a source has no baseline; leave it out",
        "imitation: a run with a source has no actions; leave it out",
        lambda: validate(
            ExperimentConfig, {"source": {"name": "faces"}, "imitation": {"baseline": "x"}}
        ),
    ),
    Row(
        "league: a run with a source has no opponents; leave it out",
        "league: a run with a source has no opponents; leave it out",
        lambda: validate(ExperimentConfig, {"source": {"name": "faces"}, "league": {"size": 3}}),
    ),
    Row(
        "algorithm.target_noise=0.2 is for continuous actions; … (`td3`, `matd3`)",
        "algorithm.target_noise=0.2 is for continuous actions; 'toy' has discrete ones; set it "
        "to 0",
        lambda: learner("td3", target_noise=0.2),
    ),
)


def pattern(message: str) -> str:
    """The expression for a message in which … stands for anything."""
    said = re.sub(r" \((of|without|`)[^()]*\)$", "", message)
    return ".*".join(map(re.escape, re.split("…", said)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.before[:60])
def test_former_refusals_are_legal_or_say_what_to_do(row: Row) -> None:
    if row.legal:
        row.attempt()
        return
    with pytest.raises(MurmurError, match=re.compile(pattern(row.today), re.DOTALL)):
        row.attempt()


def test_the_changelog_has_these_rows_and_no_others() -> None:
    _, found, rest = CHANGELOG.read_text().partition(f"\n{HEADING}\n")
    assert found
    lines = re.split(r"\n##", rest)[0].splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert table[0] == "| refused before | today |"
    assert table[1:] == [row.line for row in ROWS]
