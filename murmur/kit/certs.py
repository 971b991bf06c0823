"""`murmur certs`: an authority, certificates and tokens, in one folder for each role.

    FOLDER/ca.key, ca.pem       the authority; its key signs, and no service needs it
    FOLDER/learner/             for the learner: certificate and key, and the tokens of all roles
    FOLDER/environment/         for environment servers: certificate, key, their own token
    FOLDER/evaluator/           for evaluators
    FOLDER/read-only/           for those who only ask for the health

Keys are on the curve P-256. Tokens are 256 random bits.
"""

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.wire.credentials import (
    CA,
    CERTIFICATE,
    KEY,
    ROLES,
    TOKENS,
    CredentialFolder,
    Role,
    parse_tokens,
)

LEARNER = "learner"
CA_KEY = "ca.key"
_CA_LIVES = 10  # times as long as what it signs
_CLOCKS_DIFFER = timedelta(hours=1)


def default_hosts() -> list[str]:
    """Return the names that every certificate of a learner has: here, and in the stacks."""
    return ["localhost", "127.0.0.1", "::1", LEARNER, socket.gethostname()]


def are_there(folder: Path) -> bool:
    """Return whether a folder has all files of `make_certificates`, usable ones.

    Raises:
        ConfigError: if some of it is there but not all, or it cannot be used.
    """
    if not (folder / CA).exists():
        return False
    for name in (LEARNER, *ROLES):
        CredentialFolder(folder / name)
    return True


def _first_file(folder: Path) -> Path | None:
    """Return the first file below a folder, by name; None if there is none.

    Raises:
        ResourceError: if the folder cannot be read.
    """
    try:
        files = (p for p in folder.rglob("*") if p.is_file()) if folder.exists() else ()
        return min(files, default=None)
    except OSError as error:
        raise ResourceError(f"cannot look into {folder}: {error.strerror}") from None


def make_certificates(
    folder: Path, hosts: Iterable[str], days: int, *, renew: bool = False, force: bool = False
) -> list[Path]:
    """Write everything.

    Args:
        folder: folder of the files; it is made if it does not exist.
        hosts: names and addresses of the learner, for its certificate.
        days: validity of certificates [days]; a new authority is valid ten times as long.
        renew: flag to keep the authority and the names in the learner's certificate; the newest
            token of each role stays valid beside the new one, so that services can be given the new
            files one after another.
        force: flag to replace everything, the authority too: earlier certificates and tokens are
            refused.

    Returns:
        folders to hand out.

    Raises:
        ConfigError: if files are there and neither renew nor force is set, or if renew finds no
            authority or no certificate of the learner.
        ResourceError: if a file cannot be written.
    """
    if (there := _first_file(folder)) and not (renew or force):
        raise ConfigError(
            f"{there} is there already: --renew makes new certificates from the same "
            "authority, --force replaces everything, another folder keeps both"
        )
    wanted = [_general_name(host) for host in hosts]
    if renew:
        authority, authority_key = _load_authority(folder)
        known = _newest_tokens(folder / LEARNER / TOKENS)
        wanted += _names_of(folder / LEARNER / CERTIFICATE)
    else:
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority = _sign_authority(authority_key, days)
        known = {}
        _write(folder / CA_KEY, _private(authority_key), 0o600)
        _write(folder / CA, authority.public_bytes(Encoding.PEM), 0o644)
    new: dict[Role, str] = {role: secrets.token_urlsafe(32) for role in ROLES}
    names: list[tuple[str, dict[Role, list[str]]]] = [
        (LEARNER, {r: [new[r], *([known[r]] if r in known else [])] for r in ROLES}),
        *((role, {role: [new[role]]}) for role in ROLES),
    ]
    for name, tokens in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(name, key, wanted, days, authority, authority_key)
        lines = [f"{role} {token}\n" for role, of in tokens.items() for token in of]
        _write(folder / name / CA, authority.public_bytes(Encoding.PEM), 0o644)
        _write(folder / name / TOKENS, "".join(lines).encode(), 0o600)
        _write(folder / name / KEY, _private(key), 0o600)
        _write(folder / name / CERTIFICATE, certificate.public_bytes(Encoding.PEM), 0o644)
    return [folder / name for name, _ in names]


def _load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Load the authority of an earlier `make_certificates`.

    Raises:
        ConfigError: if it is not there or no longer valid.
    """
    try:
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--renew needs the authority, {folder / CA} and {folder / CA_KEY}: {error}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != (
        authority.public_key()
    ):
        raise ConfigError(f"{folder / CA_KEY} is not the key of {folder / CA}")
    if authority.not_valid_after_utc < datetime.now(UTC):
        raise ConfigError(f"{folder / CA} is no longer valid; --force makes a new authority")
    return authority, key


def _names_of(path: Path) -> list[x509.GeneralName]:
    """Return the names that a certificate is good for.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"--renew needs {path}: {error}") from None
    return list(extension.value)


def _newest_tokens(path: Path) -> dict[Role, str]:
    """Return the first token of each role.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--renew needs {path}: {error.strerror}") from None
    newest: dict[Role, str] = {}
    for role, token in parse_tokens(text, path):
        newest.setdefault(role, token)
    return newest


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, *, signs: bool
) -> x509.CertificateBuilder:
    """Return what all certificates have; `signs`: whether this one signs others."""
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(signs, 0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _sign_authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """Sign a certificate that signs others, by itself."""
    name = f"murmur {secrets.token_hex(4)}"  # tells two authorities apart
    builder = _builder(name, _name(name), key, _CA_LIVES * days, signs=True)
    return builder.sign(key, hashes.SHA256())


def _sign(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    hosts: Iterable[x509.GeneralName],
    days: int,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Sign a certificate for one role; only the learner's is good for a server.

    The learner's is good for a client too: on one machine both sides use its folder.
    """
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(name, authority.subject, key, days, signs=False)
    if name == LEARNER:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = x509.SubjectAlternativeName(list(dict.fromkeys(hosts)))
        builder = builder.add_extension(names, critical=False)
    signer = authority_key.public_key()
    return (
        builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _general_name(host: str) -> x509.GeneralName:
    """Return a host's name or address as a certificate has it.

    Raises:
        ConfigError: if it is neither.
    """
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"--host {host!r} is neither a name nor an address") from None


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file whole, never readable by more than `mode` says, not even for a moment."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from None
