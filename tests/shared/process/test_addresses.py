"""Where a service listens: addresses, names and networks."""

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from murmur.shared.process.addresses import (
    host_and_port,
    learner_addresses,
    name_and_port,
    own_addresses,
    own_client_host,
)
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.process.metrics_server import MetricsServer
from murmur.shared.wire.channel import channel_options, proxy_in_use


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
        with pytest.raises(ResourceError, match=r"cannot bind metrics port 127.0.0.2:\d+: "):
            MetricsServer("127.0.0.3,127.0.0.2", server.port, CollectorRegistry(), lambda: "")
        hosts, registry = "127.0.0.3,127.0.0.2", CollectorRegistry()
        other = MetricsServer(hosts, server.port, registry, lambda: "", or_any=True)
        other.close()
        assert other.port not in (0, server.port)
        with pytest.raises(ResourceError, match=r"cannot bind metrics port 192.0.2.1:1: Cannot"):
            MetricsServer("192.0.2.1", 1, registry, lambda: "", or_any=True)
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


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_is_written_with_or_without_brackets(host: str) -> None:
    assert own_addresses(host, "x") == ["::1"]
    assert host_and_port(host, 7) == "[::1]:7"
    assert own_client_host(host) == "::1"


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "::1"),
        ("[::]", "::1"),
        ("127.0.0.2", "127.0.0.2"),
        ("localhost", "localhost"),
        ("gpu-host", "gpu-host"),
    ],
)
def test_clients_of_this_machine_reach_what_is_listened_on(host: str, client: str) -> None:
    assert own_client_host(host) == client


def test_a_learner_s_ipv6_address_needs_brackets() -> None:
    with pytest.raises(ConfigError, match=r"write an IPv6 address in brackets, as \[::1\]:50051"):
        learner_addresses("gpu:1,::1:50051")


_NO_PROXY = ("grpc.enable_http_proxy", 0)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.9:1", "localhost:1", "[::1]:1", f"{socket.gethostname()}:1"]
)
def test_no_proxy_leads_to_this_machine(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert _NO_PROXY in channel_options(address)
    assert proxy_in_use(address) == ""


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_to_another_machine_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://proxy:3128")
    assert _NO_PROXY not in channel_options("gpu-host:1")
    assert proxy_in_use("gpu-host:1") == f"{variable}=http://proxy:3128"
    monkeypatch.setenv("no_proxy", "other, -host,10.0.0.0/8")
    assert proxy_in_use("gpu-host:1") == proxy_in_use("10.1.2.3:1") == ""
    assert proxy_in_use("11.1.2.3:1")
