"""The codec writes and reads exactly what protobuf does."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmur.shared.process.errors import SpecError, WireError
from murmur.shared.rpc import METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec, ObservationCodec, check_size, timestep_layout
from murmur.shared.wire.spec import (
    WIRE_DTYPES,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
    action_layout,
    spec_from_proto,
    spec_to_proto,
)
from murmur.shared.wire.timestep import Array, TimeStep

SPECS = {
    "small": EnvSpec("e", 1, (ArraySpec("x", "float32", ()),), Discrete(2)),
    "mixed": EnvSpec(
        "e",
        3,
        (
            ArraySpec("maps", "uint8", (2, 5, 5)),
            ArraySpec("half", "float16", (3,)),
            ArraySpec("state", "float32", (7,), per_agent=False),
            ArraySpec("cell", "int32", (2,)),
        ),
        Continuous(2),
        ("return", "f1"),
        10,
    ),
    "large": EnvSpec("e", 4, (ArraySpec("image", "uint8", (3, 32, 32)),), Discrete(7), ("m",)),
}


def timestep(spec: EnvSpec, n: int, seed: int = 0) -> TimeStep:
    random = np.random.default_rng(seed)

    def array(dtype: str, *shape: int) -> Array:
        values = random.integers(0, 100, shape)
        return np.asarray(values if dtype[0] in "ui" else values / 7).astype(dtype)

    a = spec.num_agents
    return TimeStep(
        step_type=array("uint8", n),  # type: ignore[arg-type]
        reward=array("float32", n, a),  # type: ignore[arg-type]
        discount=array("float32", n),  # type: ignore[arg-type]
        observation={
            o.name: array(o.dtype, n, *((a,) * o.per_agent), *o.shape) for o in spec.observations
        },
        metrics={m: array("float32", n) for m in spec.metrics},  # type: ignore[misc]
    )


def payload(spec: EnvSpec, t: TimeStep) -> bytes:
    """The arrays as docs/wire.md tells it."""
    parts = [t.reward, t.discount, *(t.observation[o.name] for o in spec.observations)]
    parts += [t.metrics[m] for m in spec.metrics]
    return b"".join(p.tobytes() for p in [*parts, t.step_type])


def received(codec: ObservationCodec, message: bytes) -> tuple[int, TimeStep]:
    """Decode an observation of one message."""
    whole = codec.receive(message)
    assert whole is not None
    return whole


def assert_equal(got: TimeStep, wanted: TimeStep) -> None:
    np.testing.assert_array_equal(got.step_type, wanted.step_type)
    np.testing.assert_array_equal(got.reward, wanted.reward)
    np.testing.assert_array_equal(got.discount, wanted.discount)
    assert list(got.observation) == list(wanted.observation)
    assert list(got.metrics) == list(wanted.metrics)
    for name, array in wanted.observation.items():
        assert got.observation[name].dtype == array.dtype
        np.testing.assert_array_equal(got.observation[name], array)
    for name, metric in wanted.metrics.items():
        np.testing.assert_array_equal(got.metrics[name], metric)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("sequence", [1, 300, 2**63])
def test_observation_equals_protobuf(name: str, n: int, sequence: int) -> None:
    spec = SPECS[name]
    codec, sent = ObservationCodec(spec, n), timestep(spec, n)
    (message,) = codec.messages(sequence, sent)
    arrays = payload(spec, sent)
    by_protobuf = pb.WorkerMessage(observation=pb.Observation(sequence=sequence, arrays=arrays))
    assert message == by_protobuf.SerializeToString()
    got_sequence, got = received(codec, message)
    assert got_sequence == sequence
    assert_equal(got, sent)


NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
ARRAYS = st.builds(
    ArraySpec,
    NAMES,
    st.sampled_from(WIRE_DTYPES),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.booleans(),
)
ANY_SPEC = st.builds(
    EnvSpec,
    NAMES,
    st.integers(1, 4),
    st.lists(ARRAYS, min_size=1, max_size=4, unique_by=lambda a: a.name).map(tuple),
    st.builds(Discrete, st.integers(2, 9)) | st.builds(Continuous, st.integers(1, 3)),
    st.lists(NAMES, max_size=3, unique=True).map(tuple),
)


@given(ANY_SPEC, st.integers(1, 5), st.integers(1, 2**64 - 1), st.integers(0, 2**32))
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_whatever_the_spec_a_message_is_protobufs_and_comes_back(
    spec: EnvSpec, n: int, sequence: int, seed: int
) -> None:
    assert spec_from_proto(spec_to_proto(spec)) == spec
    sent = timestep(spec, n, seed)
    (message,) = ObservationCodec(spec, n).messages(sequence, sent)
    by_protobuf = pb.Observation(sequence=sequence, arrays=payload(spec, sent))
    assert message == pb.WorkerMessage(observation=by_protobuf).SerializeToString()
    got_sequence, got = received(ObservationCodec(spec, n), message)
    assert got_sequence == sequence
    assert_equal(got, sent)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("version", [1, 2**40])
def test_action_equals_protobuf(name: str, version: int) -> None:
    spec, n = SPECS[name], 6
    codec = ActionCodec(spec, n)
    dtype, shape = action_layout(spec.action)
    action = (np.arange(n * spec.num_agents * max(1, *shape, 1)) % 2).astype(dtype)
    action = action.reshape(n, spec.num_agents, *shape)
    message = codec.pack(9, version, action)
    by_protobuf = pb.LearnerMessage(
        action=pb.Action(sequence=9, policy_version=version, arrays=action.tobytes())
    )
    assert message == by_protobuf.SerializeToString()
    sequence, got_version, got = codec.unpack(message)
    assert (sequence, got_version) == (9, version)
    np.testing.assert_array_equal(got, action)


def test_zero_counters_are_read_however_they_were_written() -> None:
    """Protobuf leaves a zero out; murmur's own frames hold it. Both mean the same."""
    spec, n = SPECS["small"], 3
    codec, action = ActionCodec(spec, n), np.ones((n, 1), np.int32)
    by_protobuf = pb.LearnerMessage(action=pb.Action(sequence=1, arrays=action.tobytes()))
    for message in (by_protobuf.SerializeToString(), codec.pack(1, 0, action)):
        assert pb.LearnerMessage.FromString(message) == by_protobuf
        sequence, version, got = codec.unpack(message)
        assert (sequence, version) == (1, 0)
        np.testing.assert_array_equal(got, action)


