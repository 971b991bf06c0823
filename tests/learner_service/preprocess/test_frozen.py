"""Frozen agents act, and nothing is learned for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmur.learner_service.checkpoint.contents import load_algorithm
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import Algorithm, build_algorithm
from murmur.learner_service.preprocess.frozen import HideFrozen
from murmur.learner_service.storage.rollout import Batch
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, EnvSpec
from tests.learner_service.algorithms.test_contract import ENTRIES, Case, Entry
from tests.learner_service.running import experiment
from tests.learner_service.toys import CPU, MID, learn, random_transitions

SHARING = (0, 0, 1)
VIEW, MASK = OBSERVATION + "view", OBSERVATION + AGENT_MASK
FROZEN = (2,)
NOT_OF_SETS = ("value_norm", "temperature", "exploration")  # no networks


def frozen(entry: Entry) -> Entry:
    return replace(entry, options={**entry.options, "frozen_agents": FROZEN})


CASES = {
    f"{name}-{space}-{'recurrent' if width else 'plain'}": Case(entry, space, SHARING, width)
    for name, entry in ENTRIES.items()
    for space in entry.spaces
    for width in entry.recurrent
}
every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=name,
            marks=[pytest.mark.long] * bool(case.space != "discrete" or case.recurrent),
        )
        for name, case in CASES.items()
    ],
)


def networks(algorithm: Algorithm[Any]) -> dict[str, nn.Module]:
    """The modules with a parameter group for each of SHARING, equal ones side by side."""
    found: dict[str, nn.Module] = {}
    for name, part in algorithm.parts.items():
        if name in ("values", "target") and hasattr(part, "agents"):
            found[name] = part.agents
        elif isinstance(part, nn.Module) and name not in (
            "value_norm",
            "reward_norm",
            "temperature",
            "exploration",
        ):
            found[name] = part
    return found


def weights(algorithm: Algorithm[Any], of_set: int) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": parameter.detach().view(2, -1)[of_set].clone()
        for name, network in networks(algorithm).items()
        for key, parameter in network.named_parameters()
    }


@every_case
def test_weights_of_frozen_agents_stay_to_the_bit(case: Case) -> None:
    algorithm = replace(case, entry=frozen(case.entry)).build()
    learned, kept = weights(algorithm, 0), weights(algorithm, 1)
    for seed in range(3):
        learn(algorithm, case.batch(algorithm, seed))
    for name, before in kept.items():
        assert torch.equal(weights(algorithm, 1)[name], before), name
    moved = [name for name, x in weights(algorithm, 0).items() if not torch.equal(x, learned[name])]
    assert {name.partition(".")[0] for name in moved} >= set(networks(algorithm)) - {"target"}


@pytest.mark.parametrize("name", ["ippo", "coma", "ddpg", "masac"])
def test_the_others_learn_as_if_all_did(name: str) -> None:
    """Each parameter group has a loss of its own: freezing one changes no other."""
    entry = ENTRIES[name]
    case = Case(entry, "discrete", SHARING, 0)
    alone, all_learn = (replace(case, entry=e).build() for e in (frozen(entry), entry))
    batch = case.batch(all_learn)
    for algorithm in (alone, all_learn):
        learn(algorithm, batch)
    for key, value in weights(all_learn, 0).items():
        torch.testing.assert_close(weights(alone, 0)[key], value, msg=key)


def test_frozen_agents_count_as_dead_and_unpaid() -> None:
    hide = HideFrozen(FROZEN, SHARING, CPU)
    kinds = torch.full((4, 1), MID, dtype=torch.uint8)
    rows = {"reward": torch.ones(4, 1, 3), "step_type": kinds, VIEW: torch.zeros(4, 1, 3, 2)}
    hidden = hide.batch(Batch(dict(rows), [0]), 0).arrays
    assert hidden["reward"].tolist() == [[[1, 1, 0]]] * 4
    assert hidden[MASK].tolist() == [[[1, 1, 0]]] * 4
    dead = {**rows, MASK: torch.tensor([[[0, 1, 1]]] * 4, dtype=torch.uint8)}
    assert hide.batch(Batch(dead, [0]), 0).arrays[MASK].tolist() == [[[0, 1, 0]]] * 4
    assert dead[MASK].tolist() == [[[0, 1, 1]]] * 4  # the batch is unchanged


def test_both_ends_of_transitions_hide_frozen_agents() -> None:
    spec = Case(ENTRIES["qmix"], "discrete", True, 0).spec
    batch = random_transitions(spec, 8)
    hidden = HideFrozen(FROZEN, SHARING, CPU).batch(batch, 0)
    for arrays in (hidden.arrays, hidden.next_arrays):
        assert not arrays[MASK][:, 2].any()
    assert not hidden.reward[:, 2].any()
    assert torch.equal(hidden.reward[:, :2], batch.reward[:, :2])
    assert batch.reward[:, 2].any()


@pytest.mark.parametrize(
    ("sharing", "agents", "words"),
    [
        (True, [2], r"agent 2 shares its networks with \[0, 1\].*share_parameters=\[0,0,1\]"),
        ([0, 0, 1], [1], r"agent 1 shares its networks with \[0\].*share_parameters=\[0,1,2\]"),
        (False, [3], "there is no agent 3; the environment has 3"),
        (False, [0, 1, 2], "no agent is left to learn"),
    ],
)
@pytest.mark.parametrize("name", ["mappo", "coma", "maddpg", "masac", "qmix"])
def test_who_cannot_be_frozen_is_refused(
    name: str, sharing: Any, agents: list[int], words: str
) -> None:
    options = {"name": name, "share_parameters": sharing, "frozen_agents": agents}
    spec = Case(ENTRIES["mappo"], "discrete", True, 0).spec
    network = PluginConfig(name="mlp", hidden=(8,))
    with pytest.raises(ConfigError, match=rf"algorithm\.frozen_agents = .*{words}"):
        build_algorithm(PluginConfig(**options), spec, network, Precision("fp32", CPU), CPU, 1)


def test_a_resumed_run_keeps_who_is_frozen(tmp_path: Path) -> None:
    """Adam remembers gradients of agents that learned: it would move them."""

    def config(agents: list[int]) -> ExperimentConfig:
        base = experiment().model_dump(mode="json")
        algorithm = {"name": "mappo", "share_parameters": SHARING, "frozen_agents": agents}
        return validate(ExperimentConfig, {**base, "algorithm": algorithm})

    def build(agents: list[int]) -> Algorithm[Any]:
        spec: EnvSpec = Case(ENTRIES["mappo"], "discrete", True, 0).spec
        wanted = config(agents)
        precision = Precision("fp32", CPU)
        return build_algorithm(wanted.algorithm, spec, wanted.network, precision, CPU, 1)

    state = {"config": config([]).model_dump_json(), "algorithm": build([]).state_dict()}
    load_algorithm(tmp_path, state, config([]), build([]))
    with pytest.raises(CheckpointError, match=r"frozen_agents: \[\] there, \[2\] here.*--from"):
        load_algorithm(tmp_path, state, config([2]), build([2]))
