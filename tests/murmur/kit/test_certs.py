"""`murmur certs`: what it writes, and that it overwrites nothing without a request."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from murmur.cli import app
from murmur.kit.certs import default_hosts, make_certificates
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.credentials import CredentialFolder


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())


def contents(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_each_role_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, ["localhost", "::1", "gpu-host"], 30)
    assert [p.name for p in made] == ["learner", "environment", "evaluator", "read-only"]
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    for folder in made:
        read = CredentialFolder(folder).current()
        roles = [role for role, _ in read.tokens]
        all_roles = ["environment", "evaluator", "read-only"]
        assert roles == (all_roles if folder.name == "learner" else [folder.name])
        own = certificate(folder)
        own.verify_directly_issued_by(ca)
        (name,) = own.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        assert name.value == folder.name
        ends = own.not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=29) < ends <= timedelta(days=30)
    names = certificate(tmp_path / "learner").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["localhost", "gpu-host"]
    assert [str(a) for a in names.value.get_values_for_type(x509.IPAddress)] == ["::1"]
    for path in tmp_path.rglob("*"):
        if path.name in ("ca.key", "key.pem", "tokens"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_only_the_learner_can_be_a_server(tmp_path: Path) -> None:
    server = x509.ExtendedKeyUsageOID.SERVER_AUTH
    for folder in make_certificates(tmp_path, ["localhost"], 30):
        usage = certificate(folder).extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        assert (server in usage.value) == (folder.name == "learner")


def test_nothing_is_overwritten_without_a_request(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], 30)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="is there already: --renew"):
        make_certificates(tmp_path, ["localhost"], 30)
    assert contents(tmp_path) == before
    make_certificates(tmp_path, ["localhost"], 30, force=True)
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_renewing_keeps_the_authority_and_the_newest_tokens(tmp_path: Path) -> None:
    def token(role: str) -> str:
        return (tmp_path / role / "tokens").read_text().split()[1]

    make_certificates(tmp_path, ["localhost"], 30)
    ca, first, old = (
        (tmp_path / "ca.pem").read_bytes(),
        token("environment"),
        certificate(tmp_path / "learner"),
    )
    make_certificates(tmp_path, ["localhost"], 30, renew=True)
    second = token("environment")
    assert (tmp_path / "ca.pem").read_bytes() == ca
    assert certificate(tmp_path / "learner") != old
    learner = CredentialFolder(tmp_path / "learner")
    assert learner.current().role_of(first) == learner.current().role_of(second) == "environment"
    make_certificates(tmp_path, ["localhost"], 30, renew=True)
    assert learner.current().role_of(first) is None
    assert learner.current().role_of(second) == "environment"


def test_renewing_keeps_the_learners_names(tmp_path: Path) -> None:
    def names() -> list[str]:
        extensions = certificate(tmp_path / "learner").extensions
        found = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [str(name.value) for name in found]

    make_certificates(tmp_path, ["localhost", "gpu-host", "10.0.0.7"], 30)
    make_certificates(tmp_path, ["localhost", "other"], 30, renew=True)
    assert names() == ["localhost", "other", "gpu-host", "10.0.0.7"]
    make_certificates(tmp_path, ["localhost"], 30, force=True)
    assert names() == ["localhost"]
    (tmp_path / "learner" / "certificate.pem").unlink()
    with pytest.raises(ConfigError, match=r"--renew needs .*certificate\.pem"):
        make_certificates(tmp_path, ["localhost"], 30, renew=True)


def test_keeping_checks_what_is_there_and_makes_what_is_not(tmp_path: Path) -> None:
    def keep() -> object:
        return CliRunner().invoke(app, ["certs", str(tmp_path), "--keep"]).exception

    (tmp_path / "learner").mkdir()  # as an empty volume is
    assert keep() is None
    before = contents(tmp_path)
    assert len(before) == 2 + 4 * 4
    assert keep() is None
    assert contents(tmp_path) == before
    (tmp_path / "evaluator" / "tokens").unlink()
    assert "cannot read" in str(keep())


def test_renewing_needs_an_authority(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--renew needs the authority"):
        make_certificates(tmp_path / "none", ["localhost"], 30, renew=True)
    make_certificates(tmp_path, ["localhost"], 30)
    (tmp_path / "ca.key").write_bytes((tmp_path / "learner" / "key.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.key is not the key of"):
        make_certificates(tmp_path, ["localhost"], 30, renew=True)


def test_the_command_names_the_folders_and_their_setting(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path), "--host", "gpu-host"])
    assert result.exit_code == 0, result.output
    assert f"--set security.folder={tmp_path / 'environment'}" in result.output
    names = certificate(tmp_path / "learner").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert "gpu-host" in names.value.get_values_for_type(x509.DNSName)
    assert {"localhost", "127.0.0.1", "::1", "learner"} < set(default_hosts())
    with pytest.raises(ConfigError, match="--host 'ö' is neither"):
        make_certificates(tmp_path / "other", ["ö"], 30)
    assert isinstance(
        CliRunner().invoke(app, ["certs", str(tmp_path), "--renew", "--force"]).exception,
        ConfigError,
    )
