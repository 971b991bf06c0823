"""Credentials: certificates and tokens from a folder, read again when its files change.

`murmur certs` makes such folders, one for each role; docs/security.md says what they protect.
"""

import contextlib
import hashlib
import hmac
import logging
import stat
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from murmur.shared.config.experiment import SecurityConfig
from murmur.shared.process.addresses import is_loopback
from murmur.shared.process.errors import ConfigError

logger = logging.getLogger("murmur")

Role = Literal["environment", "evaluator", "read-only"]
ROLES: tuple[Role, ...] = get_args(Role)
"""environment trains and evaluates, evaluator evaluates, read-only asks for the health."""

CA, CERTIFICATE, KEY, TOKENS = "ca.pem", "certificate.pem", "key.pem", "tokens"
FILES = (CA, CERTIFICATE, KEY, TOKENS)
MIN_TOKEN_CHARACTERS = 32
_WARN_BEFORE = timedelta(days=14)


@dataclass(frozen=True)
class Credentials:
    """The contents of a credential folder at one moment. Its repr hides the secrets.

    Attributes:
        ca: PEM of the authorities that sign peers' certificates.
        certificate, key: PEM of this side's certificate and its private key.
        tokens: (role, token) pairs, in the file's order.
        end: time in UTC at which the certificate ends.
    """

    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    tokens: tuple[tuple[Role, str], ...] = field(repr=False)
    end: datetime

    def role_of(self, token: str) -> Role | None:
        """Return the role that a token gives, or None.

        The time does not depend on the token: all known tokens are compared, as digests of one
        length, each in constant time.
        """
        given = hashlib.sha256(token.encode()).digest()
        found: Role | None = None
        for role, known in self.tokens:
            if hmac.compare_digest(given, hashlib.sha256(known.encode()).digest()):
                found = role
        return found

    def token_for(self, *roles: Role) -> str:
        """Return the first token of the first of these roles that has one.

        Raises:
            ConfigError: if none of them has.
        """
        if found := [token for wanted in roles for role, token in self.tokens if role == wanted]:
            return found[0]
        raise ConfigError(f"security.folder holds no token for the role {' or '.join(roles)}")


class CredentialFolder:
    """A folder of credentials. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read the folder.

        Raises:
            ConfigError: if a file is missing, has invalid contents, does not fit the others,
                or the certificate is not valid now.
        """
        self._folder, self._lock = folder, threading.Lock()
        self._seen = self._signature()
        self._current = _read(folder)
        self._warned = 0  # of the certificate's end: 1 before it, 2 after it
        self._warn(self._current)

    def current(self) -> Credentials:
        """Return the current credentials; the same object until a file changes.

        Files that do not fit each other, such as during a replacement, are logged and not used:
        the credentials read before stay in use. A certificate that ends is logged too.
        """
        with self._lock:
            signature = self._signature()
            if signature == self._seen:
                self._warn(self._current)
                return self._current
            try:
                self._current = _read(self._folder)
            except ConfigError as error:
                logger.warning("%s; the credentials read before stay in use", error)
            else:
                logger.info(
                    "credentials in %s have changed; new connections use them", self._folder
                )
                self._warned = 0
            self._warn(self._current)
            self._seen = signature  # taken before reading: a later change is seen next time
            return self._current

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return inode, mtime (ns) and size of each file, to notice changes; None if missing."""
        found: dict[str, tuple[int, int, int] | None] = dict.fromkeys(FILES)
        for name in FILES:
            with contextlib.suppress(OSError):
                status = (self._folder / name).stat()
                found[name] = status.st_ino, status.st_mtime_ns, status.st_size
        return tuple(found.values())

    def _warn(self, credentials: Credentials) -> None:
        """Log once that the certificate is about to end, and once that it has ended."""
        left = credentials.end - datetime.now(UTC)
        level = 2 if left < timedelta(0) else int(left < _WARN_BEFORE)
        if level <= self._warned:
            return
        self._warned = level
        logger.warning(
            "%s %s at %s UTC%s: renew it with `murmur certs --renew`",
            self._folder / CERTIFICATE,
            "ended" if level == 2 else "ends",
            f"{credentials.end:%Y-%m-%d %H:%M}",
            ", and no peer takes it for a new connection" if level == 2 else "",
        )


def credentials_for(
    security: SecurityConfig, address: str, setting: str
) -> CredentialFolder | None:
    """Return the credentials to use at an address; None if it uses plain text.

    Args:
        security: section `security` of the configuration.
        address: host or host:port to listen on or to connect to.
        setting: key of the address in the configuration, for the message.

    Raises:
        ConfigError: if the address is not loopback and neither a folder nor `insecure` is set, or
            if the folder cannot be used.
    """
    if security.folder:
        return CredentialFolder(Path(security.folder))
    if security.insecure or is_loopback(address):
        return None
    raise ConfigError(
        f"{setting}={address} reaches beyond this machine, and security.folder is not set: make "
        "certificates and tokens with `murmur certs FOLDER`, or set security.insecure=true on a "
        "network where you trust every user"
    )


def warn_if_insecure(security: SecurityConfig) -> None:
    """Log the meaning of `security.insecure` if it is set."""
    if security.insecure:
        logger.warning(
            "security.insecure=true: every client that reaches the learner's port can read and "
            "forge what the run learns from"
        )


def server_credentials(folder: CredentialFolder) -> grpc.ServerCredentials:
    """Make mutual TLS for a server; each new connection is checked against the current files."""
    used = folder.current()

    def configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
        pair = (credentials.key, credentials.certificate)
        return grpc.ssl_server_certificate_configuration([pair], credentials.ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Return the new files if they changed. gRPC calls it on its own thread per connection."""
        nonlocal used
        now = folder.current()
        if now is used:
            return None
        used = now
        return configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used),
        changed,  # type: ignore[arg-type]  # the stubs do not know that None means "as before"
        require_client_authentication=True,
    )


