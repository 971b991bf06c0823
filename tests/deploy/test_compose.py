"""docker-compose.yml: what can be checked without a container engine.

`make test-compose` starts it for real.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from murmur.cli import app
from murmur.shared.config.experiment import ENV_METRICS_PORT
from murmur.shared.config.files import load
from murmur.shared.config.learner import METRICS_PORT, PORT

ROOT = Path(__file__).parents[2]
MISSIONS = {"terrain": "terrain", "formation": "formation", "snakes": "snakes"}
RANKS = ("learner-rank-0", "learner-rank-1")
LEARNERS = ("learner", *(f"learner-{name}" for name in MISSIONS), *RANKS)
FILES = ("docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.own.yml")


def resolve(text: str, settings: dict[str, str]) -> str:
    """Compose's ${NAME:-default}, innermost first; ${NAME:?what it is} must be set."""
    pattern = re.compile(r"\$\{(\w+):[-?]([^${}]*)\}")
    while pattern.search(text):
        text = pattern.sub(lambda m: settings.get(m[1]) or m[2], text)
    return text


def murmurs(service: dict[str, Any]) -> list[str]:
    """What follows `murmur` on a service's command line; empty if it is another program's."""
    return [] if "entrypoint" in service else service.get("command", [])


@pytest.fixture
def compose() -> dict[str, Any]:
    text = resolve((ROOT / "docker-compose.yml").read_text(), {})
    assert "${" not in text
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def test_every_service_is_hardened_limited_and_watched(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"], name
        assert ":" in service["image"], name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} would listen to the world"
        built = "build" in service
        assert built or "healthcheck" in service, name  # built images bring their own
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            here = (
                (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]
            )
            assert here, f"{name}: {source}"


def test_the_start_is_in_order_of_health(compose: dict[str, Any]) -> None:
    wanted = {"env": "learner", "evaluator": "learner"}
    wanted |= {f"env-{name}": f"learner-{name}" for name in MISSIONS}
    for name, other in wanted.items():
        assert compose["services"][name]["depends_on"] == {other: {"condition": "service_healthy"}}
    healthy = {"condition": "service_healthy"}
    assert compose["services"]["env-ranks"]["depends_on"] == dict.fromkeys(RANKS, healthy)
    assert compose["services"]["grafana"]["depends_on"] == {
        "prometheus": {"condition": "service_healthy"},
        "grafana-password": {"condition": "service_completed_successfully"},
    }
    made = {"certs": {"condition": "service_completed_successfully"}}
    for name in LEARNERS:
        assert compose["services"][name]["depends_on"] == made


def test_a_profile_is_a_training_of_its_own(compose: dict[str, Any]) -> None:
    services = compose["services"]
    hosts = [p.removeprefix("--host=") for p in services["certs"]["command"] if "--host=" in p]
    folders = [services["learner"]["command"][2]]
    for name, environment in MISSIONS.items():
        learner, env = services[f"learner-{name}"], services[f"env-{name}"]
        assert learner["profiles"] == env["profiles"] == [name]
        assert learner["command"][1] == env["command"][1]
        assert load(env["command"][1], environ={}).environment.name == environment
        assert env["environment"]["MURMUR__ENV_SERVER__LEARNER"] == f"learner-{name}:50051"
        assert f"learner-{name}" in hosts  # of the certificate
        assert learner["ports"] == []  # they would all want the same
        folders.append(learner["command"][2])
    assert len(set(folders)) == len(folders)
    assert services["evaluator"]["profiles"] == ["evaluation"]
    assert [n for n, s in services.items() if "profiles" not in s] == [
        "certs", "learner", "env", "grafana-password", "prometheus", "grafana"
    ]  # fmt: skip


def test_each_service_has_its_own_credentials_and_no_others(compose: dict[str, Any]) -> None:
    services = compose["services"]
    certs = dict(v.split(":") for v in services["certs"]["volumes"])
    folders = dict.fromkeys(LEARNERS, "learner") | {"env": "environment"}
    folders |= {"env-ranks": "environment", "evaluator": "evaluator"}
    folders |= {f"env-{name}": "environment" for name in MISSIONS}
    for name, folder in folders.items():
        environment = services[name]["environment"]
        mounts = [v.split(":") for v in services[name]["volumes"]]
        ((volume, at, mode),) = [m for m in mounts if "credentials" in m[0]]
        assert (at, mode) == (environment["MURMUR__SECURITY__FOLDER"], "ro")
        assert certs[volume] == f"/certs/{folder}"
        assert "MURMUR__SECURITY__INSECURE" not in environment
    users = [n for n, s in services.items() if "authority:/certs" in s.get("volumes", [])]
    assert users == ["certs"]
    image = (ROOT / "env_service/Dockerfile").read_text()
    assert all(folder in image for folder in certs.values())  # so that the user may write there


