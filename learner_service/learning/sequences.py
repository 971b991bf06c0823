"""Sequences of a replay as transitions, with the recurrent states of policies and critics."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.forward import forward_history
from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.layers.recurrent import Recurrent, RecurrentState
from murmur.learner_service.storage.storage import NEXT, is_transition, observed
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.timestep import StepType


@dataclass(frozen=True)
class Sequences:
    """B sequences of L + 1 rows, whose L * B pairs of neighbours are transitions, time outermost.

    Heess, Hunt, Lillicrap, Silver 2015, "Memory-based control with recurrent neural networks"
    (arXiv:1512.04455): policy and critic remember, mu(h_t) and Q(h_t, u_t), where the history h_t
    has what was observed up to t and what was done before. So also Wang, Everett, How 2020,
    "R-MADDPG" (arXiv:2002.06684). Here a policy starts at each sequence with the state that acting
    had there (see SequenceReplay), a critic with zeros. Its state comes from the actions played,
    whatever action is valued at t.

    Attributes:
        obs: name -> [(L + 1) * B, ...] observations of all rows.
        rows: transitions as `_learn` gets them, with n = 1: arrays [L * B, ...] at t, NEXT +
            observations at t + 1, "reward" [L * B, A], "discount" [L * B, 1], and "weight" [L * B]:
            1, or 0 where an episode ends or no action was taken between the rows.
        hidden: recurrent state of the policy before the first of all rows.
    """

    obs: dict[str, Tensor]
    rows: dict[str, Tensor]
    hidden: RecurrentState

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor], gamma: float) -> "Sequences":
        """Take arrays [L + 1, B, ...] and "memory" [1, B, A, Z] as transitions.

        Args:
            arrays: arrays of a batch of SequenceReplay.
            gamma: discount factor.
        """
        kinds = arrays["step_type"]
        flat = {name: x.flatten(0, 1) for name, x in arrays.items() if name != "memory"}
        starts = kinds.shape[1]  # joint rows from one step to the next
        rows = {name: x[:-starts] for name, x in flat.items()}
        rows |= {
            NEXT + name: x[starts:] for name, x in flat.items() if name.startswith(OBSERVATION)
        }
        rows["reward"] = flat["reward"][starts:]
        rows["discount"] = gamma * flat["discount"][starts:].unsqueeze(1)
        rows["weight"] = is_transition(kinds).flatten().float()
        first = kinds == int(StepType.FIRST)
        return cls(observed(flat), rows, RecurrentState(arrays["memory"][0], first))

    def now(self, x: Tensor) -> Tensor:
        """Return the rows [L * B, ...] at t of all rows [(L + 1) * B, ...]."""
        return x[: -self._starts]

    def following(self, x: Tensor) -> Tensor:
        """Return the rows [L * B, ...] at t + 1 of all rows [(L + 1) * B, ...]."""
        return x[self._starts :]

    def values(
        self, critic: nn.Module, played: Inputs, precision: Precision
    ) -> tuple[Tensor, Tensor]:
        """Return a critic's values of what was played at t, and its states; see `forward_history`.

        Args:
            critic: recurrent critic.
            played: its inputs [L * B, A, ...] at t.
            precision: precision of the pass.
        """
        assert isinstance(critic, Recurrent)
        return forward_history(critic, played, self._first[:-1], precision)

    def state_now(self, states: Tensor) -> RecurrentState:
        """Return a critic's state before the row at t, to value another action there.

        Args:
            states: [L + 1, B, A, Z] result of `values`.
        """
        return RecurrentState.of_rows(states[:-1], self._first[:-1])

    def next_state(self, critic: nn.Module, played: Inputs, precision: Precision) -> RecurrentState:
        """Return a critic's state before the row at t + 1; arguments are those of `values`."""
        _, states = self.values(critic, played, precision)
        return RecurrentState.of_rows(states[1:], self._first[1:])

    @property
    def _first(self) -> Tensor:
        assert self.hidden.first is not None
        return self.hidden.first

    @property
    def _starts(self) -> int:
        return self._first.shape[1]