def test_fields_in_another_order_are_read() -> None:
    """A protobuf writer may order fields as it likes."""
    spec = SPECS["small"]
    sent = timestep(spec, 2)
    arrays = payload(spec, sent)
    inner = bytes([2 << 3 | 2, len(arrays)]) + arrays + bytes([1 << 3 | 1, 5, *bytes(7)])
    message = bytes([2 << 3 | 2, len(inner)]) + inner
    sequence, got = received(ObservationCodec(spec, 2), message)
    assert sequence == 5
    assert_equal(got, sent)


def test_a_frame_is_written_anew_every_time() -> None:
    spec = SPECS["mixed"]
    codec = ObservationCodec(spec, 4)
    one, two = timestep(spec, 4, 1), timestep(spec, 4, 2)
    (message,) = codec.messages(1, one)
    codec.messages(2, two)
    assert_equal(received(codec, message)[1], one)


def test_arrays_that_are_not_contiguous_are_sent_in_c_order() -> None:
    spec = SPECS["mixed"]
    codec, sent = ObservationCodec(spec, 4), timestep(spec, 4)
    turned = {k: np.asfortranarray(v) for k, v in sent.observation.items()}
    reward = np.repeat(sent.reward, 2, axis=1)[:, ::2]
    strided = TimeStep(sent.step_type, reward, sent.discount, turned, sent.metrics)
    assert codec.messages(1, strided) == codec.messages(1, sent)


def test_received_arrays_are_read_only_views() -> None:
    spec = SPECS["mixed"]
    codec = ObservationCodec(spec, 4)
    _, got = received(codec, *codec.messages(1, timestep(spec, 4)))
    with pytest.raises(ValueError, match="read-only"):
        got.reward[0] = 1


def test_wrong_bytes_name_the_arrays() -> None:
    spec = SPECS["mixed"]
    message = pb.WorkerMessage(observation=pb.Observation(sequence=1, arrays=b"1234"))
    with pytest.raises(WireError, match=r"4 bytes, the spec says .*observation/maps uint8\[2, 3"):
        ObservationCodec(spec, 2).receive(message.SerializeToString())


