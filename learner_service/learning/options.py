"""Options that several algorithms have, and what others ask of them."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator
from typing_extensions import override

from murmur.learner_service.layers.building import RESERVED
from murmur.learner_service.layers.stacked import LayersConfig, Sharing, resolve_sharing
from murmur.learner_service.preprocess.frozen import FROZEN as FROZEN
from murmur.learner_service.preprocess.frozen import SHARING as SHARING
from murmur.learner_service.storage.flight import Demand, Flight, transitions_in, unmeasured
from murmur.shared.config import PluginConfig, Section
from murmur.shared.config.plugins import load_plugin
from murmur.shared.config.section import known_names, validate, with_new_names
from murmur.shared.process.errors import ConfigError


class Change(NamedTuple):
    """A change of options.

    Attributes:
        what: description of the change.
        options: options that change: dotted name -> value.
        cost: price of the change in learning, as text.
        calls: ratio of the calls that learning from a row then takes to those now.
        arithmetic: ratio of the arithmetic that learning from a row then takes to that now.
    """

    what: str
    options: dict[str, Any]
    cost: str = ""
    calls: float = 1.0
    arithmetic: float = 1.0


# Options that several algorithms have with defaults of their own.
DataPasses = Annotated[int, Field(ge=1, description="passes over each rollout")]
Gamma = Annotated[float, Field(ge=0, le=1, description="discount factor")]
ActorRate = Annotated[float, Field(gt=0, description="Adam's learning rate of the policy")]
CriticRate = Annotated[float, Field(gt=0, description="Adam's learning rate of the critic")]
TargetTau = Annotated[
    float,
    Field(gt=0, le=1, description="share by which target networks follow per update"),
]
AveragedPolicy = Annotated[
    bool,
    Field(
        description="what is evaluated, loaded, served or exported acts by the target network, the "
        "mean of the weights of some 1 / target_tau updates; training acts by the latest"
    ),
]
GradNorm = Annotated[float, Field(ge=0, description="gradient norm is clipped; 0: never")]
EpsilonStart = Annotated[float, Field(ge=0, le=1, description="share of uniform random actions")]
EpsilonEnd = Annotated[float, Field(ge=0, le=1, description="the share once annealed")]
ShareEncoder = Annotated[
    bool,
    Field(
        description="images: policy and critic share the convolutions, which the critic's gradient "
        "alone trains (DrQ)",
    ),
]


@dataclass(frozen=True)
class About:
    """Answers about an algorithm's options, for code that knows none of them.

    Keys are dotted names of options. The defaults are those of an algorithm that says nothing: its
    batch size is not searched, and `murmur doctor` probes no change of it.

    Attributes:
        open_batch_size: key of a minibatch's size if that is 0, which stands for the largest that
            fits; "": it is set, or there is none.
        learned_at_once: rows of one forward and backward pass; 0: not known.
        joint: whether each of these rows is of all agents.
        divided: keys of numbers that learners divide among them.
        rounded_up: keys of numbers of which each learner has its part rounded up.
        trial: changes that leave out what only repeats or delays an update's work.
        flight: keys of an unroll's length and of an update's unrolls, if the learner may choose
            them.
        batch_size_advice: change to make on a GPU where not even a batch of one row fits.
        waiting_advice: change that lets more environments act at once; "": no option does.
        cheaper_learning: changes that may make learning from a row cheaper.
        larger_updates: function from a factor to a change after which an update takes that many
            times the rows at the same cost each; None: there is none.
    """

    open_batch_size: str = ""
    learned_at_once: int = 0
    joint: bool = False
    divided: tuple[str, ...] = ()
    rounded_up: tuple[str, ...] = ()
    trial: Mapping[str, Any] = field(default_factory=dict)
    flight: tuple[str, ...] = ()
    batch_size_advice: str = "free memory of the device"
    waiting_advice: str = ""
    cheaper_learning: tuple[Change, ...] = ()
    larger_updates: Callable[[float], Change] | None = None


class AlgorithmConfig(Section):
    """Base of an algorithm's options.

    Attributes:
        BEFORE: values of the options that came last, newest first, for runs that began before them.
    """

    BEFORE: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_run(cls, data: Any) -> Any:  # noqa: ANN401 - pydantic's
        """Give options that came after a run began the values of `BEFORE`.

        A run keeps its whole configuration: options that lack nothing but these are of an earlier
        run. Options that a plug-in adds do not matter.
        """
        owner: type[AlgorithmConfig] = next(b for b in cls.__mro__ if "BEFORE" in vars(b))
        if not isinstance(data, dict) or not owner.BEFORE:
            return data
        missing = owner.__annotations__.keys() - data.keys() - {"BEFORE"}
        earlier = next(iter(owner.BEFORE)) in missing and missing <= owner.BEFORE.keys()
        return {**owner.BEFORE, **data} if earlier else data

    @property
    def about(self) -> About:
        """Answers about these options."""
        return About()

    def for_rank(self, size: int) -> Self:
        """Return the share of one of `size` learners that learn together.

        Raises:
            ConfigError: if an option cannot be divided, naming the nearest number that can.
        """
        about, share = self.about, dict[str, int]()
        for key in (*about.divided, *about.rounded_up):
            value = attrgetter(key)(self)
            share[key], left = divmod(value, size)
            if left and key in about.rounded_up:
                share[key] += 1
            elif left:
                nearest = max(1, round(value / size)) * size
                raise ConfigError(
                    f"algorithm.{key}={value} is of all {size} learners together and cannot be "
                    f"divided among them; set it to {nearest}, or start another number of learners"
                )
        return self.changed(share)


class SharingConfig(Section):
    """Options of algorithms whose agents may share networks."""

    share_parameters: Sharing = Field(
        True,
        description="false: each agent has networks of its own; or the number of each agent's "
        "networks: [0, 0, 1] lets the first two share",
    )
    frozen_agents: tuple[int, ...] = Field(
        (),
        description="numbers of agents, from 0, that act but are not trained; they have networks "
        "of their own by share_parameters",
    )
    normalize_rewards: bool = Field(
        False, description="divide rewards by their running root mean square"
    )

    def slices(self, num_agents: int) -> tuple[int, ...]:
        """The parameter group of each agent.

        Raises:
            ConfigError: if share_parameters does not fit the number of agents.
        """
        return resolve_sharing(self.share_parameters, num_agents, SHARING)

    def reward_sets(self, num_agents: int) -> tuple[int, ...]:
        """The set of each agent whose rewards are normalised together: that of its networks."""
        return self.slices(num_agents)

    @model_validator(mode="before")
    @classmethod
    def _trains_teams_apart(cls, data: Any) -> Any:  # noqa: ANN401 - pydantic's
        if isinstance(data, dict) and data.get("teams") and "teams" not in cls.model_fields:
            raise ValueError(
                "teams: this algorithm trains all agents together, from one replay or by critics "
                "that see what all of them do; set algorithm.name to mappo, happo, ippo or ppo, or "
                "leave teams out: share_parameters gives agents networks of their own"
            )
        return data


class TeamOptions(NamedTuple):
    """Options of one team.

    Attributes:
        options: options of its algorithm.
        agents: numbers or names of its agents; None: those named after the team.
        network: options of its network that differ from the run's.
        share_parameters: whether it has a share_parameters of its own.
    """

    options: Any
    agents: tuple[int | str, ...] | None
    network: dict[str, Any]
    share_parameters: bool


# Options that all teams have in common: of the rows of an update, and of agents by number.
_OF_ALL_TEAMS = (
    *("batch_size", "batch_number", "max_batch_size", "unroll_steps", "unrolls_per_update"),
    *("frozen_agents", "teams"),
)


class CriticConfig(SharingConfig):
    """Options of algorithms that have critics beside their policies."""

    critic_network: dict[str, Any] = Field(
        {},
        description="options of the critic's network where they differ from `network`: "
        "{hidden: [256, 256]}; with `name` another network",
    )

    def network_of_critic(self, network: PluginConfig) -> PluginConfig:
        """Return the critic's network: the policy's with the changes of `critic_network`.

        Args:
            network: network of the policy.

        Raises:
            ConfigError: for a change of what networks are fed or remember, or of a shared encoder.
        """
        if not self.critic_network:
            return network
        option, name = "algorithm.critic_network", self.critic_network.get("name", network.name)
        kind = load_plugin("network", "mlp" if name == "auto" else str(name)).Config
        changes = with_new_names(kind, self.critic_network, option)
        if fed := sorted(RESERVED.keys() & changes.keys()):
            raise ConfigError(
                f"{option}.{fed[0]}: policy and critic are fed and remember alike; set "
                f"network.{fed[0]} for both"
            )
        shares = getattr(self, "share_encoder", False)
        if shares and (of_encoder := sorted(changes.keys() - LayersConfig.model_fields)):
            raise ConfigError(
                f"{option}.{of_encoder[0]}: with algorithm.share_encoder = true only the linear "
                f"layers are the critic's own: {', '.join(LayersConfig.model_fields)}"
            )
        options = network.options
        if name != network.name:  # of the policy's options those that both have a use for
            known = RESERVED if name == "auto" else kind.model_fields
            remembered = {"recurrent"}
            if network.options.get("recurrent_cell", "gru") != "gru":
                remembered.add("recurrent_cell")
            wanted = {key for key in RESERVED if key in known or key in remembered}
            options = {
                key: x for key, x in options.items() if key in wanted and (x or key in known)
            }
        return PluginConfig(**{**options, **changes, "name": name})


class OnPolicyConfig(AlgorithmConfig):
    """Options of algorithms that make passes over a rollout in minibatches.

    Attributes:
        RATES: names of the learning rates, which grow with minibatches.
    """

    RATES: ClassVar[tuple[str, ...]] = ()

    batch_size: int = Field(
        256,
        ge=0,
        description="agent-transitions in a minibatch, of all learners together; 0: as many as fit "
        "the memory",
    )
    batch_number: int = Field(
        8,
        ge=1,
        description="minibatches; an update starts at batch_size * batch_number agent-transitions; "
        "it has more minibatches if the environments give more at once",
    )
    max_batch_size: int = Field(
        0,
        ge=0,
        description="agent-transitions that a minibatch may grow to, by a whole factor k, if the "
        "environments give k * batch_size * batch_number or more at once, learning rates by "
        "sqrt(k); settled at the start by their number; 0: more minibatches instead",
    )
    data_passes: DataPasses
    unroll_steps: int = Field(
        0,
        ge=0,
        description="transitions of an unroll; 0: chosen, 16 to 128, so that one unroll of every "
        "environment makes an update; in the async pipeline, of every one that the learner can use",
    )
    unrolls_per_update: int = Field(
        0,
        ge=0,
        description="number of unrolls, each of one environment, that all learners together wait "
        "for before an update; they wait for more if these hold fewer than batch_size * "
        "batch_number agent-transitions; 0: the learner chooses it, in the async pipeline so that "
        "all environments it can use act at once",
    )

    @property
    @override
    def about(self) -> About:
        size, number, passes = self.batch_size, self.batch_number, self.data_passes
        cheaper: list[Change] = []
        if number > 1:
            by = min(4, number)
            options = {"batch_size": size * by, "batch_number": math.ceil(number / by)}
            if 0 < self.max_batch_size < size * by:
                options["max_batch_size"] = size * by
            what = f"minibatches {by} times as large, {by} times fewer"
            cost = "fewer steps of the weights, on less noise: learns less per row"
            cheaper.append(Change(what, options, cost, calls=1 / by))
        if passes > 1:
            what = f"{passes // 2} passes over the data instead of {passes}"
            left, cost = passes // 2 / passes, "fewer passes: learns less per row"
            cheaper.append(Change(what, {"data_passes": passes // 2}, cost, left, left))
        advice = "raise algorithm.batch_number"
        if self.unrolls_per_update:
            advice = "set algorithm.unrolls_per_update=0, which chooses"
        return About(
            open_batch_size="" if size else "batch_size",
            learned_at_once=size,
            divided=("batch_size", "unrolls_per_update"),
            trial={"data_passes": 1},
            flight=("unroll_steps", "unrolls_per_update"),
            waiting_advice=advice,
            cheaper_learning=tuple(cheaper),
            larger_updates=self._larger_updates,
        )

    def _larger_updates(self, factor: float) -> Change:
        if self.unrolls_per_update:
            what = "updates that take in all environments"
            return Change(what, {"unrolls_per_update": 0}, "costs: fewer updates per row")
        larger = math.ceil(self.batch_number * factor)
        what = f"{larger} minibatches an update instead of {self.batch_number}"
        cost = "costs: updates take more rows and come less often, each of as many more steps"
        return Change(what, {"batch_number": larger}, cost)

    def for_environments(
        self, environments: int, agents: int, max_episode_steps: int, *, remembers: bool
    ) -> Self:
        """Return the options with minibatches as large as the number of environments makes them.

        They are as many as configured, if the bound allows it, and have no room to grow left.
        Learning rates grow with them by the square root. Malladi, Lyu, Panigrahi, Arora 2022, "On
        the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (arXiv:2205.10287): Adam's
        noise then stays what it was.

        Args:
            environments: number of training environments of all learners; 0: not known.
            agents: number of agents of an environment.
            max_episode_steps: longest episode; 0: not known.
            remembers: whether the policy has a recurrent state.

        Raises:
            ConfigError: if minibatches may grow and the number of environments is not known.
        """
        if not self.max_batch_size:
            return self
        option = f"algorithm.max_batch_size={self.max_batch_size}"
        if not self.batch_size:
            raise ConfigError(
                f"{option}: with algorithm.batch_size=0 minibatches are as large as the memory "
                "allows and cannot grow; set batch_size, or max_batch_size=0"
            )
        if self.max_batch_size < self.batch_size:
            raise ConfigError(
                f"{option} is less than algorithm.batch_size={self.batch_size}, from which "
                "minibatches grow; set max_batch_size to more, or to 0"
            )
        if not environments:
            raise ConfigError(
                f"{option}: minibatches grow with the number of environments, which is not known "
                "at the start; set env_server.num_workers, or max_batch_size=0"
            )
        asked = self.batch_size * self.batch_number
        rows = math.ceil(asked / agents)
        demand = Demand(rows, environments, 1, max_episode_steps, remembers)
        given = Flight(self.unroll_steps, self.unrolls_per_update, None)
        flight = unmeasured(demand, given, environments)
        each = transitions_in(flight.unroll_steps, max_episode_steps)
        at_once = flight.unrolls_per_update * each * agents
        growth = max(1, min(at_once // asked, self.max_batch_size // self.batch_size))
        grown: dict[str, Any] = {"batch_size": growth * self.batch_size, "max_batch_size": 0}
        if growth > 1:
            grown |= self.scaled_rates(math.sqrt(growth))
        return self.model_copy(update=grown)

    def scaled_rates(self, factor: float) -> dict[str, Any]:
        """Return all options that hold learning rates, with the rates times a factor."""
        return {name: factor * getattr(self, name) for name in self.RATES}


class OnPolicyCriticConfig(CriticConfig, OnPolicyConfig):
    """Options of COMA and MAPPO alike."""

    RATES = ("actor_lr", "critic_lr")

    gamma: Gamma = 0.99
    actor_lr: ActorRate = 5e-4
    critic_lr: CriticRate
    final_lr_fraction: float = Field(
        1.0, gt=0, le=1, description="learning rates fall linearly to this share of themselves"
    )
    anneal_updates: int = Field(
        0, ge=0, description="updates over which learning rates and entropy weight fall; 0: never"
    )
    entropy_weight: float = Field(0.01, ge=0, description="weight of the policy's entropy, per nat")
    max_grad_norm: GradNorm = 10.0


class TeamsConfig(OnPolicyCriticConfig):
    """Options of algorithms that train teams of agents apart."""

    teams: dict[str, dict[str, Any]] = Field(
        {},
        description="options of teams that are trained apart, by the team's name: `agents`, "
        "numbers or names (left out: those named after the team), `network`, options that differ "
        "from the section network, and options of the algorithm; see docs/networks.md",
    )

    @model_validator(mode="after")
    def _teams_fit(self) -> Self:
        for team in self.teams:
            self.of_team(team)
        return self

    def of_team(self, team: str) -> TeamOptions:
        """Return the options of a team: those of all teams with its changes.

        Raises:
            ConfigError: for an unknown option or a wrong value, naming the team.
        """
        where = f"algorithm.teams.{team}"
        if not re.fullmatch(r"\w[\w-]*", team):
            raise ConfigError(f"'{where}': a team's name has letters, digits, - and _ alone")
        own = with_new_names(type(self), self.teams[team], where)
        fields = [key for key in type(self).model_fields if key not in _OF_ALL_TEAMS]
        known = ("agents", "network", *fields)
        for key in own:
            if key in _OF_ALL_TEAMS:
                raise ConfigError(f"'{where}.{key}' is of all teams together; set algorithm.{key}")
            if key not in known:
                raise ConfigError(f"unknown key '{where}.{key}'; {known_names(key, known)}")
        agents, network = own.pop("agents", None), own.pop("network", {})
        if not isinstance(network, dict):
            raise ConfigError(f"'{where}.network' = {network!r}: it holds keys, network.KEY=VALUE")
        if isinstance(agents, int | str):
            agents = (agents,)
        listed = isinstance(agents, list | tuple) and agents
        if agents is not None and not (listed and all(isinstance(a, int | str) for a in agents)):
            raise ConfigError(f"'{where}.agents' = {agents!r}: give numbers or names of agents")
        of_all = self.model_dump(exclude={"teams"})
        options = validate(type(self), {**of_all, **own}, where)
        return TeamOptions(options, agents and tuple(agents), network, "share_parameters" in own)

    @override
    def scaled_rates(self, factor: float) -> dict[str, Any]:
        scaled = {
            team: own | {name: factor * own[name] for name in self.RATES if name in own}
            for team, own in self.teams.items()
        }
        return {**super().scaled_rates(factor), "teams": scaled}
