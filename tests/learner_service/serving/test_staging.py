"""Rows on their way: packed as for a GPU they end where they do on the CPU, from every sender."""

from typing import Any

import numpy as np
import pytest
import torch

from murmur.learner_service.algorithms.mappo import Config, Mappo
from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.serving.requests import EnvSession
from murmur.learner_service.serving.staging import ForwardRows, HostStaging, Packet, SlotMemory
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.shared.config import PluginConfig
from murmur.shared.wire.spec import ArraySpec, Continuous, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, TimeStep
from tests.learner_service.serving_learner import Serving
from tests.learner_service.taped_graphs import taped
from tests.learner_service.toys import ABORTED, CPU, FIRST, LAST, MID, row

__all__ = ["taped"]

IMAGES = EnvSpec(
    "toy",
    2,
    (
        ArraySpec("image", "uint8", (3, 6, 5)),
        ArraySpec("view", "float32", (3,)),
        ArraySpec("clock", "int32", (1,), False),
        ArraySpec("action_mask", "uint8", (4,)),
    ),
    Discrete(4),
)
FORCES = EnvSpec("toy", 3, (ArraySpec("view", "float32", (5,)),), Continuous(2, -1.0, 1.0))


def mappo(spec: EnvSpec, recurrent: int) -> Mappo:
    config = Config(unroll_steps=4, batch_size=6 * spec.num_agents, batch_number=4)
    network = PluginConfig(name="auto", recurrent=recurrent)
    return Mappo(config, spec, network, Precision("fp32", CPU), CPU, 0)


def random_row(random: np.random.Generator, spec: EnvSpec, kind: int, n: int) -> TimeStep:
    """Numbers of all kinds, one and the same kind of row everywhere."""
    timestep = row(spec, n, kind)
    for name, array in timestep.observation.items():
        if name != "action_mask":
            array[:] = random.integers(200, size=array.shape)
    timestep.reward[:] = random.normal(size=timestep.reward.shape)
    return timestep


def served(
    spec: EnvSpec, recurrent: int, *, records: bool = False, graphs: Graphs | None = None
) -> tuple[list[Array], list[dict[str, Any]]]:
    """What three sessions of different size are answered, and the batches learned from."""
    algorithm, random = mappo(spec, recurrent), np.random.default_rng(0)
    actions, batches = [], []
    with Serving(algorithm, spec, records=records, graphs=graphs) as serving:
        sessions = [serving.session(n, first) for n, first in ((2, 0), (3, 2), (1, 5))]
        second = serving.session(2, evaluates=True)
        for t in range(14):
            kind = FIRST if t % 6 == 0 else ABORTED if t == 8 else MID if t % 6 < 5 else LAST
            rows = [(s, random_row(random, spec, kind, s.num_envs)) for s in sessions]
            late = rows[t % 3 :] if t else rows  # they do not stay in step
            actions += serving.exchange(*late, (second, random_row(random, spec, kind, 2)))
            while serving.storage.ready:
                batch = serving.storage.sample(0, 0)
                serving.storage.done(batch)
                batches.append(batch.arrays)
        for session in sessions[:2]:
            serving.storage.add_open(session.unroll)
        batches += serving.storage.state_dict()["ready"]
    return actions, batches


@pytest.mark.parametrize("recurrent", [0, 8], ids=["plain", "recurrent"])
@pytest.mark.parametrize("spec", [IMAGES, FORCES], ids=["images", "forces"])
def test_packed_rows_and_actions_are_those_of_the_plain_way(spec: EnvSpec, recurrent: int) -> None:
    actions, batches = served(spec, recurrent)
    packed_actions, packed = served(spec, recurrent, records=True)
    assert len(batches) == len(packed) >= 4
    for mine, its in zip(actions, packed_actions, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6, atol=1e-6)
    for mine, its in zip(batches, packed, strict=True):
        arrays, others = mine.get("arrays", mine), its.get("arrays", its)
        assert arrays.keys() == others.keys()
        for name, array in arrays.items():
            given = name in ("action", "log_prob", "raw_action")  # the last row was not acted on
            rows = slice(0, -1 if given else None)
            torch.testing.assert_close(array[rows], others[name][rows])
            if given and its is others:  # of a full unroll
                assert not others[name][-1].any()


@pytest.mark.parametrize("recurrent", [0, 8], ids=["plain", "recurrent"])
def test_filled_up_rows_are_stored_nowhere(recurrent: int) -> None:
    """Only random numbers differ: there are more of them."""
    _, batches = served(IMAGES, recurrent)
    _, filled_up = served(IMAGES, recurrent, records=True, graphs=Graphs(CPU))
    for mine, its in zip(batches, filled_up, strict=True):
        arrays, others = mine.get("arrays", mine), its.get("arrays", its)
        for name in arrays.keys() - {"action", "log_prob"}:
            torch.testing.assert_close(arrays[name], others[name])
        assert (others["action"] < 4).all()


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("recurrent", [0, 8], ids=["plain", "recurrent"])
@pytest.mark.parametrize("spec", [IMAGES, FORCES], ids=["images", "forces"])
def test_captured_acts_are_eager_acts_to_the_bit(spec: EnvSpec, recurrent: int) -> None:
    graphs = Graphs(CPU)
    graphs.enabled = True
    eager_actions, eager = served(spec, recurrent, records=True, graphs=Graphs(CPU))
    actions, batches = served(spec, recurrent, records=True, graphs=graphs)
    assert graphs.replays["act"] > 5
    assert not graphs.fallbacks
    for mine, its in zip(actions, eager_actions, strict=True):
        np.testing.assert_array_equal(mine, its)
    for batch, others in zip(batches, eager, strict=True):
        for name, array in batch.get("arrays", batch).items():
            assert torch.equal(array, others.get("arrays", others)[name]), name