def test_too_large_session_is_refused_before_memory_is_allocated() -> None:
    spec = EnvSpec("e", 4, (ArraySpec("x", "float32", (1000, 1000)),), Discrete(2))
    # 4 agents of a million floats, 4 rewards, a discount and a step type; 4 such fit 64 MiB
    num_bytes = 4 * (16_000_000 + 4 * 4 + 4 + 1)
    assert timestep_layout(spec, 4).num_bytes == num_bytes
    check_size(spec, 4)
    tracemalloc.start()
    try:
        with pytest.raises(SpecError, match=r"5 environments 'e' takes 80000105 bytes.*67108800"):
            ObservationCodec(spec, 5)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    vectors = EnvSpec("e", 4096, (ArraySpec("x", "uint8", ()),), Continuous(65_536))
    with pytest.raises(SpecError, match="an action of 1 environments 'e' takes 1073741824 bytes"):
        check_size(vectors, 1)


@pytest.mark.parametrize("extra", [0, 1])
def test_no_message_longer_than_any_encoding_of_it_is_parsed(extra: int) -> None:
    spec = SPECS["small"]
    codec = ObservationCodec(spec, 1)
    (frame,) = codec.messages(1, timestep(spec, 1))
    # An unknown field of this size: protobuf skips it, until the message is too long.
    long = frame + b"\x7a\x3e" + bytes(62 + extra)
    if extra:
        with pytest.raises(WireError, match=f"a message of {len(frame) + 65} bytes came"):
            codec.receive(long)
    else:
        assert received(codec, long)[0] == 1


def test_the_wrong_message_is_named() -> None:
    hello = pb.WorkerMessage(hello=pb.Hello()).SerializeToString()
    with pytest.raises(WireError, match="expected message 'observation', got 'hello'"):
        ObservationCodec(SPECS["small"], 2).receive(hello)
    with pytest.raises(WireError, match="no LearnerMessage"):
        ActionCodec(SPECS["small"], 2).unpack(b"\xff\xff\xff")


def test_arrays_that_do_not_fit_the_spec_are_named() -> None:
    spec = SPECS["mixed"]
    codec, good = ObservationCodec(spec, 4), timestep(spec, 4)
    observation = dict(good.observation)
    half = observation.pop("half")
    for changed, wanted in (
        (observation, "observation 'half' is in the spec but missing"),
        ({**observation, "half": half[:2]}, r"observation 'half' has shape \(2, 3, 3\)"),
        ({**observation, "half": half.astype("f4")}, "observation 'half' has dtype float32"),
    ):
        bad = TimeStep(good.step_type, good.reward, good.discount, changed, good.metrics)
        with pytest.raises(WireError, match=wanted):
            codec.messages(1, bad)


def test_floats_are_aligned() -> None:
    """step_type, of one byte, comes last; else every float behind it would be misaligned."""
    names = [name for name, _, _ in timestep_layout(SPECS["mixed"], 3).fields]
    assert names[0] == "reward"
    assert names[-1] == "step_type"


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root / 'proto'}"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "rollout.proto"]
    subprocess.run(command, check=True)
    ours = (root / "shared/rpc/rollout_pb2.py").read_text()
    assert "# Protobuf Python Version: 6.31.1\n" in ours, "run `make proto`: users have 6.31 too"
    start = "# @@protoc_insertion_point(imports)"  # what stands before names the version
    generated = (tmp_path / "rollout_pb2.py").read_text().partition(start)[2]
    assert generated
    assert generated == ours.partition(start)[2], "run `make proto`"
    kinds = (tmp_path / "rollout_pb2.pyi").read_text().replace("_Optional[bool]", "bool")
    assert kinds == (root / "shared/rpc/rollout_pb2.pyi").read_text(), "run `make proto`"


def test_method_is_that_of_the_contract() -> None:
    service = pb.DESCRIPTOR.services_by_name["Rollout"]
    assert f"/{service.full_name}/{service.methods[0].name}" == METHOD


@pytest.mark.parametrize(
    ("kind", "values", "shown"),
    [
        (Discrete(3), [0, 3], "3"),
        (Discrete(3), [-1, 2], "-1"),
        (Continuous(1, -1.0, 2.0), [2.0, 2.5], "2.5"),
        (Continuous(1, -1.0, 2.0), [-1.0, float("nan")], "nan"),
        (Continuous(1, -1.0, 2.0), [float("-inf"), 0.0], "-inf"),
    ],
)
def test_actions_outside_the_spec_are_the_learners_fault(
    kind: Discrete | Continuous, values: list[float], shown: str
) -> None:
    spec = EnvSpec("toy", 1, (ArraySpec("x", "float32", (1,)),), kind)
    codec = ActionCodec(spec, 2)
    dtype, shape = action_layout(kind)
    action = np.array(values, dtype).reshape(2, 1, *shape)
    with pytest.raises(WireError, match=f"the learner sent action {shown} for agent 0 of env"):
        codec.unpack(codec.pack(1, 1, action))
