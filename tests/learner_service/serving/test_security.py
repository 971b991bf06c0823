"""The learner's door over real sockets: certificates, tokens, roles, limits, rotation."""

import logging
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from grpc_health.v1 import health_pb2, health_pb2_grpc

from murmur.kit.certs import make_certificates
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.rpc import METHOD, PART_BYTES
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import MAX_HELLO_BYTES
from murmur.shared.wire.credentials import CredentialFolder, channel_credentials
from murmur.shared.wire.spec import spec_to_proto
from tests.learner_service.running import RunningLearner, experiment, running_learner
from tests.learner_service.toys import FIRST, MID, row, vector_spec
from tests.waiting import wait_until
from tests.wire import Client, Refused

SPEC = vector_spec()
HOSTS = ["localhost", "127.0.0.1"]
Code = grpc.StatusCode


def secured(folder: Path, **learner: object) -> ExperimentConfig:
    return experiment(learner=dict(learner), security={"folder": str(folder / "learner")})


def credentials(folder: Path, role: str) -> grpc.ChannelCredentials:
    """What an honest client of this role uses."""
    return channel_credentials(CredentialFolder(folder / role).current(), role)  # type: ignore[arg-type]


def tls(ca: Path, own: Path | None, token: str | None) -> grpc.ChannelCredentials:
    """Any mixture: which learner to trust, which certificate to show, which token to send."""
    key, certificate = (
        ((own / "key.pem").read_bytes(), (own / "certificate.pem").read_bytes())
        if own
        else (None, None)
    )
    channel = grpc.ssl_channel_credentials((ca / "ca.pem").read_bytes(), key, certificate)
    if token is None:
        return channel
    return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(token))


def token_of(folder: Path, role: str) -> str:
    return (folder / role / "tokens").read_text().split()[1]


def refusal(port: int, how: grpc.ChannelCredentials | None, **hello: object) -> Refused:
    with Client(port, SPEC, 1, how) as client, pytest.raises(Refused) as caught:
        client.hello(**hello)
    return caught.value


def health(port: int, how: grpc.ChannelCredentials) -> int:
    with grpc.secure_channel(f"127.0.0.1:{port}", how) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
    status: int = answer.status
    return status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    make_certificates(made, HOSTS, 30)
    return made


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Credentials of another authority."""
    made = tmp_path_factory.mktemp("stranger")
    make_certificates(made, HOSTS, 30)
    return made


@pytest.fixture(scope="module")
def learner(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLearner]:
    config = secured(folder, max_sessions_per_identity=2)
    with running_learner(tmp_path_factory.mktemp("run"), config) as running:
        yield running


def test_with_certificate_and_token_a_session_plays(learner: RunningLearner, folder: Path) -> None:
    with Client(learner.port, SPEC, 2, credentials(folder, "environment")) as client:
        client.hello()
        for t in range(3):
            client.exchange(row(SPEC, 2, MID if t else FIRST))


def expired(folder: Path, into: Path) -> Path:
    """A certificate of the right authority that ended yesterday, with its key."""
    into.mkdir()
    shutil.copy(folder / "environment" / "key.pem", into)
    good = x509.load_pem_x509_certificate((folder / "environment" / "certificate.pem").read_bytes())
    authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    yesterday = datetime.now(UTC) - timedelta(days=1)
    builder = (
        x509.CertificateBuilder(
            issuer_name=good.issuer,
            subject_name=good.subject,
            public_key=good.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=yesterday - timedelta(days=1),
            not_valid_after=yesterday,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
    )
    signed = builder.sign(authority, hashes.SHA256())  # type: ignore[arg-type]
    (into / "certificate.pem").write_bytes(signed.public_bytes(Encoding.PEM))
    return into


def end_soon(folder: Path, role: str, seconds: float) -> datetime:
    """Sign the certificate of a role again, to end soon; returns when."""
    path = folder / role / "certificate.pem"
    good = x509.load_pem_x509_certificate(path.read_bytes())
    authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    end = (datetime.now(UTC) + timedelta(seconds=seconds)).replace(microsecond=0)
    builder = x509.CertificateBuilder(
        issuer_name=good.issuer,
        subject_name=good.subject,
        public_key=good.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=good.not_valid_before_utc,
        not_valid_after=end,
    )
    for extension in good.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    signed = builder.sign(authority, hashes.SHA256())  # type: ignore[arg-type]
    path.write_bytes(signed.public_bytes(Encoding.PEM))
    return end


def test_certificates_end_and_are_renewed_while_streaming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stream continues; until renewed, new ones are refused, which both sides explain."""
    folder = tmp_path / "certs"
    make_certificates(folder, HOSTS, 30)
    end = max(end_soon(folder, role, 4) for role in ("learner", "environment"))
    own = CredentialFolder(folder / "environment")
    how = channel_credentials(own.current(), "environment")
    with (
        running_learner(tmp_path / "run", secured(folder)) as running,
        Client(running.port, SPEC, 2, how) as client,
    ):
        client.hello()
        client.exchange(row(SPEC, 2, FIRST))
        wait_until(lambda: datetime.now(UTC) > end + timedelta(seconds=1), lambda: "", 10)
        client.exchange(row(SPEC, 2, MID))
        late = channel_credentials(own.current(), "environment")
        assert refusal(running.port, late).code == Code.UNAVAILABLE
        for role in ("learner", "environment"):
            words = f"{role}/certificate.pem ended at {end:%Y-%m-%d %H:%M} UTC, and no peer"
            assert caplog.text.count(words) == 1, caplog.text
        make_certificates(folder, HOSTS, 30, renew=True)
        client.exchange(row(SPEC, 2, MID))
        renewed = channel_credentials(own.current(), "environment")
        assert health(running.port, renewed) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("what", ["plain text", "no certificate", "another authority", "expired"])
