"""Stacked layers as plain loops over agents and steps, with torch's own layers: the reference."""

import copy

import torch
from torch import Tensor, nn

from murmur.learner_service.algorithms.mappo import Mappo
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.forward import forward, forward_history
from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.layers.recurrent import (
    Recurrent,
    RecurrentState,
    StackedCell,
    StackedLSTM,
)
from murmur.learner_service.layers.stacked import (
    StackedConv2d,
    StackedLayerNorm,
    StackedLinear,
    count_slices,
)
from murmur.learner_service.learning.base import Algorithm
from tests.learner_service.toys import CPU


class Loop(nn.Module):
    """One module for each slice; agents take turns."""

    def __init__(
        self, slices: tuple[int, ...], each: list[nn.Module], *, relu: bool = False
    ) -> None:
        super().__init__()
        self.slices, self.each = slices, nn.ModuleList(each)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        out = self._plain(x)
        return out.relu() if self.relu else out

    def _plain(self, x: Tensor) -> Tensor:
        if len(self.each) == 1:
            out: Tensor = self.each[0](x)
            return out
        agents = len(self.slices)
        if x.dim() == 3:  # [A, B, I], between layers that follow one another
            return torch.stack([self.each[s](x[a]) for a, s in enumerate(self.slices)])
        parts = [self.each[s](x[a::agents]) for a, s in enumerate(self.slices)]
        return torch.stack(parts, 1).flatten(0, 1)


class LoopCell(Loop):
    def forward(self, x: Tensor, state: Tensor, keep: Tensor | None) -> Tensor:  # type: ignore[override]
        agents, states = len(self.slices), []
        for t, row in enumerate(x.view(-1, len(state), x.shape[-1])):
            if keep is not None:
                state = state * keep[t].unsqueeze(1)
            parts = [
                self.each[s](row[a::agents], state[a::agents]) for a, s in enumerate(self.slices)
            ]
            state = torch.stack(parts, 1).flatten(0, 1)
            states.append(state)
        return torch.stack(states)

    @staticmethod
    def together(units: list[tuple[nn.Module, Tensor, Tensor]], keep: Tensor) -> list[Tensor]:
        return [unit(x, state, keep) for unit, x, state in units]

    def read(self, states: Tensor) -> Tensor:
        return states


def _linear(stacked: StackedLinear) -> Loop:
    each: list[nn.Module] = []
    for weight, bias in zip(stacked.weight.detach(), stacked.bias.detach(), strict=True):
        layer = nn.Linear(*weight.shape)
        layer.load_state_dict({"weight": weight.T, "bias": bias[0]})
        each.append(layer)
    return Loop(stacked._slices, each, relu=stacked.relu)


def _conv(stacked: StackedConv2d) -> Loop:
    s = stacked.groups
    weights = stacked.weight.detach().view(s, -1, *stacked.weight.shape[1:])
    assert stacked.bias is not None
    each: list[nn.Module] = []
    for weight, bias in zip(weights, stacked.bias.detach().view(s, -1), strict=True):
        out, channels, *kernel = weight.shape
        layer = nn.Conv2d(channels, out, kernel, stacked.stride)  # type: ignore[arg-type]
        layer.load_state_dict({"weight": weight, "bias": bias})
        each.append(layer)
    return Loop(stacked._slices, each, relu=stacked.relu)


def _norm(stacked: StackedLayerNorm) -> Loop:
    each: list[nn.Module] = []
    for weight, bias in zip(stacked.weight.detach(), stacked.bias.detach(), strict=True):
        layer = nn.LayerNorm(weight.shape[1])
        layer.load_state_dict({"weight": weight[0], "bias": bias[0]})
        each.append(layer)
    return Loop(stacked._slices, each)


class LSTMCell(nn.LSTMCell):
    """torch's cell with its state, h and c, side by side."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
        h, c = state.chunk(2, 1)
        return torch.cat(super().forward(x, (h, c)), 1)


class LoopLSTM(LoopCell):
    def read(self, states: Tensor) -> Tensor:
        return states.chunk(2, -1)[0]


def torch_gates(stacked: StackedCell, columns: Tensor) -> Tensor:
    """[GATES * H, ...] of weights [..., GATES * H] in the order of torch's cell."""
    parts = list(columns.chunk(stacked.GATES, -1))
    if isinstance(stacked, StackedLSTM):  # i, f, o, g; torch has i, f, g, o
        parts[2], parts[3] = parts[3], parts[2]
    return torch.cat(parts, -1).T if columns.dim() == 2 else torch.cat(parts, -1)


def _cell(stacked: StackedCell) -> Loop:
    each: list[nn.Module] = []
    lstm = isinstance(stacked, StackedLSTM)
    for s in range(count_slices(stacked._slices)):
        sizes = stacked.input.weight.shape[1], stacked.weight.shape[1]
        cell = LSTMCell(*sizes) if lstm else nn.GRUCell(*sizes)
        cell.load_state_dict(
            {
                "weight_ih": torch_gates(stacked, stacked.input.weight[s]),
                "bias_ih": torch_gates(stacked, stacked.input.bias[s, 0]),
                "weight_hh": torch_gates(stacked, stacked.weight[s]),
                "bias_hh": torch_gates(stacked, stacked.bias[s, 0]),
            }
        )
        each.append(cell)
    return (LoopLSTM if lstm else LoopCell)(stacked._slices, each)


