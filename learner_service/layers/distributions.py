"""Action distributions of policies: categorical, normal, or several together.

All are plain tensor arithmetic with no argument checks, because those synchronise with the device.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ILLEGAL = -1e9  # a logit no legal one comes near; finite, so that 0 log 0 has a gradient


def sample(pi: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an action from each row of probabilities, none of an impossible one.

    On a CPU by the first action whose cumulative sum reaches a number, one for each row: a race
    needs a logarithm for each action, which is most of a CPU's time for it.

    Args:
        pi: [..., K] probabilities.
        generator: generator of pi's device.

    Returns:
        [...] int64.
    """
    if pi.device.type != "cpu":
        return race(pi, generator)
    # In (0, 1]: above the 0 before the first possible action, not above the sum of them all.
    number = 1 - pi.new_empty((*pi.shape[:-1], 1)).uniform_(generator=generator)
    cumulative = pi.cumsum(-1)
    return (cumulative[..., :-1] < number * cumulative[..., -1:]).sum(-1)


def race(pi: Tensor, generator: torch.Generator) -> Tensor:
    """As `sample`, by a race of exponential clocks: three kernels and no synchronisation.

    The first of clocks with rates pi_k to ring is k with probability pi_k; a rate of zero never
    rings.
    """
    clocks = torch.empty_like(pi).exponential_(generator=generator)
    return (pi / clocks).argmax(-1)


def one_hot(action: Tensor, num_actions: int) -> Tensor:
    """[..., K] float32 of [...]; unlike torch's own, does not read the values on the host."""
    return (action.unsqueeze(-1) == torch.arange(num_actions, device=action.device)).float()


def over_actions(softmax: Callable[[Tensor, int], Tensor], logits: Tensor) -> Tensor:
    """softmax(logits, -1) of logits [..., K], stored in their order.

    A CPU takes one row after the other where the last dimension is the one that is summed, which is
    short here; with the actions outermost it takes eight rows at once.
    """
    if logits.device.type == "cpu":
        return softmax(logits.movedim(-1, 0), 0).movedim(0, -1).contiguous()
    return softmax(logits, -1)


def uniform(mask: Tensor) -> Tensor:
    """The uniform choice among legal actions, of masks [..., K]; 0 where none is legal."""
    legal = mask.float()
    return legal / legal.sum(-1, keepdim=True).clamp_min(1)


def explore(
    pi: Tensor, mask: Tensor | None, epsilon: Tensor | float, even: Tensor | None = None
) -> Tensor:
    """(1 - epsilon) pi + epsilon uniform over legal actions.

    Args:
        pi: [..., K] probabilities, zero where illegal.
        mask: [..., K] 1 = legal, or None if all are; every row has a legal action.
        epsilon: scalar.
        even: scalar 1 / K, if there is one already: used where all actions are legal.

    Returns:
        [..., K] probabilities, exactly zero where illegal.
    """
    if mask is None:
        even = pi.new_full((), 1 / pi.shape[-1]) if even is None else even
        return torch.lerp(pi, even, epsilon)
    return torch.lerp(pi, uniform(mask).to(pi.dtype), epsilon)


class ActionDistribution(ABC):
    """Distribution of actions that a policy samples from, or takes the mode of."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Tensor:
        """Return [...] int64, or [..., U]."""

    @abstractmethod
    def mode(self) -> Tensor:
        """Return [...] int64, or [..., U]."""

    def greedy_by(self) -> dict[str, Tensor]:
        """Return the numbers that `mode` goes by, if exported policies give them; see Policy."""
        return {}


def legal_alone(logits: Tensor, mask: Tensor | None, illegal: Tensor | None = None) -> Tensor:
    """Replace logits or values of illegal actions by ILLEGAL; arguments are Categorical's."""
    if mask is None:
        return logits
    if illegal is not None:
        return torch.where(mask.view(torch.bool), logits, illegal)
    return logits.masked_fill(mask == 0, ILLEGAL)