def test_without_a_valid_certificate_no_connection_is_made(
    learner: RunningLearner, folder: Path, stranger: Path, tmp_path: Path, what: str
) -> None:
    token = token_of(folder, "environment")
    how = {
        "plain text": lambda: None,
        "no certificate": lambda: tls(folder, None, token),
        "another authority": lambda: tls(folder, stranger / "environment", token),
        "expired": lambda: tls(folder, expired(folder, tmp_path / "expired"), token),
    }[what]()
    answer = refusal(learner.port, how)
    assert answer.code == Code.UNAVAILABLE  # the connection, not the call, was refused
    # Nothing else was wrong: with the right certificate the same token is good.
    good = tls(folder, folder / "environment", token)
    assert health(learner.port, good) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("what", ["another authority", "no server", "another name"])
def test_a_client_talks_to_no_other_learner(
    folder: Path, stranger: Path, tmp_path: Path, what: str
) -> None:
    if what == "another authority":
        serves, believes = stranger / "learner", folder
    elif what == "no server":  # an environment server's certificate is good for a client only
        serves = believes = Path(shutil.copytree(folder, tmp_path / "certs"))
        shutil.copy(folder / "learner" / "tokens", serves / "environment" / "tokens")
        serves /= "environment"
    else:
        make_certificates(tmp_path / "certs", ["gpu-host"], 30)
        serves, believes = tmp_path / "certs" / "learner", tmp_path / "certs"
    config = experiment(security={"folder": str(serves)})
    with running_learner(tmp_path / "run", config) as running:
        answer = refusal(running.port, tls(believes, None, None))
    assert answer.code == Code.UNAVAILABLE
    reason = "Verification Check failed" if what == "another name" else "handshake failed"
    assert reason in answer.details


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, "authorization"), ("w" * 43, "not one of the learner's"), ("", "not one of the")],
)
def test_every_rpc_needs_a_token(
    learner: RunningLearner, folder: Path, token: str | None, words: str
) -> None:
    before = learner.metric("sessions_refused_total", reason="token")
    how = tls(folder, folder / "environment", token)
    answer = refusal(learner.port, how)
    assert answer.code == Code.UNAUTHENTICATED
    assert words in answer.details
    with pytest.raises(grpc.RpcError) as caught:
        health(learner.port, how)
    assert caught.value.code() == Code.UNAUTHENTICATED
    assert learner.metric("sessions_refused_total", reason="token") == before + 2


def test_each_role_may_do_its_own_and_no_more(learner: RunningLearner, folder: Path) -> None:
    evaluator, reader = credentials(folder, "evaluator"), credentials(folder, "read-only")
    answer = refusal(learner.port, evaluator, mode=pb.MODE_TRAIN)
    assert answer.code == Code.PERMISSION_DENIED
    assert "role evaluator does not allow MODE_TRAIN" in answer.details
    for mode in (pb.MODE_TRAIN, pb.MODE_EVALUATE):
        answer = refusal(learner.port, reader, mode=mode)
        assert answer.code == Code.PERMISSION_DENIED
        assert "read-only opens no session" in answer.details
    assert health(learner.port, reader) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("certificate", "token"),
    [("evaluator", "environment"), ("read-only", "evaluator"), ("environment", "evaluator")],
)
def test_certificate_and_token_must_be_of_one_role(
    learner: RunningLearner, folder: Path, certificate: str, token: str
) -> None:
    before = learner.metric("sessions_refused_total", reason="role")
    mixed = tls(folder, folder / certificate, token_of(folder, token))
    answer = refusal(learner.port, mixed, mode=pb.MODE_EVALUATE)
    assert answer.code == Code.PERMISSION_DENIED
    assert f"certificate is one of the role {certificate}, the token one of" in answer.details
    assert f"role {token}" in answer.details
    assert learner.metric("sessions_refused_total", reason="role") == before + 1


