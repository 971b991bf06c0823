"""Addresses: those that a service listens on, and those that can only be this machine."""

import ipaddress
import re
import socket

import psutil

from murmur.shared.process.errors import ConfigError

_LAST_PORT = 65535
_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:")  # of gRPC's names
_PORTS = re.compile(r"(.+):(\d{1,5})-(\d{1,5})")  # host, first, last


def own_addresses(hosts: str, setting: str) -> list[str]:
    """Return the addresses to listen on.

    Args:
        hosts: addresses or names with commas between them, IPv6 as ::1 or [::1]. A network,
            10.0.1.0/24, stands for this machine's own addresses in it.
        setting: its key in the configuration, for the message.

    Raises:
        ConfigError: for an invalid network, or one that this machine has no address in.
    """
    found: list[str] = []
    for host in filter(None, (bare_host(part.strip()) for part in hosts.split(","))):
        found += _in_network(host, setting) if "/" in host else [host]
    if not found:
        raise ConfigError(
            f"{setting} is empty; 127.0.0.1 is this machine alone, 0.0.0.0 all networks"
        )
    return list(dict.fromkeys(found))


def _in_network(host: str, setting: str) -> list[str]:
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}; write a network as 10.0.1.0/24") from None
    own = [
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    inside = [address for address in own if ipaddress.ip_address(address) in network]
    if not inside:
        raise ConfigError(
            f"{setting}: no address of this machine is in {host}; it has {own}: name one of these, "
            "or 127.0.0.1 for this machine alone"
        )
    return inside


def bare_host(host: str) -> str:
    """Strip the brackets that enclose an IPv6 address in front of a port."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_and_port(host: str, port: int) -> str:
    """Join host and port as clients take them, with an IPv6 address in brackets."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an IP address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def own_client_host(host: str) -> str:
    """Return the host that local processes connect to if a service listens on `host`."""
    address = _ip(host := bare_host(host))
    if address is None or not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def learner_addresses(text: str) -> list[str]:
    """Parse env_server.learner: host:port or host:first-last, with commas between them.

    Raises:
        ConfigError: if a learner is named twice, one of several is empty, or an IPv6 address
            has no brackets.
    """
    found: list[str] = []
    for part in map(str.strip, text.split(",")):
        if part.count(":") > 1 and "[" not in part and not part.startswith(_SCHEMES):
            host, _, port = part.rpartition(":")
            raise ConfigError(
                f"env_server.learner={part}: write an IPv6 address in brackets, as [{host}]:{port}"
            )
        ports = _PORTS.fullmatch(part)
        if ports is None:
            found.append(part)
        else:
            first, last = int(ports[2]), int(ports[3])
            found += [f"{ports[1]}:{port}" for port in range(first, min(last, _LAST_PORT) + 1)]
    if not found or (len(found) > 1 and (not all(found) or len(set(found)) < len(found))):
        raise ConfigError(
            f"env_server.learner={text}: name each learner once, as in "
            "gpu-one:50051,gpu-two:50051 or gpu-host:50051-50058"
        )
    return found


def name_and_port(address: str) -> tuple[str, int] | None:
    """Split host:port if the host is a name that may have several addresses; else None."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host or set(host) & set(":/[]"):
        return None
    return None if host == "localhost" or _ip(host) else (host, int(port))


def is_loopback(address: str) -> bool:
    """Return whether host or host:port can only be this machine."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:///")
    if host.startswith("["):  # [::1]:50051
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_own(address: str) -> bool:
    """Return whether host:port is an address of this machine, loopback or not."""
    if is_loopback(address):
        return True
    host = bare_host(address.removeprefix("dns:///").rpartition(":")[0])
    own = {a.address.partition("%")[0] for found in psutil.net_if_addrs().values() for a in found}
    return host in own | {socket.gethostname()}


def in_use(port: int, bound: int) -> str:
    """Return the note behind an address if another port than the wanted one was bound, else "".

    Args:
        port: wanted port; 0: any.
        bound: port that is bound.
    """
    return f" (port {port} is in use)" if port not in (0, bound) else ""