def test_the_commands_are_murmurs(compose: dict[str, Any]) -> None:
    """Every command line parses, every configuration key and name exists."""
    for name, service in compose["services"].items():
        if name in ("grafana-password", "prometheus", "grafana"):
            continue
        command = murmurs(service)
        result = CliRunner().invoke(app, [command[0], "--help"])
        assert result.exit_code == 0
        for option in (part.split("=")[0] for part in command[1:] if part.startswith("--")):
            assert option in result.output, f"{name}: {option}"
        if name == "certs":
            continue
        config = load(command[1], environ={k: str(v) for k, v in service["environment"].items()})
        assert config.run.max_minutes == 0
        if command[0] == "env-server":
            assert config.env_server.learner in ("learner:50051", f"learner-{name[4:]}:50051")


def test_two_learners_of_one_run_are_found_by_one_name(compose: dict[str, Any]) -> None:
    services, shared_name = compose["services"], "learner-ranks"
    assert f"--host={shared_name}" in services["certs"]["command"]
    server = services["env-ranks"]["environment"]["MURMUR__ENV_SERVER__LEARNER"]
    assert server == f"{shared_name}:{PORT}"
    port = set()
    for rank, name in enumerate(RANKS):
        service = services[name]
        assert service["profiles"] == services["env-ranks"]["profiles"] == ["ranks"]
        assert service["networks"]["streams"]["aliases"] == [shared_name]
        assert service["hostname"] == name
        assert service["ports"] == []
        variables = service["environment"]
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (rank, len(RANKS))
        assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == (0, 1)
        assert variables["MASTER_ADDR"] == RANKS[0]
        port.add(variables["MASTER_PORT"])
    assert len(port) == 1
    assert services[RANKS[0]]["command"] == services[RANKS[1]]["command"]
    folders = {murmurs(services[name])[2] for name in LEARNERS}
    assert len(folders) == len(LEARNERS) - 1  # they share theirs with each other alone


def test_only_prometheus_shares_a_network_with_the_metrics(compose: dict[str, Any]) -> None:
    """Each kind of service listens for Prometheus on a network that no other kind is on."""
    services, networks = compose["services"], compose["networks"]
    for kind, command in (("learner", "learner"), ("env", "env-server")):
        name = f"{kind}-metrics"
        mine = {n for n, s in services.items() if murmurs(s)[:1] == [command]}
        assert {n for n, s in services.items() if name in s.get("networks", [])} == {
            *mine,
            "prometheus",
        }
        (pool,) = networks[name]["ipam"]["config"]
        section = {"learner": "LEARNER", "env": "ENV_SERVER"}[kind]
        for service in mine:
            listens = services[service]["environment"][f"MURMUR__{section}__METRICS_HOST"]
            assert listens == f"127.0.0.1,{pool['subnet']}"
            assert set(services[service]["networks"]) == {"streams", name}
    assert networks["streams"]["internal"] is True  # the port of metrics is published elsewhere
    alone = {n for n, s in services.items() if s.get("network_mode") == "none"}
    assert alone == {"certs", "grafana-password"}
    assert all("networks" in s for n, s in services.items() if n not in alone)