def test_one_identity_takes_so_many_sessions(learner: RunningLearner, folder: Path) -> None:
    wait_until(lambda: learner.metric("sessions") == 0)
    how = credentials(folder, "environment")
    with Client(learner.port, SPEC, 1, how) as a, Client(learner.port, SPEC, 1, how) as b:
        a.hello()
        b.hello()
        answer = refusal(learner.port, how)
        assert answer.code == Code.RESOURCE_EXHAUSTED
        assert "'environment' has 2 sessions" in answer.details
        assert "learner.max_sessions_per_identity=2" in answer.details
        # The learner's certificate with the same token is another identity.
        other = tls(folder, folder / "learner", token_of(folder, "environment"))
        with Client(learner.port, SPEC, 1, other) as c:
            c.hello()
    wait_until(lambda: learner.metric("sessions") == 0)
    with Client(learner.port, SPEC, 1, how) as client:  # there is room again
        client.hello()


def test_a_line_about_each_session(
    learner: RunningLearner, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(worker: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if f"worker='{worker}'" in r.getMessage()]

    with caplog.at_level(logging.INFO, logger="murmur.audit"):
        with Client(learner.port, SPEC, 1, credentials(folder, "environment")) as client:
            client.hello(worker_id="good")
            client.exchange(row(SPEC, 1, FIRST))
            client.half_close()
            with pytest.raises(StopIteration):
                client.read()
        refusal(learner.port, credentials(folder, "evaluator"), worker_id="bad")
        refusal(learner.port, tls(folder, folder / "environment", "w" * 43))
        wait_until(lambda: bool(lines("good") and lines("bad")))
    (good,), (bad,) = lines("good"), lines("bad")
    for words in ("identity='environment'", "role='environment'", "mode='train'", "peer=ipv4:"):
        assert words in good
    assert "messages=1 outcome='OK'" in good
    assert "role='evaluator'" in bad
    assert "PERMISSION_DENIED: a token of the role evaluator" in bad
    assert "UNAUTHENTICATED: this token is not one" in caplog.text
    assert "w" * 43 not in caplog.text  # not even a wrong one is written down
    assert token_of(folder, "environment") not in caplog.text


def test_a_name_that_would_forge_a_line_is_refused(learner: RunningLearner, folder: Path) -> None:
    how = credentials(folder, "environment")
    for name in ("x\nsession identity='root'", "x" * 257):
        answer = refusal(learner.port, how, worker_id=name)
        assert answer.code == Code.INVALID_ARGUMENT
        assert "\n" not in answer.details


def _huge_arrays() -> pb.EnvSpec:
    spec = spec_to_proto(SPEC)
    spec.observations[0].shape[:] = [65_535, 65_535, 65_535]
    return spec


def _many_agents() -> pb.EnvSpec:
    spec = spec_to_proto(SPEC)
    spec.num_agents = 4_294_967_295
    return spec


def _many_names() -> pb.EnvSpec:
    spec = spec_to_proto(SPEC)
    spec.metrics.extend(f"m{i}" for i in range(257))
    return spec


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (lambda: {"num_envs": 4_294_967_295}, "INVALID_ARGUMENT", "num_envs=4294967295 (1 to"),
        (
            lambda: {"num_envs": 65_536, "spec": _huge_arrays()},
            "FAILED_PRECONDITION",
            "a message h",
        ),
        (lambda: {"spec": _many_agents()}, "FAILED_PRECONDITION", "4294967295 agents; at most"),
        (lambda: {"spec": _many_names()}, "FAILED_PRECONDITION", "metrics; at most 256"),
        (lambda: {"preferred_first_slot": 1 << 31}, "INVALID_ARGUMENT", "is not below 1048576"),
    ],
)
def test_a_hello_that_asks_for_too_much_memory_is_refused(
    learner: RunningLearner,
    folder: Path,
    changes: Callable[[], dict[str, object]],
    code: str,
    words: str,
) -> None:
    answer = refusal(learner.port, credentials(folder, "environment"), **changes())
    assert answer.code.name == code
    assert words in answer.details