def as_loop(layer: nn.Module) -> Loop | None:
    """The loop that does what a stacked layer does; None if it is another layer."""
    if isinstance(layer, StackedCell):
        return _cell(layer)
    if isinstance(layer, StackedLinear):
        return _linear(layer)
    if isinstance(layer, StackedLayerNorm):
        return _norm(layer)
    return _conv(layer) if isinstance(layer, StackedConv2d) else None


def assert_history_is_steps(network: nn.Module, inputs: Inputs, first: Tensor) -> None:
    """Compare a critic's pass along sequences with one step of each row from the state before it.

    Args:
        network: critic that remembers.
        inputs: inputs [T * B, A, ...].
        first: [T, B] bool, rows that begin an episode.
    """
    assert isinstance(network, Recurrent)
    precision, (steps, envs) = Precision("fp32", CPU), first.shape
    whole, states = forward_history(network, inputs, first, precision)
    memory = torch.zeros_like(states[0])
    for t in range(steps):
        torch.testing.assert_close(states[t], memory, rtol=0, atol=1e-6)
        row = inputs.rows(t * envs, (t + 1) * envs)
        state = RecurrentState.of_rows(memory.unsqueeze(0), first[t : t + 1])
        out, after = forward(network, row, state, precision)
        torch.testing.assert_close(whole[t * envs : (t + 1) * envs], out, rtol=0, atol=1e-6)
        assert after is not None
        memory = after
    hidden = RecurrentState.of_rows(states[:-1], first)
    every, _ = forward(network, inputs, hidden, precision)
    torch.testing.assert_close(whole, every, rtol=0, atol=1e-6)


def unstack(network: nn.Module) -> None:
    """Put loops in the place of all stacked layers."""
    for name, child in network.named_children():
        loop = as_loop(child)
        if loop is None:
            unstack(child)
        else:
            setattr(network, name, loop)


def stacked_layers(network: nn.Module) -> list[nn.Module]:
    """Stacked layers, or the loops in their place, in order."""
    found: list[nn.Module] = []
    for child in network.children():
        is_layer = isinstance(child, StackedCell | StackedLinear | StackedConv2d | Loop)
        found += [child] if is_layer else stacked_layers(child)
    return found


class LoopPrecision(Precision):
    """fp32; clips each slice's gradient by its own norm, one after the other."""

    def __init__(self, networks: list[nn.Module], num_slices: int) -> None:
        super().__init__("fp32", CPU)
        self._networks, self._num_slices = networks, num_slices

    def step(  # type: ignore[override]
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        parameters: object,
        max_norm: float,
        num_slices: int = 1,
    ) -> Tensor:
        optimizer.zero_grad()
        loss.backward()
        return self._clip_and_step(optimizer, max_norm, num_slices)

    def step_together(  # type: ignore[override]
        self,
        terms: list[tuple[Tensor, Tensor]],
        learned: list[tuple[torch.optim.Optimizer, nn.Module]],
        max_norm: float,
        num_slices: int = 1,
    ) -> Tensor:
        for optimizer, _ in learned:
            optimizer.zero_grad()
        torch.autograd.backward(*zip(*terms, strict=True))  # type: ignore[misc]
        norms = [self._clip_and_step(adam, max_norm, num_slices) for adam, _ in learned]
        return torch.stack(norms)

    def _clip_and_step(
        self, optimizer: torch.optim.Optimizer, max_norm: float, num_slices: int
    ) -> Tensor:
        assert num_slices == self._num_slices
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        loops = [m for n in self._networks for m in n.modules() if isinstance(m, Loop)]
        inside = {id(p) for loop in loops for p in loop.parameters()}
        norms = []
        for s in range(num_slices):
            grads = [
                p.grad
                for loop in loops
                for p in loop.each[s].parameters()
                if any(p is q for q in mine)
            ]
            grads += [p.grad[s] for p in mine if id(p) not in inside]
            norm = sum(g.square().sum() for g in grads if g is not None).sqrt()  # type: ignore[union-attr]
            norms.append(norm)
            for g in grads:
                if max_norm and norm > max_norm and g is not None:
                    g *= max_norm / norm
        optimizer.step()
        return torch.stack(norms).max()


def looped(algorithm: Algorithm, num_slices: int) -> Algorithm:
    """A copy of an algorithm that loops over its agents' networks."""
    twin = copy.deepcopy(algorithm)
    networks = {n: p for n, p in twin._parts.items() if isinstance(p, nn.Module)}
    for network in networks.values():
        unstack(network)
    for name, part in twin._parts.items():
        if isinstance(part, torch.optim.Adam):
            group = part.param_groups[0]
            twin_adam = torch.optim.Adam(
                networks[name.removesuffix("_optimizer")].parameters(),
                group["lr"],
                eps=group["eps"],
            )
            twin._parts[name] = twin_adam
            setattr(twin, "_" + name, twin_adam)
    if isinstance(twin, Mappo):
        names = [name for name in ("actor", "critic") if name in networks]
        twin._learned = [(twin._parts[f"{name}_optimizer"], networks[name]) for name in names]  # type: ignore[misc]
    twin._precision = LoopPrecision(list(networks.values()), num_slices)
    return twin
