"""Where a service listens: addresses, names and networks."""

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from shared.addresses import learner_addresses, name_and_port, own_addresses, port_or_any
from shared.errors import ConfigError, ResourceError
from shared.metrics_server import MetricsServer


def test_a_network_stands_for_the_own_address_in_it() -> None:
    assert own_addresses("0.0.0.0", "x") == ["0.0.0.0"]
    assert own_addresses("127.0.0.0/8", "x") == ["127.0.0.1"]
    assert own_addresses("127.0.0.1, 127.0.0.0/8,localhost", "x") == ["127.0.0.1", "localhost"]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("233.252.0.0/24", r"metrics_host: no address of this machine is in 233.252.0.0/24"),
        ("10.0.0.1/24", r"has host bits set; write a network as 10.0.1.0/24"),
        ("", "metrics_host is empty; 127.0.0.1 is"),
    ],
)
def test_a_network_without_an_own_address_is_refused(hosts: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        own_addresses(hosts, "metrics_host")


def test_metrics_are_served_on_each_address_and_no_other() -> None:
    server = MetricsServer("127.0.0.1,127.0.0.2", 0, CollectorRegistry(), lambda: "")
    try:
        for host in ("127.0.0.1", "127.0.0.2"):
            url = f"http://{host}:{server.port}/healthz"
            assert urllib.request.urlopen(url, timeout=30).status == 200
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", server.port), timeout=5)
        assert port_or_any("127.0.0.2,127.0.0.3", server.port) == 0
        with pytest.raises(ResourceError, match=r"cannot bind metrics port 127.0.0.2:\d+: "):
            MetricsServer("127.0.0.3,127.0.0.2", server.port, CollectorRegistry(), lambda: "")
    finally:
        server.close()


def test_learners_are_listed_or_a_range_of_ports() -> None:
    assert learner_addresses("") == [""]  # a baseline connects to no learner
    assert learner_addresses("a:1") == ["a:1"]
    assert learner_addresses("a:1, b:2") == ["a:1", "b:2"]
    assert learner_addresses("a:7-9,[::1]:2-3") == ["a:7", "a:8", "a:9", "[::1]:2", "[::1]:3"]
    assert learner_addresses("a:65535-99999") == ["a:65535"]
    assert learner_addresses("my-host:1") == ["my-host:1"]


def test_only_a_name_is_looked_up() -> None:
    assert name_and_port("learner.murmur:50051") == ("learner.murmur", 50051)
    for address in ("10.0.0.1:1", "[::1]:1", "localhost:1", "unix:/x", "dns:///a:1", "", "a"):
        assert name_and_port(address) is None, address
