"""Networks over entities and over the agents of a team: what is heard, and what is not."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import build_network
from murmur.learner_service.layers.entities import SelfAttention
from murmur.learner_service.layers.inputs import ActorInputs, CriticInputs, InputOptions
from murmur.learner_service.layers.messages import Messages
from murmur.learner_service.layers.stacked import LayersConfig
from murmur.learner_service.learning.base import build_algorithm
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ADJACENCY, AGENT_MASK, STATE, ArraySpec, Discrete, EnvSpec
from tests.learner_service.algorithms.test_contract import ALIVE, ENTRIES, numbers
from tests.learner_service.toys import CPU

A = 4
OWN = ArraySpec("own", "float32", (3,))
EDGES = ArraySpec(ADJACENCY, "uint8", (A,))
THERE = ArraySpec(AGENT_MASK, "uint8", ())
FOES = ArraySpec("foes", "float32", (5, 2)), ArraySpec("foes_mask", "uint8", (5,))


def spec(*observations: ArraySpec, agents: int = A) -> EnvSpec:
    return EnvSpec("team", agents, observations, Discrete(3), (), 6)


def observed(of: EnvSpec, rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Random observations; all flags are 1."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for o in of.observations:
        shape = (rows, *((of.num_agents,) * o.per_agent), *o.shape)
        if o.dtype == "uint8":
            found[o.name] = torch.ones(shape, dtype=torch.uint8)
        else:
            found[o.name] = torch.randn(shape, generator=generator)
    return found


class Net:
    """A network with its inputs, without gradient."""

    def __init__(self, of: EnvSpec, name: str, **options: Any) -> None:
        hears = name == "graph" or bool(options.get("communication"))
        self.inputs = ActorInputs(of, InputOptions(alive=hears))
        torch.manual_seed(1)
        config = PluginConfig(**{"name": name, "width": 8, "heads": 2, **options})
        self.net = build_network(config, self.inputs.shape, 3, (0,) * of.num_agents)

    @torch.no_grad()
    def __call__(self, seen: dict[str, Tensor]) -> Tensor:
        inputs = self.inputs(seen)
        out: Tensor = self.net(inputs.image, inputs.vector)
        return out


def by_hand(layer: Messages, h: Tensor, edges: Tensor, aggregate: str) -> Tensor:
    """The definition, agent by agent, head by head."""

    def through(x: Tensor, of: Any) -> Tensor:
        return x @ of.weight[0] + of.bias[0, 0]

    rows = []
    for i in range(len(h)):
        senders = [j for j in range(len(h)) if edges[i, j]]
        sent = {j: through(h[j], layer.send) for j in (*senders, i)}
        heard = torch.zeros(h.shape[1])
        if senders and aggregate == "attention":
            width, heads = h.shape[1], 2
            d = width // heads
            for head in range(heads):
                place = slice(head * d, (head + 1) * d)
                query = sent[i][:width][place]
                keys = torch.stack([sent[j][width : 2 * width][place] for j in senders])
                values = torch.stack([sent[j][2 * width :][place] for j in senders])
                score = torch.stack([(query * key).sum() / d**0.5 for key in keys])
                weight = score.exp() / score.exp().sum()
                heard[place] = (weight.unsqueeze(1) * values).sum(0)
        elif senders:
            every = torch.stack([sent[j] for j in senders])
            heard = {"sum": every.sum(0), "mean": every.mean(0), "max": every.amax(0)}[aggregate]
        changed = torch.relu(through(h[i], layer.own) + through(heard, layer.heard))
        x = h[i] + changed
        rows.append((x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt())
    return torch.stack(rows)


@pytest.mark.parametrize("aggregate", ["attention", "mean", "sum", "max"])
@torch.no_grad()
def test_a_round_of_messages_is_a_loop_over_agents(aggregate: Any) -> None:
    torch.manual_seed(0)
    layer = Messages(8, aggregate, 2, LayersConfig())
    h, edges = torch.randn(3, A, 8), torch.rand(3, A, A) < 0.5
    edges[:, 1] = False  # hears none
    got = layer(h, edges)
    for row in range(3):
        wanted = by_hand(layer, h[row], edges[row], aggregate)
        torch.testing.assert_close(got[row], wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_messages_by_arithmetic() -> None:
    # W = V = 1, U = 0, no biases. Agent 0 hears 1 and 2: the mean of (3, 1) and (5, 3) is (4, 2).
    layer = Messages(2, "mean", 1, LayersConfig())
    layer.norm = torch.nn.Identity()  # type: ignore[assignment]
    for of, weight in ((layer.send, 1.0), (layer.heard, 1.0), (layer.own, 0.0)):
        of.weight.copy_(weight * torch.eye(2).unsqueeze(0))
        of.bias.zero_()
    h = torch.tensor([[[1.0, 0.0], [3.0, 1.0], [5.0, 3.0]]])
    edges = torch.tensor([[[0, 1, 1], [0, 0, 0], [1, 0, 0]]]).bool()
    # h + relu(heard): (1, 0) + (4, 2); (3, 1) + 0; (5, 3) + (1, 0).
    wanted = torch.tensor([[[5.0, 2.0], [3.0, 1.0], [6.0, 3.0]]])
    torch.testing.assert_close(layer(h, edges), wanted)


@torch.no_grad()
def test_masked_tokens_are_left_out_of_attention() -> None:
    torch.manual_seed(0)
    layer = SelfAttention(8, 2, LayersConfig())
    x, there = torch.randn(2, 5, 8), torch.tensor([[1, 0, 1, 0, 1], [1, 1, 0, 0, 0]]).bool()
    got = layer(x, there)
    for row in range(2):
        few = x[row : row + 1, there[row]]
        alone = layer(few, torch.ones(few.shape[:2], dtype=torch.bool))
        torch.testing.assert_close(got[row, there[row]], alone[0])


def test_entities_have_no_order_and_absent_ones_no_effect() -> None:
    net, seen = Net(spec(OWN, *FOES), "attention", layers=2), observed(spec(OWN, *FOES))
    seen["foes_mask"][..., 3:] = 0
    out, order = net(seen), torch.tensor([2, 4, 0, 1, 3])
    permuted = {**seen, **{k: seen[k][:, :, order] for k in ("foes", "foes_mask")}}
    torch.testing.assert_close(net(permuted), out)
    garbage = {**seen, "foes": seen["foes"].clone()}
    garbage["foes"][:, :, 3:] = 1e6
    torch.testing.assert_close(net(garbage), out, rtol=0, atol=0)
    present = {**seen, "foes": seen["foes"].clone()}
    present["foes"][:, :, 0] += 1
    assert (net(present) - out).abs().amax(-1).min() > 1e-4
    none = {**garbage, "foes_mask": torch.zeros_like(seen["foes_mask"])}
    assert net(none).isfinite().all()
    # Agents do not hear each other.
    other = {k: v.clone() for k, v in seen.items()}
    other["own"][:, 1], other["foes"][:, 1] = 9, 9
    assert torch.equal(net(other)[:, 0], out[:, 0])


def test_entity_sets_of_several_widths_and_more_entities() -> None:
    """The same weights serve sets of another size."""
    doors = ArraySpec("doors", "float32", (2, 4))
    few, many = spec(OWN, doors, *FOES), spec(OWN, doors, replace(FOES[0], shape=(9, 2)))
    small, large = Net(few, "attention"), Net(many, "attention")
    large.net.load_state_dict(small.net.state_dict())
    seen = observed(few)
    more = {k: v for k, v in seen.items() if k != "foes_mask"}
    # The mean of all tokens changes with each entity, also with one that is there twice.
    more["foes"] = torch.cat([seen["foes"], seen["foes"][:, :, :4]], 2)
    assert large(more).shape == small(seen).shape


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("graph", {}),
        *(("graph", {"aggregate": kind}) for kind in ("mean", "sum", "max")),
        ("attention", {"communication": True, "rounds": 2}),
    ],
)
def test_news_travel_along_edges_one_step_a_round(name: str, options: dict[str, Any]) -> None:
    of = spec(OWN, EDGES, THERE)
    net, seen = Net(of, name, **options), observed(of)
    # 0 hears 1, 1 hears 2, 2 hears 3.
    seen[ADJACENCY].zero_()
    seen[ADJACENCY][:, range(3), range(1, 4)] = 1
    out = net(seen)

    def changed(agent: int, **more: Tensor) -> list[int]:
        """Agents that act otherwise if one observes something else."""
        other = {**seen, **more, "own": seen["own"].clone()}
        other["own"][:, agent] += 1
        before = net({**seen, **more})
        return [a for a in range(A) if not torch.allclose(net(other)[:, a], before[:, a])]

    assert changed(3) == [1, 2, 3]  # two rounds
    assert changed(2) == [0, 1, 2]
    assert changed(0) == [0]
    # An absent agent sends and gets nothing, whatever the adjacency says.
    there = seen[AGENT_MASK].clone()
    there[:, 2] = 0
    mask = {AGENT_MASK: there}
    assert changed(3, **mask) == [3]
    assert changed(2, **mask) == [2]
    assert changed(1, **mask) == [0, 1]
    # Agents are rows: in another order they act the same.
    order = torch.tensor([2, 0, 3, 1])
    moved = {k: v[:, order] for k, v in seen.items()}
    moved[ADJACENCY] = moved[ADJACENCY][:, :, order]
    torch.testing.assert_close(net(moved), out[:, order], rtol=1e-5, atol=1e-5)


def test_without_adjacency_all_agents_attend_to_each_other() -> None:
    of = spec(OWN)
    net, seen = Net(of, "attention", communication=True), observed(of)
    other = {"own": seen["own"].clone()}
    other["own"][:, 3] += 1
    assert (net(other) - net(seen)).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("name", [name for name in ENTRIES if "trunk" not in name])
def test_every_algorithm_learns_with_agents_that_hear_each_other(name: str) -> None:
    entry = ENTRIES[name]
    of = EnvSpec("toy", 3, (OWN, ArraySpec(ADJACENCY, "uint8", (3,)), THERE), Discrete(3), (), 6)
    if "discrete" not in entry.spaces:
        pytest.skip("its case is continuous")
    network = PluginConfig(
        name="graph", width=8, heads=2, hidden=(8,), recurrent=entry.recurrent[-1]
    )
    config = PluginConfig(**{**entry.options, "share_parameters": True})
    algorithm = build_algorithm(config, of, network, Precision("fp32", CPU), CPU, 3)
    batch = entry.batch(algorithm, of, 0, ALIVE)
    log = [numbers(algorithm.update(copy.deepcopy(batch))) for _ in range(12)]
    assert log[-1][entry.loss] < 0.95 * log[0][entry.loss]


@pytest.mark.parametrize("name", ["mappo", "ippo", "ippo, one trunk"])
def test_entities_are_learned_from_by_actor_and_critic(name: str) -> None:
    entry = ENTRIES[name]
    of = EnvSpec("toy", 3, (OWN, *FOES, THERE), Discrete(3), (), 6)
    network = PluginConfig(name="attention", width=8, heads=2, hidden=(8,), recurrent=5)
    algorithm = build_algorithm(
        PluginConfig(**entry.options), of, network, Precision("fp32", CPU), CPU, 3
    )
    batch = entry.batch(algorithm, of, 0, ALIVE)
    log = [numbers(algorithm.update(copy.deepcopy(batch))) for _ in range(12)]
    assert log[-1][entry.loss] < 0.95 * log[0][entry.loss]


def test_a_critic_that_hears_gives_the_policy_the_mask_too() -> None:
    of = spec(OWN, THERE)
    options = {"name": "mappo", "critic_network": {"name": "attention", "communication": True}}
    mlp = PluginConfig(name="mlp", hidden=(8,))
    algorithm = build_algorithm(PluginConfig(**options), of, mlp, Precision("fp32", CPU), CPU, 3)
    assert algorithm._actor_inputs.shape.vector == 3 + 1 + A  # type: ignore[attr-defined]


def test_a_critic_that_reads_flags_refuses_normalized_ones() -> None:
    options = {"name": "mappo", "critic_network": {"name": "attention"}}
    mlp = PluginConfig(name="mlp", hidden=(8,), normalize_observations=True)
    with pytest.raises(ConfigError, match=r"critic_network = attention: it reads masks .* as 0"):
        build_algorithm(
            PluginConfig(**options), spec(OWN, *FOES), mlp, Precision("fp32", CPU), CPU, 3
        )


def test_the_critics_state_is_no_set_of_the_agent() -> None:
    state = ArraySpec(STATE, "float32", (6, 2), per_agent=False)
    shape = CriticInputs(spec(OWN, *FOES, state), InputOptions(), actions=False).shape
    assert [array.name for array in shape.arrays] == ["own", "foes", "foes_mask"]
    assert shape.vector == 3 + 10 + 5 + 12
    each = ArraySpec(STATE, "float32", (7,))  # of each agent
    shape = CriticInputs(spec(OWN, *FOES, each), InputOptions(), actions=False).shape
    assert [array.name for array in shape.arrays] == ["own", "foes", "foes_mask"]
    assert shape.vector == 3 + 10 + 5 + 7


@pytest.mark.parametrize(
    ("name", "options", "observations", "message"),
    [
        ("graph", {}, (OWN,), "needs an environment that gives 'adjacency', uint8"),
        (
            "graph",
            {},
            (OWN, ArraySpec(ADJACENCY, "float32", (A,))),
            r"'adjacency' is float32 \(4,\).*needs uint8 \(4,\)",
        ),
        (
            "graph",
            {},
            (OWN, ArraySpec(ADJACENCY, "uint8", (A + 1,))),
            r"'adjacency' is uint8 \(5,\).*needs uint8 \(4,\)",
        ),
        ("graph", {"heads": 3}, (OWN, EDGES), "width 8 is no multiple of its 3 heads"),
        ("attention", {}, (OWN,), "finds no set of entities"),
        ("attention", {"entities": ("own",)}, (OWN, *FOES), r"'own', which is of shape \(3,\)"),
        ("attention", {"entities": ("foe",)}, (OWN, *FOES), r"'foe', which is not observed.*foes"),
        ("attention", {"entities": ("foes", "foes")}, (OWN, *FOES), "names a set twice"),
        (
            "attention",
            {},
            (OWN, FOES[0], ArraySpec("foes_mask", "uint8", (4,))),
            r"'foes_mask' has shape \(4,\).*must be \(5,\)",
        ),
        ("attention", {}, (ArraySpec("map", "float32", (1, 5, 5)), *FOES), "takes no images"),
        ("graph", {"normalize_observations": True}, (OWN, EDGES), "normalize_observations"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, options: dict[str, Any], observations: tuple[ArraySpec, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Net(spec(*observations), name, **options)


def test_weights_by_agent_are_refused() -> None:
    config = PluginConfig(name="mappo", share_parameters=False)
    network = PluginConfig(name="graph")
    with pytest.raises(ConfigError, match="one parameter group for all agents, 4 are wanted"):
        build_algorithm(config, spec(OWN, EDGES), network, Precision("fp32", CPU), CPU, 3)