def test_actions_are_stored_where_they_were_taken() -> None:
    algorithm, random = mappo(FORCES, 0), np.random.default_rng(0)
    with Serving(algorithm, FORCES, records=True, graphs=Graphs(CPU)) as serving:
        sessions, answers = [serving.session(n, 9 * n) for n in (4, 2)], []
        for t in range(5):
            kind = MID if t else FIRST
            rows = [(s, random_row(random, FORCES, kind, s.num_envs)) for s in sessions]
            answers.append(np.concatenate(serving.exchange(*rows)))
        batch = serving.storage.sample(0, 0)
        assert batch is not None
        stored = batch.arrays["action"][:4].numpy()
        assert stored.shape[1] == 6
        by_slot = np.stack(answers[:4])[:, [4, 5, 0, 1, 2, 3]]
        np.testing.assert_array_equal(stored, by_slot)


@pytest.mark.parametrize("recurrent", [0, 8], ids=["plain", "recurrent"])
def test_rows_that_are_not_stored_travel_apart(recurrent: int) -> None:
    random, policy = np.random.default_rng(0), mappo(FORCES, recurrent).make_policy()
    parts = [random_row(random, FORCES, kind, n) for kind, n in ((MID, 2), (FIRST, 1), (MID, 2))]
    memory = torch.arange(72.0).view(3, 3, 8) / 72 if recurrent else None
    # Two policies, or one twice: the first acts on two sessions' rows, the second knows nothing.
    groups = [ForwardRows(policy, parts[:2], memory), ForwardRows(policy, parts[2:], None)]
    with Serving(mappo(FORCES, 0), FORCES, records=True) as serving:
        serving.exchange((serving.session(3, 0), random_row(random, FORCES, FIRST, 3)))
        own = serving.staging.actions().copy()
        actions, after = serving.staging.forward_rows(groups, None)
        plain = HostStaging(torch.Generator(), None, Graphs(CPU))
        same, same_after = plain.forward_rows(groups, None)
        np.testing.assert_array_equal(actions, same)
        np.testing.assert_array_equal(serving.staging.actions(), own)
    assert len(actions) == 5
    for group, mine, its, rows in zip(
        groups, after, same_after, (slice(3), slice(3, 5)), strict=True
    ):
        together = {
            name: torch.from_numpy(np.concatenate([row.observation[name] for row in group.rows]))
            for name in parts[0].observation
        }
        before = None
        if recurrent:
            before = torch.zeros(len(actions[rows]), 3, 8)
            if group.memory is not None:
                before[:2] = group.memory[:2]  # the third row begins an episode
        alone = policy.act(together, None, before)
        np.testing.assert_array_equal(actions[rows], alone["action"].numpy())
        for state in (mine, its):
            assert (state is None) == (not recurrent)
            if state is not None:
                assert torch.equal(state, alone["memory"])


def test_packet_of_given_size_holds_records_and_indices_apart() -> None:
    record = RolloutStorage(FORCES, 1, 1, None, torch.device("meta")).arena.record
    assert record is not None
    data = torch.zeros(Packet.size(record, 5), dtype=torch.uint8)
    packet = Packet(data, record, 5)
    packet.index[:] = -1
    assert not packet.records.any()
    packet.records[:] = 7
    assert (packet.index == -1).all()
    assert data.all()


def session(n: int, first_slot: int) -> EnvSession:
    return EnvSession("w", FORCES, n, first_slot, np.zeros(n, np.int64))


def test_slot_memory_keeps_recurrent_states_while_it_grows() -> None:
    memory = SlotMemory(3, 2, CPU)
    first, second = session(2, 3), session(4, 9)
    second.memory = torch.arange(24.0).view(4, 3, 2)  # of a checkpoint
    memory.admit(first)
    places = torch.from_numpy(memory.places(first.slots))
    memory.remember(places, torch.ones(2, 3, 2))
    memory.admit(second)  # the table moves
    assert first.memory is not None
    assert second.memory is not None
    assert (first.memory == 1).all()
    assert torch.equal(second.memory, torch.arange(24.0).view(4, 3, 2))
    begins = torch.tensor([False, True])
    loaded = memory.load(places, begins)
    assert loaded[:, 0, 0].tolist() == [1, 0]
    assert (first.memory == 1).all()  # a copy: what is remembered changes when it has acted
    memory.dismiss(first)
    again = session(2, 3)
    memory.admit(again)  # another session in the same slots knows nothing of the last
    assert again.memory is not None
    assert not again.memory.any()
