"""The league: games of two teams, one that learns, the other played by opponents.

One team of such an environment's agents learns; what they see and do is all that the algorithm, the
storage and the checkpoints know of. The other agents are played, in each episode, by a policy of
another run or, if the teams are equal, by the policy as it is now or by one from the past (Bansal
et al. 2018, "Emergent Complexity via Multi-Agent Competition", section 3.2), those that are hard to
beat more often than others (prioritized fictitious self-play: Vinyals et al. 2019, "Grandmaster
level in StarCraft II using multi-agent reinforcement learning", methods).
"""

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmur.learner_service.device.readback import to_host
from murmur.learner_service.device.streams import Fence
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.serving.game import EPISODES, Game, Opponent, Pairing
from murmur.learner_service.serving.requests import EnvSession, Request
from murmur.learner_service.serving.staging import ForwardRows, Staging
from murmur.shared.config.experiment import LeagueConfig
from murmur.shared.wire.seeding import episode_seeds, uniform
from murmur.shared.wire.timestep import Array, StepType, TimeStep

# NumPy compares with ints faster.
_FIRST, _LAST = int(StepType.FIRST), int(StepType.LAST)
_LEVEL = 1e-4  # no lead, but rounding: thirds of a reward do not add up to it

Points = Mapping[str, deque[float]]  # results of the latest episodes, by name


