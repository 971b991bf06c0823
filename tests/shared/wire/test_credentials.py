"""Folders of credentials: what is taken, what is refused, and how changes are noticed."""

import logging
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from murmur.kit.certs import make_certificates
from murmur.shared.config.experiment import SecurityConfig
from murmur.shared.process.addresses import is_loopback
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.credentials import (
    CredentialFolder,
    Credentials,
    credentials_for,
    parse_tokens,
)

LONG = "t" * 32


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("localhost:50051", True),
        ("::1", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("unix:/run/murmur.sock", True),
        ("0.0.0.0", False),
        ("::", False),
        ("[::]:50051", False),
        ("10.0.0.7:50051", False),
        ("learner:50051", False),
        ("localhost.example.org:50051", False),
        ("127.0.0.1.example.org:50051", False),
        ("ipv4:10.0.0.7:50051", False),
        ("", False),
    ],
)
def test_loopback_is_this_machine_alone(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_plain_text_is_for_loopback_or_by_decree() -> None:
    assert credentials_for(SecurityConfig(), "127.0.0.1", "learner.host") is None
    assert credentials_for(SecurityConfig(insecure=True), "0.0.0.0", "learner.host") is None
    with pytest.raises(ConfigError, match=r"learner\.host=0\.0\.0\.0 .*`murmur certs FOLDER`"):
        credentials_for(SecurityConfig(), "0.0.0.0", "learner.host")


def test_every_token_of_a_role_counts_and_the_first_is_used() -> None:
    text = (
        f"# made today\nenvironment {'n' * 32}\nenvironment {'o' * 32} # old\n\nevaluator {LONG}\n"
    )
    tokens = parse_tokens(text.encode(), Path("tokens"))
    credentials = Credentials(b"", b"", b"", tokens, datetime.now(UTC))
    assert credentials.role_of("n" * 32) == credentials.role_of("o" * 32) == "environment"
    assert credentials.role_of(LONG) == "evaluator"
    assert credentials.role_of("") is credentials.role_of(LONG + "x") is None
    assert credentials.token_for("environment") == "n" * 32
    assert credentials.token_for("read-only", "evaluator") == LONG
    with pytest.raises(ConfigError, match="no token for the role read-only"):
        credentials.token_for("read-only")
    assert LONG not in repr(credentials)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("environment", "line 1: expected a role and a token, got 1 words"),
        (f"admin {LONG}", "line 1: no role 'admin'; known: environment, evaluator, read-only"),
        ("environment short", "line 1: a token needs 32 printable ASCII characters"),
        (f"environment {LONG}é", "line 1: a token needs 32 printable ASCII characters"),
        ("# nothing", "holds no token"),
    ],
)
def test_a_wrong_line_of_tokens_is_named_and_not_shown(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_tokens(line.encode(), Path("tokens"))
    assert LONG not in str(caught.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder, ["localhost"], 365)
    return folder


@pytest.fixture
def learner(made: Path, tmp_path: Path) -> Path:
    """A learner's folder to spoil."""
    return Path(shutil.copytree(made / "learner", tmp_path / "learner"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("ca.pem", None, "cannot read .*ca.pem"),
        ("tokens", None, "cannot read .*tokens"),
        ("ca.pem", "nonsense", "ca.pem holds no certificate"),
        ("certificate.pem", "nonsense", "certificate.pem holds no certificate"),
        ("key.pem", "nonsense", "key.pem holds no unencrypted private key"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(
    learner: Path, name: str, content: str | None, words: str
) -> None:
    if content is None:
        (learner / name).unlink()
    else:
        (learner / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        CredentialFolder(learner)


def test_a_key_of_another_certificate_is_refused(made: Path, learner: Path) -> None:
    shutil.copy(made / "evaluator" / "key.pem", learner / "key.pem")
    with pytest.raises(ConfigError, match=r"key\.pem is not the key of .*certificate\.pem"):
        CredentialFolder(learner)


def test_changed_files_are_read_again_unless_they_do_not_fit(
    made: Path, learner: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CredentialFolder(learner)
    first = folder.current()
    assert folder.current() is first
    shutil.copy(made / "evaluator" / "key.pem", learner / "key.pem")  # half of a replacement
    assert folder.current() is first
    assert "key.pem is not the key of" in caplog.text
    shutil.copy(made / "evaluator" / "certificate.pem", learner / "certificate.pem")
    second = folder.current()
    assert second is not first
    assert second.certificate == (made / "evaluator" / "certificate.pem").read_bytes()
    assert folder.current() is second


def test_warnings_of_what_ends_soon_and_of_what_all_can_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path, ["localhost"], 13)
    (tmp_path / "learner" / "key.pem").chmod(0o644)
    with caplog.at_level(logging.WARNING):
        CredentialFolder(tmp_path / "learner")
    assert "renew it with `murmur certs --renew`" in caplog.text
    assert "key.pem can be read by every user" in caplog.text