class Categorical(ActionDistribution):
    """One of K actions, only legal ones."""

    def __init__(self, logits: Tensor, mask: Tensor | None, illegal: Tensor | None = None) -> None:
        """Make the probabilities.

        Args:
            logits: [..., K].
            mask: [..., K] 1 = legal, or None if all are.
            illegal: scalar ILLEGAL, if there is one already; the mask is then of bytes 0 and 1.
        """
        self._outputs = logits = logits.float()
        if mask is not None:
            logits = legal_alone(logits, mask, illegal)
        self._log_pi = over_actions(torch.log_softmax, logits)

    @property
    def logits(self) -> Tensor:
        """[..., K] logarithms of the probabilities, about -1e9 where illegal."""
        return self._log_pi

    def sample(self, generator: torch.Generator) -> Tensor:
        """[...] int64."""
        return sample(self._log_pi.exp(), generator)

    def mode(self) -> Tensor:
        """[...] int64."""
        return self._log_pi.argmax(-1)

    def greedy_by(self) -> dict[str, Tensor]:
        """Return the logits."""
        return {"logits": self._log_pi}

    def log_prob(self, action: Tensor) -> Tensor:
        """[...] of actions [...] int64."""
        return self._log_pi.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """[...] nats."""
        return -(self._log_pi.exp() * self._log_pi).sum(-1)

    def logged(self) -> dict[str, Tensor]:
        """Return the tensors that `logged_entropy` needs."""
        return {"log_pi": self._log_pi.detach()}

    def gradient(
        self, action: Tensor, of_log_prob: Tensor, of_order: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Outputs of the network, and the gradient that a weighted sum has with respect to them.

        Five kernels, where autograd takes twenty for the sum and its backward pass.

        Args:
            action: [...] int64.
            of_log_prob: [...] weights of `log_prob(action)`.
            of_order: [...] weights of minus `entropy()`; None: it is no part of the sum.
        """
        log_pi = self._log_pi.detach()
        if of_order is None:
            found = torch.zeros_like(log_pi)
        else:  # d(pi log pi) / d log pi but for pi, which the softmax takes out again
            found = log_pi.exp().mul_(log_pi).mul_(of_order.unsqueeze(-1))
        found.scatter_add_(-1, action.unsqueeze(-1), of_log_prob.unsqueeze(-1))
        backward = torch.ops.aten._log_softmax_backward_data
        return [(self._outputs, backward(found, log_pi, -1, log_pi.dtype))]


class Normal(ActionDistribution):
    """U independent normal variables."""

    def __init__(self, mean: Tensor, log_std: Tensor, counted: Tensor | None = None) -> None:
        """Keep the parameters.

        Args:
            mean: [..., U] means.
            log_std: [A, U] or [1, U] logarithms of the deviations.
            counted: [A, U] mask, 1 for a variable that counts, else 0; None: all count.
        """
        self._mean, self._counted = mean.float(), counted
        self._by_agent = log_std  # [A, U], or [1, U]
        self._log_std = log_std.expand_as(self._mean)
        self._scored: tuple[Tensor, Tensor, Tensor] | None = None  # action, z, 1 / std

    def sample(self, generator: torch.Generator) -> Tensor:
        """[..., U]."""
        noise = torch.empty_like(self._mean).normal_(generator=generator)
        return self._mean + self._log_std.exp() * noise

    def mode(self) -> Tensor:
        """[..., U]."""
        return self._mean

    def greedy_by(self) -> dict[str, Tensor]:
        """Return the mean."""
        return {"mean": self._mean}

    def log_prob(self, action: Tensor) -> Tensor:
        """[...] of actions [..., U]: the joint density's logarithm."""
        inverse = (-self._by_agent).exp()
        z = (action - self._mean) * inverse
        self._scored = action, z, inverse
        constant = -0.5 * math.log(2 * math.pi) - self._log_std
        return self._summed(torch.addcmul(constant, z, z, value=-0.5))

    def entropy(self) -> Tensor:
        """[...] nats."""
        return self._summed(self._log_std + 0.5 * math.log(2 * math.pi * math.e))

    def _summed(self, of_each: Tensor) -> Tensor:
        """Sum [..., U] over the variables that count."""
        return (of_each if self._counted is None else of_each * self._counted).sum(-1)

    def logged(self) -> dict[str, Tensor]:
        """Return a copy for `logged_entropy`, as an optimiser changes the parameter in place."""
        return {"log_std": self._by_agent.detach().clone().unsqueeze(0)}

    def gradient(
        self, action: Tensor, of_log_prob: Tensor, of_order: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """See Categorical: of the means [B, A, U], and of the deviations' logarithms [A, U]."""
        if self._scored is None or self._scored[0] is not action:
            self.log_prob(action)
        assert self._scored is not None
        _, z, inverse = self._scored
        weight = of_log_prob.unsqueeze(-1)
        of_mean = weight * z
        constant = weight if of_order is None else weight + of_order.unsqueeze(-1)
        if self._counted is not None:
            of_mean, constant = of_mean * self._counted, constant * self._counted
        by_row = torch.addcmul(-constant, of_mean, z)
        of_log_std = by_row.sum((0, 1) if len(self._by_agent) == 1 else 0)
        return [
            (self._mean, of_mean * inverse),
            (self._by_agent, of_log_std.view_as(self._by_agent)),
        ]


class Choices(nn.Module):
    """Layout of F choices among their K alternatives, which lie one after the other.

    Choices of different size become rows of the largest size, filled with illegal alternatives, so
    that one softmax serves all.

    Attributes:
        factors: number of alternatives of each choice.
        even: whether all choices have as many.
        index: [F * largest] position of each alternative; K: filled.
    """

    index: Tensor

    def __init__(self, factors: tuple[int, ...]) -> None:
        super().__init__()
        self.factors, largest = factors, max(factors, default=0)
        self.even = len(set(factors)) < 2
        starts = torch.tensor(factors).cumsum(0) - torch.tensor(factors)
        places = torch.arange(largest)
        index = (starts.unsqueeze(1) + places).where(
            places < torch.tensor(factors).unsqueeze(1), sum(factors)
        )
        self.register_buffer("index", index.flatten().long(), persistent=False)

    def rows(self, logits: Tensor) -> Tensor:
        """Lay logits [..., K] out as [..., F, largest]."""
        if not self.even:
            logits = F.pad(logits, (0, 1), value=ILLEGAL).index_select(-1, self.index)
        return logits.reshape(*logits.shape[:-1], len(self.factors), max(self.factors))

    def flat(self, rows: Tensor) -> Tensor:
        """Lay [..., F, largest] out as [..., K]."""
        if self.even:
            return rows.flatten(-2)
        parts = [rows[..., i, :count] for i, count in enumerate(self.factors)]
        return torch.cat(parts, -1)


class CompositeDistribution(ActionDistribution):
    """F choices and U normal variables, all independent: log-probabilities and entropies are sums.

    log pi(a) = sum_f log pi_f(a_f) + sum_u log N(a_u; mean_u, std_u). Delalleau, Peter, Alonso,
    Logut 2019, "Discrete and Continuous Action Representation for Practical RL in Video Games"
    (arXiv:1912.11077), section 3. Actions are [..., F] int64, or [..., F + U] float32.
    """

    def __init__(
        self,
        choices: Choices,
        logits: Tensor,
        normal: Normal | None,
        mask: Tensor | None,
        illegal: Tensor | None = None,
    ) -> None:
        """Put both parts together.

        Args:
            choices: layout of the choices.
            logits: [..., K] of all choices.
            normal: the U variables; None: there are none.
            mask: [..., K] 1 = legal, or None if all alternatives are.
            illegal: scalar ILLEGAL, if there is one already; the mask is then of bytes 0 and 1.
        """
        self._layout, self._normal = choices, normal
        self._num_choices = len(choices.factors)
        self._parts: tuple[Tensor, Tensor, Tensor] | None = None  # action, its choices, numbers
        self._choices = None
        if self._num_choices:
            logits = legal_alone(logits.float(), mask, illegal)
            self._choices = Categorical(choices.rows(logits), None)
        self._each = [part for part in (self._choices, normal) if part is not None]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Put choices [..., F] int64 and numbers [..., U] side by side, where there are both."""
        return parts[0] if len(parts) == 1 else torch.cat([parts[0].float(), parts[1]], -1)

    def _split(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Take choices [..., F] int64 and numbers [..., U] apart."""
        if self._parts is None or self._parts[0] is not action:
            chosen, numbers = action[..., : self._num_choices], action[..., self._num_choices :]
            self._parts = action, chosen.long(), numbers
        return self._parts[1:]

    def sample(self, generator: torch.Generator) -> Tensor:
        """[..., F] int64, or [..., F + U]."""
        return self._joined([part.sample(generator) for part in self._each])

    def mode(self) -> Tensor:
        """[..., F] int64, or [..., F + U]."""
        return self._joined([part.mode() for part in self._each])

    def greedy_by(self) -> dict[str, Tensor]:
        """Return logits [..., K] and means [..., U], where there are such."""
        logits = {}
        if self._choices is not None:
            logits["logits"] = self._layout.flat(self._choices.logits)
        return logits | (self._normal.greedy_by() if self._normal is not None else {})

    def log_prob(self, action: Tensor) -> Tensor:
        """[...] of actions [..., F] int64 or [..., F + U]."""
        chosen, numbers = self._split(action)
        parts = [] if self._choices is None else [self._choices.log_prob(chosen).sum(-1)]
        parts += [] if self._normal is None else [self._normal.log_prob(numbers)]
        return sum(parts[1:], parts[0])

    def entropy(self) -> Tensor:
        """[...] nats."""
        parts = [] if self._choices is None else [self._choices.entropy().sum(-1)]
        parts += [] if self._normal is None else [self._normal.entropy()]
        return sum(parts[1:], parts[0])

    def logged(self) -> dict[str, Tensor]:
        """Return the tensor that `logged_entropy` needs."""
        return {"entropy": self.entropy().detach()}

    def gradient(
        self, action: Tensor, of_log_prob: Tensor, of_order: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """See Categorical: of the choices' logits, then of the means and deviations."""
        chosen, numbers = self._split(action)
        terms = []
        if self._choices is not None:
            weight = of_log_prob.unsqueeze(-1).expand_as(chosen)
            order = None if of_order is None else of_order.unsqueeze(-1).expand_as(chosen)
            terms += self._choices.gradient(chosen, weight, order)
        if self._normal is not None:
            terms += self._normal.gradient(numbers, of_log_prob, of_order)
        return terms


PolicyDistribution = Categorical | Normal | CompositeDistribution


def logged_entropy(logged: dict[str, Tensor]) -> Tensor:
    """Entropies [..., A] of distributions, of what `logged` took out of them; takes it away."""
    if "entropy" in logged:
        return logged.pop("entropy")
    log_pi = logged.pop("log_pi", None)
    if log_pi is not None:
        return -(log_pi.exp() * log_pi).sum(-1)
    return (logged.pop("log_std") + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