def test_grafana_has_no_password_that_everybody_knows(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    """The service's program is run as it is, in an empty folder."""
    service, grafana = compose["services"]["grafana-password"], compose["services"]["grafana"]
    given = grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert "grafana-password:/etc/grafana-password:ro" in grafana["volumes"]
    assert service["environment"] == {"GRAFANA_PASSWORD": ""}
    program = service["command"][0].replace("/certs", str(tmp_path))

    def password(wanted: str) -> str:
        command = [sys.executable, *service["entrypoint"][1:], program]
        subprocess.run(command, check=True, env={**os.environ, "GRAFANA_PASSWORD": wanted})
        return (tmp_path / Path(given).name).read_text()

    first = password("")
    assert len(first) >= 24
    assert password("") == first  # kept by the next start
    assert password("my own") == "my own"


def test_settings_of_the_example_and_used_ones_are_the_same() -> None:
    text = "".join((ROOT / f).read_text() for f in FILES)
    used = dict(re.findall(r"\$\{(\w+):-([^${}]*)\}", text))
    lines = (ROOT / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    internal = {  # for publishers of images
        "MURMUR_ENV_IMAGE",
        "MURMUR_LEARNER_IMAGE",
        "PROMETHEUS_IMAGE",
        "GRAFANA_IMAGE",
        "REVISION",
        "OWN_ENV_IMAGE",
    }
    assert set(re.findall(r"\$\{(\w+)", text)) - internal == set(example)
    for name, value in example.items():
        if name in used and name not in ("RUN", "LEARNER_MEMORY", "OWN_FOLDER"):
            assert used[name] == value, name


def test_prometheus_and_grafana_find_what_compose_starts(compose: dict[str, Any]) -> None:
    services = compose["services"]
    config = yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    ports = {"learner": METRICS_PORT, "env": ENV_METRICS_PORT}
    for job, port in ports.items():
        (names,) = jobs[job]["dns_sd_configs"]
        assert names["port"] == port
        word = {"learner": "learner", "env": "env-server"}[job]
        mine = {n for n, service in services.items() if murmurs(service)[:1] == [word]}
        assert set(names["names"]) == mine
    mounts = dict(v.split(":")[:2] for v in services["prometheus"]["volumes"])
    folder = Path(mounts["./monitoring/prometheus"])
    for rules in config["rule_files"]:
        assert (ROOT / "monitoring/prometheus" / Path(rules).relative_to(folder)).is_file()

    provisioning = ROOT / "monitoring/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/murmur.yaml").read_text())["providers"]
    mounts = dict(v.split(":")[:2] for v in services["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["./monitoring/grafana/dashboards"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    inside = Path(home).relative_to(provider["options"]["path"])
    assert (ROOT / "monitoring/grafana/dashboards" / inside).is_file()


def test_the_gpu_is_insisted_on() -> None:
    text = resolve((ROOT / "docker-compose.gpu.yml").read_text(), {})
    services = yaml.safe_load(text)["services"]
    assert set(services) == set(LEARNERS)
    for name, learner in services.items():
        assert learner["environment"] == {"MURMUR__LEARNER__DEVICE": "cuda"}
        (device,) = learner["deploy"]["resources"]["reservations"]["devices"]
        # Docker's `count` gives each container the first GPUs, so ranks name theirs.
        which = {"device_ids": [str(RANKS.index(name))]} if name in RANKS else {"count": 1}
        assert device == {"driver": "nvidia", **which, "capabilities": ["gpu"]}


def test_an_environment_of_ones_own(compose: dict[str, Any]) -> None:
    """Learner and servers read one configuration of the folder; only servers run its code."""
    given = {"OWN_FOLDER": "/home/me/meet", "OWN_CONFIG": "mine"}
    text = resolve((ROOT / "docker-compose.own.yml").read_text(), given)
    assert "${" not in text
    services = yaml.safe_load(text)["services"]
    folders = set()
    for name, service in services.items():
        base = compose["services"][name]
        command = murmurs(service)
        assert command[0] == murmurs(base)[0]
        assert command[1] == "/project/mine.yaml"
        assert command[3:] == murmurs(base)[3:] if command[0] == "learner" else True
        assert ("--evaluate" in command) == ("--evaluate" in murmurs(base))
        assert service["volumes"] == ["/home/me/meet:/project:ro"]
        if command[0] == "learner":
            folders.add(command[2])
            assert "image" not in service
        else:
            assert service["image"] == "murmur-own-env:1"
            assert service["build"] == {"context": "/home/me/meet", "dockerfile": "Dockerfile"}
    assert folders == {"--run=/runs/mine", "--run=/runs/ranks-mine"}
    alone = {"certs", "grafana-password", "prometheus", "grafana"}
    missions = {f"{kind}-{name}" for name in MISSIONS for kind in ("learner", "env")}
    assert set(services) == set(compose["services"]) - alone - missions
    example = ROOT / "examples" / "own-environment" / "Dockerfile"
    (base_image,) = re.findall(r"^ARG MURMUR_ENV=(\S+)$", example.read_text(), re.M)
    assert base_image == compose["services"]["env"]["image"]
    assert "WORKDIR /project\n" in example.read_text()
