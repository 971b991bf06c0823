"""The league: games of two teams, one that learns, the other played by opponents.

Half of such an environment's agents learn, the first ones; what they see and do is all that the
algorithm, the storage and the checkpoints know of. The other half is played, in each episode, by
the policy as it is now or by one from the past (Bansal et al. 2018, "Emergent Complexity via
Multi-Agent Competition", section 3.2), those that are hard to beat more often than others
(prioritized fictitious self-play: Vinyals et al. 2019, "Grandmaster level in StarCraft II using
multi-agent reinforcement learning", methods).
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner_service.algorithms.base import Policy
from learner_service.checkpoint import saved_spec
from learner_service.group.group import ALONE, Group
from learner_service.runtime.cuda_graph import Graphs
from learner_service.runtime.readback import to_host
from learner_service.runtime.streams import Fence
from learner_service.serving.staging import Staging
from shared.config.experiment import LeagueConfig
from shared.errors import CheckpointError, SpecError
from shared.seeding import episode_seeds, uniform
from shared.spec import EnvSpec, first_difference, without_expert
from shared.timestep import Array, StepType, TimeStep

_LAST = int(StepType.LAST)  # numpy compares with ints faster
_MEMORY = 50.0  # episodes against an opponent that its score is made of, roughly
_LEAST = 0.05  # weight of an opponent that is always beaten
_LEVEL = 1e-4  # no lead, but rounding: thirds of a reward do not add up to it

Points = Callable[[str, NDArray[np.float64]], None]


def team_spec(spec: EnvSpec) -> EnvSpec:
    """What one of an environment's two teams is: half of its agents, all else alike.

    Raises:
        SpecError: if the agents are no two equal teams.
    """
    if spec.num_agents % 2:
        raise SpecError(
            f"a league plays two equal teams, environment '{spec.name}' has {spec.num_agents} "
            "agents: let the learner act for both (in snakes: environment.control=both), or set "
            "league.size=0 and league.checkpoints=[]"
        )
    half = spec.num_agents // 2
    return dataclasses.replace(spec, num_agents=half, agents=spec.agents[:half])


def split(spec: EnvSpec, timestep: TimeStep) -> tuple[TimeStep, TimeStep]:
    """A time step of both teams as one of each, as views; the spec is that of both."""
    half = spec.num_agents // 2

    def team(agents: slice) -> TimeStep:
        return dataclasses.replace(
            timestep,
            reward=timestep.reward[:, agents],
            observation={
                o.name: timestep.observation[o.name][:, agents]
                if o.per_agent
                else timestep.observation[o.name]
                for o in spec.observations
            },
        )

    return team(slice(0, half)), team(slice(half, None))


def check_opponent(path: Path, state: Mapping[str, Any], spec: EnvSpec) -> None:
    """Refuse an opponent that never saw this game, or saw it otherwise.

    Raises:
        CheckpointError: naming the first difference.
    """
    difference = first_difference(without_expert(spec), without_expert(saved_spec(state)))
    if difference:
        raise CheckpointError(
            f"opponent {path} was trained on something else than this run's team: {difference}; "
            "name a checkpoint of the same environment with the same observations, or take it out "
            "of league.checkpoints"
        )


@dataclass
class Opponent:
    """A policy to play against.

    Attributes:
        file: the checkpoint it came from; a name within the run's checkpoints, or a whole path.
        policy: acts.
        points: the learning team's mean result against it, 1 a win, 0.5 a draw, 0 a loss; recent
            episodes count more.
        episodes: that this rank has played against it since the ranks last shared their points.
    """

    file: str
    policy: Policy
    points: float = 0.5
    episodes: int = 0

    @property
    def weight(self) -> float:
        """How much it is wanted: the square of its share of points."""
        return max((1.0 - self.points) ** 2, _LEAST)

    def record_result(self, points: float, memory: float = _MEMORY) -> None:
        """Note the result of an episode; `memory`: episodes that the score is made of."""
        self.points += (points - self.points) / memory
        self.episodes += 1


@dataclass(eq=False)
class Pairing:
    """Who plays the other team in each of a session's environments, and how the episode stands.

    Attributes:
        opponents: [n]; None: the learner's own policy as it is now.
        lead: [n] the learning team's rewards so far less those of the other.
        memory: of each [A, H], what the opponent remembers, on the device; None: nothing (yet).
    """

    opponents: list[Opponent | None]
    lead: NDArray[np.float64]
    memory: list[Tensor | None]

    @classmethod
    def of(cls, num_envs: int) -> "Pairing":
        """No opponent is drawn yet."""
        return cls([None] * num_envs, np.zeros(num_envs), [None] * num_envs)


class League:
    """Draws opponents and acts for them.

    The inference thread plays, the thread that learns adds (sync: the same one); the tuples that
    they share are replaced whole, and a lock is held where one of them changes points.
    """

    def __init__(
        self,
        config: LeagueConfig,
        run_seed: int,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        """An empty league; `add` adds those of league.checkpoints.

        Args:
            config: the section league.
            run_seed: of the run.
            device: where opponents act.
            group: the learners of the run, which play the same opponents.
        """
        self._config = config
        self._seed = run_seed
        self._device = device
        # A rank plays its share of the episodes; the ranks' mean then remembers as one learner.
        self._group, self._memory = group, max(1.0, _MEMORY / group.size)
        self._judging = threading.Lock()
        self._fixed: tuple[Opponent, ...] = ()
        self._past_policies: tuple[Opponent, ...] = ()
        self._kept, self._acted = Fence(device), Fence(device)
        self._assigned: dict[int, tuple[Pairing, int]] = {}  # by slot
        # By slot, from a checkpoint: who plays, lead, memory.
        self._open: dict[int, tuple[Opponent | None, float, Tensor | None]] = {}

    @property
    def opponents(self) -> tuple[Opponent, ...]:
        """All but the current policy."""
        return self._fixed + self._past_policies

    def add(self, file: str, policy: Policy) -> None:
        """Add an opponent that stays for good."""
        self._fixed += (Opponent(file, policy),)

    def wants(self, updates: int) -> bool:
        """Whether to keep the policy of this update."""
        return self._config.size > 0 and updates % self._config.every_updates == 0

    def keep(self, file: str, policy: Policy) -> None:
        """Add a past policy of the run; if there are too many the oldest leaves.

        The calling thread's stream made the policy. It may use the memory of the one that leaves.
        """
        self._kept.mark()
        self._acted.wait()
        self._past_policies = (*self._past_policies, Opponent(file, policy))[-self._config.size :]

    def share_points(self, updates: int) -> None:
        """Every league.every_updates updates, score opponents by the episodes of all ranks.

        The new score is the mean of the ranks' scores, weighted by how many episodes each has
        played against the opponent since the last time. All ranks call this after each update, so
        they have one pool.
        """
        pool = self.opponents
        if self._group.size == 1 or not pool or updates % self._config.every_updates:
            return
        with self._judging:
            own = [(opponent.points, opponent.episodes) for opponent in pool]
            for opponent in pool:
                opponent.episodes = 0
        sums = {f"points {i}": points * played for i, (points, played) in enumerate(own)}
        counts = {f"episodes {i}": float(played) for i, (_, played) in enumerate(own)}
        together = self._group.agree(sums | counts, "sum")
        with self._judging:
            for i, opponent in enumerate(pool):
                if played := together[f"episodes {i}"]:  # and what this rank has noted meanwhile
                    opponent.points += together[f"points {i}"] / played - own[i][0]

    def pair(self, slots: NDArray[np.int64]) -> Pairing:
        """For a training session in these slots; takes up what a checkpoint left open there."""
        pairing = Pairing.of(len(slots))
        for env, slot in enumerate(slots.tolist()):
            none = None, 0.0, None
            assignment = self._open.pop(slot, none)
            pairing.opponents[env], pairing.lead[env], pairing.memory[env] = assignment
            self._assigned[slot] = pairing, env
        return pairing

    def draw(
        self,
        pairing: Pairing,
        begins: NDArray[np.bool_],
        slots: NDArray[np.int64],
        episodes: NDArray[np.int64],
    ) -> None:
        """Draw an opponent wherever an episode begins: a pure function of slot and episode."""
        where = np.flatnonzero(begins)
        if not where.size:
            return
        # Not the seeds of the episodes themselves: what happens in them must not tell who plays.
        seeds = episode_seeds(self._seed + 1, slots[where], episodes[where])
        latest, which = uniform(seeds, 2).astype(np.float64)
        pool = self.opponents
        shares = np.cumsum([o.weight for o in pool])
        for i, env in enumerate(where):
            pairing.lead[env] = 0
            pairing.opponents[env] = pairing.memory[env] = None
            if pool and latest[i] >= self._config.latest:
                at = np.searchsorted(shares, which[i] * shares[-1], "right")
                pairing.opponents[env] = pool[min(int(at), len(pool) - 1)]

    def score(self, pairing: Pairing, own: TimeStep, other: TimeStep, note: Points | None) -> None:
        """Keep the score of every episode; the team with more reward at its end has won.

        Args:
            pairing: of the session.
            own: rows of the learning team.
            other: the same rows of the other team.
            note: called with "points_latest" or "points_past" and results of finished episodes;
                None: of an evaluation, which opponents are not judged by.
        """
        pairing.lead += own.reward.sum(1) - other.reward.sum(1)
        for env in np.flatnonzero(own.step_type == _LAST):
            if note is not None:
                lead = pairing.lead[env]
                points = 0.5 if abs(lead) < _LEVEL else float(lead > 0)
                opponent = pairing.opponents[env]
                if opponent is not None:
                    with self._judging:
                        opponent.record_result(points, self._memory)
                note("points_past" if opponent else "points_latest", np.array([points]))

    def act(
        self,
        games: Sequence[tuple[Pairing, TimeStep]],
        latest: Policy,
        generator: torch.Generator | None,
        staging: Staging,
        graphs: Graphs,
    ) -> list[Array]:
        """The other teams' actions: each opponent acts once, on all the rows where it plays.

        Args:
            games: of each session the pairing, and the rows [n, ...] that the other team sees.
            latest: plays where no opponent was drawn.
            generator: see Policy.act.
            staging: brings rows to the device, and actions back.
            graphs: of acting.

        Returns:
            of each session [n, A] or [n, A, U] on the host.
        """
        groups: dict[int, list[tuple[int, int]]] = {}  # (game, environment) by opponent
        for game, (pairing, _) in enumerate(games):
            for env, opponent in enumerate(pairing.opponents):
                groups.setdefault(id(opponent), []).append((game, env))
        order = [place for members in groups.values() for place in members]
        self._kept.wait()
        observation = staging.gather(_rows(games, order))
        actions, stop = [], 0
        remembered: list[tuple[tuple[int, int], Tensor]] = []
        for members in groups.values():
            start, stop = stop, stop + len(members)
            pairing = games[members[0][0]][0]
            opponent = pairing.opponents[members[0][1]]
            policy = latest if opponent is None else opponent.policy
            agents = games[0][1].reward.shape[1]
            memory = self._load_memory(games, members, agents, policy.memory_size)
            own = {name: array[start:stop] for name, array in observation.items()}
            with graphs.eager("league", len(members), generator is None):
                acted = policy.act(own, generator, memory)
            if memory is not None:
                remembered += zip(members, acted["memory"], strict=True)
            actions.append(acted["action"])
        theirs = staging.to_host(actions[0] if len(actions) == 1 else torch.cat(actions))
        self._acted.mark()
        for (game, env), memory in remembered:  # not before the device is through: others read it
            games[game][0].memory[env] = memory
        answers = [
            np.zeros((len(pairing.opponents), *theirs.shape[1:]), theirs.dtype)
            for pairing, _ in games
        ]
        for action, (game, env) in zip(theirs, order, strict=True):
            answers[game][env] = action
        return answers

    def _load_memory(
        self,
        games: Sequence[tuple[Pairing, TimeStep]],
        members: Sequence[tuple[int, int]],
        num_agents: int,
        size: int,
    ) -> Tensor | None:
        """[n, A, H] what an opponent remembers in some environments; None: it has no memory."""
        if not size:
            return None
        fresh = torch.zeros((num_agents, size), device=self._device)
        known = [games[game][0].memory[env] for game, env in members]
        return torch.stack([fresh if m is None else m for m in known])

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: file and points of each opponent, and which plays in which slot."""
        playing = [
            (slot, pairing.opponents[env], float(pairing.lead[env]), pairing.memory[env])
            for slot, (pairing, env) in sorted(self._assigned.items())
        ]
        self._acted.wait()  # for the memory
        assigned = [
            (slot, o.file if o else "", lead, None if memory is None else to_host(memory).clone())
            for slot, o, lead, memory in playing
        ]
        return {"opponents": [(o.file, o.points) for o in self.opponents], "seats": assigned}

    def load_state_dict(self, state: Mapping[str, Any], load: Callable[[str], Policy]) -> None:
        """Continue; past policies come from their files.

        Opponents that league.checkpoints no longer names are removed, also from open episodes: the
        current policy takes their place.

        Raises:
            CheckpointError: if a past policy's file is gone.
        """
        known = {o.file: o for o in self._fixed}
        for file, points in state["opponents"]:
            if _left(file, known):
                continue
            if file not in known:
                known[file] = Opponent(file, load(file))
                self._past_policies += (known[file],)
            known[file].points = points
        self._past_policies = self._past_policies[
            max(len(self._past_policies) - self._config.size, 0) :
        ]
        for slot, file, lead, memory in state["seats"]:
            if _left(file, known):
                file, memory = "", None
            if file and file not in known:  # it has left since that episode began
                known[file] = Opponent(file, load(file))
            remembered = None if memory is None else memory.to(self._device)
            self._open[slot] = known.get(file), lead, remembered


def _rows(
    games: Sequence[tuple[Pairing, TimeStep]], order: Sequence[tuple[int, int]]
) -> list[TimeStep]:
    """Rows of (game, environment) in this order, those of a game that follow each other in one."""
    parts = []
    for game, places in itertools.groupby(order, lambda place: place[0]):
        rows, envs = games[game][1], np.array([env for _, env in places])
        if not np.array_equal(envs, np.arange(len(rows.step_type))):
            rows = dataclasses.replace(
                rows,
                step_type=rows.step_type[envs],
                reward=rows.reward[envs],
                discount=rows.discount[envs],
                observation={name: array[envs] for name, array in rows.observation.items()},
            )
        parts.append(rows)
    return parts


def _left(file: str, known: Mapping[str, Opponent]) -> bool:
    """Whether this is the absolute path of an opponent that league.checkpoints no longer names."""
    return file not in known and Path(file).is_absolute()
