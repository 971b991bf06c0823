"""Which of this machine's addresses a service listens on."""

import ipaddress
import socket

import psutil

from shared.errors import ConfigError


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
        raise ConfigError(f"{setting} is empty; 127.0.0.1 is this machine alone, 0.0.0.0 everybody")
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
