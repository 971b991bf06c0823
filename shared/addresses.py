"""Addresses: which of this machine's a service listens on, which ones can only be this machine."""

import ipaddress
import re
import socket

import psutil

from shared.errors import ConfigError

_LAST_PORT = 65535
_PORTS = re.compile(r"(.+):(\d{1,5})-(\d{1,5})")  # host, first, last


def own_addresses(hosts: str, setting: str) -> list[str]:
    """The addresses to listen on.

    Args:
        hosts: addresses or names with commas between them. A network, 10.0.1.0/24, stands for this
            machine's own addresses in it.
        setting: its key in the configuration, for the message.

    Raises:
        ConfigError: for a network that is none, or that this machine has no address in.
    """
    found: list[str] = []
    for host in filter(None, (part.strip() for part in hosts.split(","))):
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
        raise ConfigError(f"{setting}: no address of this machine is in {host}; it has {own}")
    return inside


def learner_addresses(text: str) -> list[str]:
    """The learners of env_server.learner: host:port or host:first-last, with commas between them.

    Raises:
        ConfigError: if one is named twice, there is an empty one among several, or a range of
            ports has no first.
    """
    found: list[str] = []
    for part in map(str.strip, text.split(",")):
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
    """Host and port where the host is a name that may have several addresses; else None."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host or set(host) & set(":/[]"):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None if host == "localhost" else (host, int(port))
    return None


def is_loopback(address: str) -> bool:
    """Whether host or host:port can only be this machine."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:///")
    if host.startswith("["):  # [::1]:50051
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def port_or_any(host: str, port: int, setting: str = "host") -> int:
    """`port` if it is free on `host` just now, else 0: any free port.

    Args:
        host: as `own_addresses` takes it.
        port: wanted.
        setting: see own_addresses.
    """
    for address in own_addresses(host, setting):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return 0
    return port