@dataclasses.dataclass(eq=False)
class League:
    """Draws opponents and acts for them.

    The inference thread plays, the thread that learns adds (sync: the same one); the tuples that
    they share are replaced whole, and a lock is held where one of them changes points.

    Attributes:
        config: the section league.
        run_seed: seed of the run.
        device: device that opponents act on.
        group: the learners of the run, which play the same opponents.
        game: both sides of the games; None: no session has named them yet.
    """

    config: LeagueConfig
    run_seed: int
    device: torch.device
    group: Group = ALONE
    game: Game | None = None

    def __post_init__(self) -> None:
        """Begin without opponents; `add` adds those of league.checkpoints."""
        # A rank plays its share of the episodes; the ranks' mean then remembers as one learner.
        self._memory = max(1.0, EPISODES / self.group.size)
        self._judging = threading.Lock()
        self._fixed: tuple[Opponent, ...] = ()
        self._past_policies: tuple[Opponent, ...] = ()
        self._kept, self._acted = Fence(self.device), Fence(self.device)
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
        return self.config.size > 0 and updates % self.config.every_updates == 0

    def keep(self, file: str, policy: Policy) -> None:
        """Add a past policy of the run; if there are too many the oldest leaves.

        The calling thread's stream made the policy. It may use the memory of the one that leaves.
        """
        self._kept.mark()
        self._acted.wait()
        if self.game is not None:
            policy = self.game.assign(policy)
        self._past_policies = (*self._past_policies, Opponent(file, policy))[-self.config.size :]

    def share_points(self, updates: int) -> None:
        """Every league.every_updates updates, score opponents by the episodes of all ranks.

        The new score is the mean of the ranks' scores, weighted by how many episodes each has
        played against the opponent since the last time. All ranks call this after each update, so
        they have one pool.
        """
        pool = self.opponents
        if self.group.size == 1 or not pool or updates % self.config.every_updates:
            return
        with self._judging:
            own = [(opponent.points, opponent.episodes) for opponent in pool]
            for opponent in pool:
                opponent.episodes = 0
        sums = {f"points {i}": points * played for i, (points, played) in enumerate(own)}
        counts = {f"episodes {i}": float(played) for i, (_, played) in enumerate(own)}
        together = self.group.agree(sums | counts, "sum")
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
            if assignment[0] is None and self.config.agents and not self.config.latest:
                # An opponent that has left; the policy itself may act for other agents.
                assignment = self.opponents[0], *assignment[1:]
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
        seeds = episode_seeds(self.run_seed + 1, slots[where], episodes[where])
        latest, which = uniform(seeds, 2).astype(np.float64)
        pool = self.opponents
        shares = np.cumsum([o.weight for o in pool])
        for i, env in enumerate(where):
            pairing.lead[env] = 0
            pairing.opponents[env] = pairing.memory[env] = None
            if pool and latest[i] >= self.config.latest:
                at = np.searchsorted(shares, which[i] * shares[-1], "right")
                pairing.opponents[env] = pool[min(int(at), len(pool) - 1)]

    def score(
        self, pairing: Pairing, own: TimeStep, other: TimeStep, points: Points | None
    ) -> None:
        """Keep the score of every episode; the team with more reward at its end has won.

        Args:
            pairing: pairing of the session.
            own: rows of the learning team.
            other: the same rows of the other team.
            points: results of finished episodes are added to "points_latest" or "points_past";
                None: of an evaluation, which opponents are not judged by.
        """
        pairing.lead += own.reward.sum(1) - other.reward.sum(1)
        for env in np.flatnonzero(own.step_type == _LAST):
            if points is not None:
                lead = pairing.lead[env]
                result = 0.5 if abs(lead) < _LEVEL else float(lead > 0)
                opponent = pairing.opponents[env]
                if opponent is not None:
                    with self._judging:
                        opponent.record_result(result, self._memory)
                points["points_past" if opponent else "points_latest"].append(result)

    def play(
        self,
        requests: Sequence[Request],
        latest: Policy,
        generator: torch.Generator | None,
        staging: Staging,
        points: Points | None,
    ) -> dict[EnvSession, Array]:
        """Return the other teams' actions of sessions that play games of two teams.

        Opponents are drawn where an episode begins, and the scores are kept.

        Args:
            requests: both teams' rows of some sessions.
            latest: policy that plays where no opponent was drawn.
            generator: randomness of the actions; None: they are greedy.
            staging: staging of the inference thread.
            points: results, see `score`; None: evaluations, which judge no opponent.

        Returns:
            session -> [n, A] or [n, A, U] on the host.
        """
        games, game = [], self.game
        assert game is not None
        latest = game.assign(latest)
        for request in requests:
            session, other = request.session, request.other
            assert session.pairing is not None
            assert other is not None
            slots = np.arange(session.num_envs) if session.evaluating else session.slots
            self.draw(session.pairing, other.step_type == _FIRST, slots, session.episode)
            theirs = other
            if game.shows_all:
                rewards = other.reward[:, game.other_rows]
                theirs = dataclasses.replace(other, reward=rewards)
            self.score(session.pairing, request.timestep, theirs, points)
            games.append((session.pairing, other))
        actions = self.act(games, latest, generator, staging)
        sessions = [request.session for request in requests]
        return dict(zip(sessions, actions, strict=True))

    def act(
        self,
        games: Sequence[tuple[Pairing, TimeStep]],
        latest: Policy,
        generator: torch.Generator | None,
        staging: Staging,
    ) -> list[Array]:
        """Return the other teams' actions; each opponent acts once, on all the rows where it plays.

        Args:
            games: each session's pairing and the rows [n, ...] that the other team sees.
            latest: policy that plays where no opponent was drawn.
            generator: randomness of the actions; None: they are greedy.
            staging: staging of the inference thread.

        Returns:
            [n, A] or [n, A, U] on the host for each session.
        """
        members: dict[Opponent | None, list[tuple[int, int]]] = {}  # -> (game, environment)
        for game, (pairing, _) in enumerate(games):
            for env, opponent in enumerate(pairing.opponents):
                members.setdefault(opponent, []).append((game, env))
        groups, agents = [], games[0][1].reward.shape[1]
        for opponent, places in members.items():
            policy = latest if opponent is None else opponent.policy
            memory = self._load_memory(games, places, agents, policy.memory_size)
            groups.append(ForwardRows(policy, _rows(games, places), memory))
        self._kept.wait()
        theirs, memories = staging.forward_rows(groups, generator)
        self._acted.mark()
        # Not before the device is through: other threads read these.
        for places, memory in zip(members.values(), memories, strict=True):
            if memory is not None:
                for (game, env), own in zip(places, memory, strict=True):
                    games[game][0].memory[env] = own
        answers = [
            np.zeros((len(pairing.opponents), *theirs.shape[1:]), theirs.dtype)
            for pairing, _ in games
        ]
        order = [place for places in members.values() for place in places]
        for action, (game, env) in zip(theirs, order, strict=True):
            answers[game][env] = action
        return answers

    def _load_memory(
        self,
        games: Sequence[tuple[Pairing, TimeStep]],
        places: Sequence[tuple[int, int]],
        num_agents: int,
        size: int,
    ) -> Tensor | None:
        """Return an opponent's recurrent state in some environments, [n, A, Z], or None."""
        if not size:
            return None
        fresh = torch.zeros((num_agents, size), device=self.device)
        known = [games[game][0].memory[env] for game, env in places]
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
            max(len(self._past_policies) - self.config.size, 0) :
        ]
        for slot, file, lead, memory in state["seats"]:
            if _left(file, known):
                file, memory = "", None
            if file and file not in known:  # it has left since that episode began
                known[file] = Opponent(file, load(file))
            remembered = None if memory is None else memory.to(self.device)
            self._open[slot] = known.get(file), lead, remembered


def _rows(
    games: Sequence[tuple[Pairing, TimeStep]], places: Sequence[tuple[int, int]]
) -> list[TimeStep]:
    """Select rows of (game, environment) in this order; a game's neighbors stay together."""
    parts = []
    for game, of_game in itertools.groupby(places, lambda place: place[0]):
        rows, envs = games[game][1], np.array([env for _, env in of_game])
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
