"""SUPPLY sessions against a running learner: what is granted, refused, reassigned and counted."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from murmur.kit.certs import make_certificates
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.rpc import METHOD, PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.credentials import CredentialFolder, channel_credentials
from murmur.shared.wire.sample_codec import Grant, SampleCodec, broken_sample, unpack_grant
from murmur.shared.wire.samples import SPLITS, SampleSpec, samples_to_proto
from tests.learner_service.running import RunningLearner, running_learner
from tests.supply.toy_source import ToySource
from tests.waiting import wait_until

SOURCE = ToySource(train=24, valid=4)
TIMEOUT_S = 60


def config(server: dict[str, float] | None = None, **learner: object) -> ExperimentConfig:
    data = {
        "env_server": server or {},
        "source": {"name": "toy"},
        "supply": {"window": 8},
        "algorithm": {"name": "segmentation", "batch_size": 4, "epochs": 2, "warmup_epochs": 0},
        "network": {"name": "unet", "channels": [8, 8], "groups": 4},
        "learner": {"port": 0, "metrics_port": 0, "device": "cpu", "num_threads": 1, **learner},
    }
    return validate(ExperimentConfig, data)


class Supplier:
    """One SUPPLY session, driven by the test."""

    def __init__(
        self, port: int, how: grpc.ChannelCredentials | None = None, **changes: object
    ) -> None:
        self._out: queue.Queue[bytes | None] = queue.Queue()
        where = f"127.0.0.1:{port}"
        self._channel = grpc.secure_channel(where, how) if how else grpc.insecure_channel(where)
        self._call = self._channel.stream_stream(METHOD)(
            iter(self._out.get, None), timeout=TIMEOUT_S
        )
        self.codec = SampleCodec(SOURCE.spec)
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id="s-1",
            mode=pb.MODE_SUPPLY,
            source=samples_to_proto(SOURCE.spec),
        )
        for name, value in changes.items():
            hello.ClearField(name)  # type: ignore[arg-type]
            if isinstance(value, SampleSpec):
                hello.source.CopyFrom(samples_to_proto(value))
            else:
                setattr(hello, name, value)
        self.send(pb.WorkerMessage(hello=hello).SerializeToString())

    def __enter__(self) -> "Supplier":
        return self

    def __exit__(self, *error: object) -> None:
        self._out.put(None)
        self._call.cancel()
        self._channel.close()

    def send(self, message: bytes) -> None:
        self._out.put(message)

    def welcomed(self) -> "Supplier":
        message = pb.LearnerMessage.FromString(next(self._call))
        assert message.WhichOneof("message") == "welcome"
        return self

    def grant(self) -> Grant:
        return unpack_grant(SOURCE.spec, next(self._call))

    def answer(self, grant: Grant, broken: tuple[int, ...] = ()) -> None:
        split = SPLITS[grant.split]
        lost = [i for i in grant.indices if split == "train" and i in broken]
        samples = [SOURCE.read(split, i) for i in grant.indices if i not in lost]
        named = [broken_sample(i, "unreadable", f"{i}.png") for i in lost]
        for message in self.codec.messages(grant, samples, named):
            self.send(message)

    def refused(self) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self._call:
                pass
        return caught.value.code().name, caught.value.details()


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[RunningLearner]:
    with running_learner(tmp_path, config()) as running:
        yield running


def test_an_ended_session_owes_to_the_next_one(learner: RunningLearner) -> None:
    with Supplier(learner.port).welcomed() as first:
        owed = [first.grant(), first.grant()]
        assert [grant.sequence for grant in owed] == [1, 2]
        assert sum(len(grant.indices) for grant in owed) == 8  # the window
    wait_until(lambda: learner.metric("samples_reassigned_total") == 8, "8 samples come back")
    with Supplier(learner.port).welcomed() as second:
        assert [second.grant().indices for _ in owed] == [grant.indices for grant in owed]


def test_all_is_trained_once_an_epoch_without_broken_samples(learner: RunningLearner) -> None:
    with Supplier(learner.port).welcomed() as supplier:
        grant = supplier.grant()
        broken = grant.indices[:1]
        asked = [(grant.split, index) for index in grant.indices]
        while len(asked) < 28:
            supplier.answer(grant, broken)
            grant = supplier.grant()
            asked += [(grant.split, index) for index in grant.indices]
        assert len(set(asked)) == 28  # each once, as the cache keeps all of them
        # The run ends soon after the last answer, and with it the metrics.
        sent = 28 - len(grant.indices) - 1
        wait_until(lambda: learner.metric("samples_received_total") == sent, "all but the last")
        assert learner.metric("samples_broken_total", reason="unreadable") == 1
        supplier.answer(grant, broken)
        progress = learner.run_dir / "progress.jsonl"
        wait_until(lambda: '"rows_trained": 46,' in progress.read_text(), "2 epochs of 23 samples")


def test_another_data_set_is_refused(learner: RunningLearner) -> None:
    with Supplier(learner.port).welcomed():
        other = replace(SOURCE.spec, digest="00" * 32)
        with Supplier(learner.port, source=other) as supplier:
            code, details = supplier.refused()
    assert code == "FAILED_PRECONDITION"
    assert "worker 's-1' brings another data set than this run's: digest:" in details
    assert "the files or options of source 'toy' are not the same on all servers" in details


def test_an_environment_is_refused_by_a_run_with_a_source(learner: RunningLearner) -> None:
    with Supplier(learner.port, mode=pb.MODE_TRAIN, num_envs=1) as supplier:
        code, details = supplier.refused()
    assert code == "FAILED_PRECONDITION"
    assert "brings an environment, this run learns from a source" in details


def test_a_mask_with_an_unknown_class_ends_its_session(learner: RunningLearner) -> None:
    with Supplier(learner.port).welcomed() as supplier:
        grant = supplier.grant()
        samples = [SOURCE.read(SPLITS[grant.split], i) for i in grant.indices]
        samples[0]["mask"][0, 0] = 17  # type: ignore[call-overload]
        for message in supplier.codec.messages(grant, samples, []):
            supplier.send(message)
        code, details = supplier.refused()
    assert code == "INVALID_ARGUMENT"
    assert "holds class 17; there are 3 classes" in details


def test_a_silent_session_loses_what_it_was_asked_for(tmp_path: Path) -> None:
    quick = config({"step_timeout_s": 0.01}, session_timeout_s=0.05)
    with (
        running_learner(tmp_path, quick) as learner,
        Supplier(learner.port).welcomed() as supplier,
    ):
        code, details = supplier.refused()
        wait_until(lambda: learner.metric("samples_reassigned_total") == 8, "8 samples come back")
    assert code == "DEADLINE_EXCEEDED"
    assert "has sent no samples for 0.5 s" in details


def test_samples_come_over_tls_with_an_environment_token(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", ["127.0.0.1"], 30)

    def credentials(role: str) -> grpc.ChannelCredentials:
        return channel_credentials(CredentialFolder(tmp_path / "certs" / role).current(), role)  # type: ignore[arg-type]

    files = [tmp_path / "certs" / "environment" / name for name in ("key.pem", "certificate.pem")]
    no_token = grpc.ssl_channel_credentials(
        (tmp_path / "certs" / "ca.pem").read_bytes(), *(file.read_bytes() for file in files)
    )
    secured = config().model_dump() | {"security": {"folder": str(tmp_path / "certs" / "learner")}}
    secured["algorithm"]["epochs"] = 10_000
    with running_learner(tmp_path / "run", validate(ExperimentConfig, secured)) as learner:
        for how, code, words in (
            (None, "UNAVAILABLE", ""),
            (no_token, "UNAUTHENTICATED", "metadata 'authorization: Bearer ...' needed"),
            (credentials("evaluator"), "PERMISSION_DENIED", "does not allow MODE_SUPPLY"),
            (credentials("read-only"), "PERMISSION_DENIED", "read-only opens no session"),
        ):
            with Supplier(learner.port, how) as supplier:
                answer = supplier.refused()
            assert answer[0] == code
            assert words in answer[1]
        assert learner.metric("samples_received_total") == 0
        with Supplier(learner.port, credentials("environment")).welcomed() as supplier:
            asked = 0
            while asked < 28:
                grant = supplier.grant()
                asked += len(grant.indices)
                supplier.answer(grant)
            wait_until(lambda: learner.metric("samples_received_total") == 28, "28 samples")