def channel_credentials(credentials: Credentials, *roles: Role) -> grpc.ChannelCredentials:
    """Make mutual TLS for a client that sends the token of the first of these roles per RPC.

    Raises:
        ConfigError: if there is no such token.
    """
    tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
    token = grpc.access_token_call_credentials(credentials.token_for(*roles))
    return grpc.composite_channel_credentials(tls, token)


def _read(folder: Path) -> Credentials:
    """Read and check the files of a folder.

    Raises:
        ConfigError: if a file cannot be used, naming the file, the problem and the fix.
    """
    contents = {}
    for name in FILES:
        path = folder / name
        try:
            contents[name] = path.read_bytes()
            open_to_all = path.stat().st_mode & stat.S_IROTH
        except OSError as error:
            raise ConfigError(
                f"security.folder: cannot read {path} ({error.strerror}); "
                "`murmur certs FOLDER` makes all that is needed"
            ) from None
        if open_to_all and name in (KEY, TOKENS):
            logger.warning("%s can be read by every user of this machine", path)
    loaded: dict[str, Any] = {}
    for name, load in (
        (CA, x509.load_pem_x509_certificates),
        (CERTIFICATE, x509.load_pem_x509_certificate),
        (KEY, lambda pem: load_pem_private_key(pem, None)),
    ):
        try:
            loaded[name] = load(contents[name])
        except (ValueError, TypeError):
            kind = "unencrypted private key" if name == KEY else "certificate"
            raise ConfigError(f"{folder / name} holds no {kind} in PEM form") from None
    certificate = loaded[CERTIFICATE]
    if certificate.public_key() != loaded[KEY].public_key():
        raise ConfigError(f"{folder / KEY} is not the key of {folder / CERTIFICATE}")
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= datetime.now(UTC) <= end:
        raise ConfigError(
            f"{folder / CERTIFICATE} is valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} "
            "UTC, not now: renew it with `murmur certs --renew`, or set this machine's clock"
        )
    return Credentials(
        contents[CA],
        contents[CERTIFICATE],
        contents[KEY],
        parse_tokens(contents[TOKENS], folder / TOKENS),
        end,
    )


def parse_tokens(text: bytes, path: Path) -> tuple[tuple[Role, str], ...]:
    """Parse the lines "role token" of a file; # begins a comment.

    Raises:
        ConfigError: for an invalid line, naming file and line, never the token itself.
    """
    tokens: list[tuple[Role, str]] = []
    for number, line in enumerate(text.decode(errors="replace").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        if len(words) != 2:
            raise ConfigError(f"{where}: expected a role and a token, got {len(words)} words")
        role = next((r for r in ROLES if r == words[0]), None)
        if role is None:
            raise ConfigError(f"{where}: no role '{words[0]}'; known: {', '.join(ROLES)}")
        token = words[1]
        if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"{where}: a token needs {MIN_TOKEN_CHARACTERS} printable ASCII characters or more"
            )
        tokens.append((role, token))
    if not tokens:
        raise ConfigError(f"{path} holds no token")
    return tuple(tokens)