def test_oversized_messages_are_refused(learner: RunningLearner, folder: Path) -> None:
    how = credentials(folder, "environment")

    def answer_to(size: int, hello: bool) -> Refused:
        with Client(learner.port, SPEC, 1, how) as client:
            if hello:
                client.hello()
            client.send(bytes(size))
            with pytest.raises(Refused) as caught:
                client.read()
        wait_until(lambda: learner.metric("sessions") == 0)
        return caught.value

    answer = answer_to(MAX_HELLO_BYTES + 1, hello=False)
    assert answer.code == Code.RESOURCE_EXHAUSTED
    assert f"a Hello at most {MAX_HELLO_BYTES}" in answer.details
    answer = answer_to(1000, hello=True)  # this session's observations have 65 bytes or so
    assert answer.code == Code.INVALID_ARGUMENT
    assert "a message of 1000 bytes came; by the spec 'observation' has at most" in answer.details
    answer = answer_to(PART_BYTES, hello=True)  # gRPC takes it, the session does not
    assert answer.code == Code.INVALID_ARGUMENT


def test_what_grpc_will_not_take_never_reaches_the_learner(
    learner: RunningLearner, folder: Path
) -> None:
    with grpc.secure_channel(
        f"127.0.0.1:{learner.port}",
        credentials(folder, "environment"),
        options=[("grpc.max_send_message_length", -1)],
    ) as channel:
        replies = channel.stream_stream(METHOD)(iter([bytes(PART_BYTES + 65)]))
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
    assert caught.value.code() == Code.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()


def test_a_stream_that_says_nothing_loses_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("murmur.learner_service.serving.lockstep.HELLO_TIMEOUT_S", 0.2)
    config = experiment(learner={"max_sessions": 1})
    with running_learner(tmp_path, config) as learner:
        with Client(learner.port, SPEC, 1) as silent, pytest.raises(Refused) as caught:
            silent.read()
        assert caught.value.code == Code.DEADLINE_EXCEEDED
        assert "no Hello within 0.2 s" in caught.value.details
        with Client(learner.port, SPEC, 1) as client:
            client.hello()


def test_a_replayed_message_is_refused(learner: RunningLearner, folder: Path) -> None:
    with Client(learner.port, SPEC, 1, credentials(folder, "environment")) as client:
        client.hello()
        client.exchange(row(SPEC, 1, FIRST))
        client.put(row(SPEC, 1, FIRST), sequence=1)  # the same bytes again
        with pytest.raises(Refused) as caught:
            client.read()
    assert caught.value.code == Code.FAILED_PRECONDITION
    assert "sent sequence number 1, expected 2" in caught.value.details


def test_new_connections_need_new_files_and_old_ones_continue(tmp_path: Path) -> None:
    folder, before = tmp_path / "certs", tmp_path / "before"
    make_certificates(folder, HOSTS, 30)
    shutil.copytree(folder, before)
    with (
        running_learner(tmp_path / "run", secured(folder)) as learner,
        Client(learner.port, SPEC, 1, credentials(folder, "environment")) as old,
    ):
        old.hello()
        old.exchange(row(SPEC, 1, FIRST))
        make_certificates(folder, HOSTS, 30, force=True)  # another authority, other tokens
        old.exchange(row(SPEC, 1))
        with Client(learner.port, SPEC, 1, credentials(folder, "environment")) as new:
            new.hello()
            new.exchange(row(SPEC, 1, FIRST))
            old.exchange(row(SPEC, 1))
        # Who believes in the old authority believes the learner no more.
        answer = refusal(learner.port, credentials(before, "environment"))
        assert answer.code == Code.UNAVAILABLE
        # Who shows a certificate of the old authority is not believed.
        token = token_of(folder, "environment")
        answer = refusal(learner.port, tls(folder, before / "environment", token))
        assert answer.code == Code.UNAVAILABLE
        # The old token opens nothing.
        token = token_of(before, "environment")
        answer = refusal(learner.port, tls(folder, folder / "environment", token))
        assert answer.code == Code.UNAUTHENTICATED


def test_files_in_the_middle_of_being_replaced_disturb_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    make_certificates(folder, HOSTS, 30)
    client = credentials(folder, "environment")
    with running_learner(tmp_path / "run", secured(folder)) as learner:
        shutil.copy(folder / "evaluator" / "key.pem", folder / "learner" / "key.pem")
        (folder / "learner" / "tokens").unlink()
        with Client(learner.port, SPEC, 1, client) as session:
            session.hello()
            session.exchange(row(SPEC, 1, FIRST))


def test_beyond_loopback_a_learner_needs_certificates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    everywhere = experiment(learner={"host": "0.0.0.0"})
    with (
        pytest.raises(ConfigError, match=r"learner\.host=0\.0\.0\.0.*security\.insecure=true"),
        running_learner(tmp_path, everywhere),
    ):
        pytest.fail("it must not start")
    assert not list(tmp_path.iterdir())
    trusted = experiment(learner={"host": "0.0.0.0"}, security={"insecure": True})
    with running_learner(tmp_path, trusted) as learner, Client(learner.port, SPEC, 1) as client:
        client.hello()
    assert "security.insecure=true: every client that reaches" in caplog.text
