"""The manifests: built by kustomize, checked against Kubernetes' schemas and against murmur."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from monitoring.kubernetes import TARGET, prometheus_rule
from murmur.cli import app
from murmur.shared.config.files import load

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
VERSIONS = ("1.35", "1.36", "1.37")
OVERLAYS = ("overlays/cpu", "overlays/gpu", "evaluation", "overlays/ranks")
# Not Kubernetes' own, so without a schema here.
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject"}
Manifest = dict[str, Any]


def kustomize(folder: Path) -> list[Manifest]:
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    else:
        pytest.skip("neither kubectl nor kustomize is installed")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr  # warnings of deprecated fields
    return [document for document in yaml.safe_load_all(result.stdout) if document]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """Every overlay, and the GPU overlay with KEDA in place of the HPA."""
    found = {name: kustomize(K8S / name) for name in OVERLAYS}
    copy = tmp_path_factory.mktemp("k8s") / "repository"
    shutil.copytree(K8S, copy / "k8s")
    shutil.copytree(ROOT / "monitoring", copy / "monitoring")
    file = copy / "k8s/overlays/gpu/kustomization.yaml"
    file.write_text(
        file.read_text().replace("components/autoscaling\n", "components/autoscaling-keda\n")
    )
    found["keda"] = kustomize(file.parent)
    return found


ALL = (*OVERLAYS, "keda")


def of_kind(documents: list[Manifest], *kinds: str) -> list[Manifest]:
    return [d for d in documents if d["kind"] in kinds]


def pods(documents: list[Manifest]) -> list[tuple[str, Manifest]]:
    found = of_kind(documents, "Deployment", "StatefulSet", "Job")
    return [(f"{d['kind']} {d['metadata']['name']}", d["spec"]["template"]) for d in found]


def containers(template: Manifest) -> list[Manifest]:
    return template["spec"].get("initContainers", []) + template["spec"]["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL)
def test_schemas(built: dict[str, list[Manifest]], name: str, version: str) -> None:
    for document in built[name]:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_manifest_is_found(built: dict[str, list[Manifest]]) -> None:
    (learner,) = of_kind(built["overlays/cpu"], "StatefulSet")
    wrong = {**learner, "spec": {**learner["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", ALL)
def test_everything_is_in_its_namespace(built: dict[str, list[Manifest]], name: str) -> None:
    for document in built[name]:
        expected = None if document["kind"] in ("Namespace", "PriorityClass") else "murmur"
        assert document["metadata"].get("namespace") == expected, document["metadata"]["name"]


@pytest.mark.parametrize("name", ALL)
def test_restricted_pod_security(built: dict[str, list[Manifest]], name: str) -> None:
    """What the restricted Pod Security Standard asks, and a read-only root on top."""
    for where, template in pods(built[name]):
        spec = template["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, where
        assert security["runAsUser"] == security["runAsGroup"] == 10001, where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert spec["automountServiceAccountToken"] is False, where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), where
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected"}
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= allowed, where
        for container in containers(template):
            inside = container["securityContext"]
            assert inside["allowPrivilegeEscalation"] is False, where
            assert inside["capabilities"] == {"drop": ["ALL"]}, where
            assert inside["readOnlyRootFilesystem"] is True, where
            resources = container["resources"]
            for amounts in (resources["requests"], resources["limits"]):
                assert {"cpu", "memory"} <= set(amounts), where
            names = {volume["name"] for volume in spec["volumes"]}
            claims = (
                {"runs"} if where == "StatefulSet learner" and name != "overlays/ranks" else set()
            )
            assert {m["name"] for m in container["volumeMounts"]} <= names | claims, where
    if name != "evaluation":
        (namespace,) = of_kind(built[name], "Namespace")
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def matches(selector: Manifest, labels: Manifest) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("name", [name for name in ALL if name != "evaluation"])
def test_everything_points_to_something(built: dict[str, list[Manifest]], name: str) -> None:
    documents = built[name]
    labels = {where.split()[1]: t["metadata"]["labels"] for where, t in pods(documents)}
    ports = {
        where.split()[1]: {p["name"]: p["containerPort"] for c in containers(t) for p in c["ports"]}
        for where, t in pods(documents)
    }
    for d in of_kind(documents, "Deployment", "StatefulSet"):
        assert matches(d["spec"]["selector"]["matchLabels"], labels[d["metadata"]["name"]])
    (service,) = of_kind(documents, "Service")
    assert [w for w, have in labels.items() if matches(service["spec"]["selector"], have)] == [
        "learner"
    ]
    assert {p["targetPort"] for p in service["spec"]["ports"]} <= set(ports["learner"])
    (learner,) = of_kind(documents, "StatefulSet")
    assert learner["spec"]["serviceName"] == service["metadata"]["name"]
    accounts = {d["metadata"]["name"] for d in of_kind(documents, "ServiceAccount")}
    priorities = {d["metadata"]["name"] for d in of_kind(documents, "PriorityClass")}
    configs = {d["metadata"]["name"] for d in of_kind(documents, "ConfigMap")}
    claims = {d["metadata"]["name"] for d in of_kind(documents, "PersistentVolumeClaim")}
    for where, template in pods(documents):
        assert template["spec"]["serviceAccountName"] in accounts, where
        assert template["spec"]["priorityClassName"] in priorities, where
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in configs, where
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, where
        for container in containers(template):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                kind = container[probe].get("grpc") or container[probe]["httpGet"]
                known = ports[where.split()[1]]
                assert kind["port"] in known or kind["port"] in known.values(), where
    for budget in of_kind(documents, "PodDisruptionBudget"):
        assert len({"minAvailable", "maxUnavailable"} & set(budget["spec"])) == 1
        assert any(
            matches(budget["spec"]["selector"]["matchLabels"], have) for have in labels.values()
        )
    for monitor in of_kind(documents, "PodMonitor"):
        chosen = [
            w
            for w, have in labels.items()
            if matches(monitor["spec"]["selector"]["matchLabels"], have)
        ]
        assert len(chosen) == 1
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports[chosen[0]]
    for policy in of_kind(documents, "NetworkPolicy"):
        chosen_labels = policy["spec"]["podSelector"].get("matchLabels", {})
        assert any(matches(chosen_labels, have) for have in labels.values())
        for rule in policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                assert any(port["port"] in known for known in ports.values())


@pytest.mark.parametrize("name", ALL)
def test_the_arguments_are_murmurs(built: dict[str, list[Manifest]], name: str) -> None:
    experiment = str(K8S / "base/experiment.yaml")
    for where, template in pods(built[name]):
        for container in containers(template):
            command, *rest = murmurs(container)
            text = CliRunner().invoke(app, [command, "--help"]).output
            for option in (part.split("=")[0] for part in rest if part.startswith("--")):
                assert option in text, f"{where}: {option}"
            variables = {e["name"]: e["value"] for e in container.get("env", [])}
            config = load(experiment, environ=variables)  # unknown keys are errors
            if command != "evaluate":
                _check_security(container, template, config.security.folder, where)
            if container["image"].startswith("murmur-env") and command == "env-server":
                assert config.env_server.learner == "learner:50051"
                assert int(container["resources"]["limits"]["cpu"]) == config.env_server.num_workers


def murmurs(container: Manifest) -> list[str]:
    """What follows `murmur` on a container's command line."""
    arguments: list[str] = container["args"]
    if container.get("command") == ["torchrun"]:
        return arguments[arguments.index("murmur") + 1 :]
    assert "command" not in container
    return arguments


def _check_security(container: Manifest, template: Manifest, folder: str, where: str) -> None:
    """Credentials from the secret of this role alone; none only within a pod, on loopback."""
    if where == "Job evaluation":
        assert folder == ""
        variables = {e["name"]: e["value"] for e in container["env"]}
        assert variables["MURMUR__LEARNER__HOST"] == "127.0.0.1"
        return
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == folder]
    assert mount["readOnly"] is True
    (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == f"{where.split()[1]}-credentials"
    assert volume["secret"]["defaultMode"] == 0o440


def test_images_are_those_of_compose(built: dict[str, list[Manifest]]) -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    images = {c["image"] for name in ALL for _, t in pods(built[name]) for c in containers(t)}
    assert images == {"murmur-learner:0.2.0", "murmur-env:0.2.0"}
    for image in images:
        assert f":-{image}}}" in compose


def test_devices(built: dict[str, list[Manifest]]) -> None:
    devices = {}
    for name in ("overlays/cpu", "overlays/gpu", "overlays/ranks"):
        ((_, learner),) = [(w, t) for w, t in pods(built[name]) if "learner" in w]
        (container,) = containers(learner)
        (device,) = [e["value"] for e in container["env"] if e["name"] == "MURMUR__LEARNER__DEVICE"]
        devices[name] = (device, container["resources"]["limits"].get("nvidia.com/gpu"))
    gpu = ("cuda", "1")
    assert devices == {"overlays/cpu": ("cpu", None), "overlays/gpu": gpu, "overlays/ranks": gpu}


def test_the_learners_of_a_run_meet(built: dict[str, list[Manifest]]) -> None:
    """As many as are waited for, at an address that the first pod has, at the same time."""
    documents = built["overlays/ranks"]
    (learner,) = of_kind(documents, "StatefulSet")
    (service,) = of_kind(documents, "Service")
    spec = learner["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    arguments = get_args_parser().parse_args(container["args"])  # torchrun's own
    assert arguments.nnodes == str(spec["replicas"]) == "2"
    assert arguments.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    assert arguments.rdzv_backend == "c10d"
    assert arguments.rdzv_endpoint.partition(":")[0] == f"learner-0.{service['metadata']['name']}"
    assert (arguments.module, arguments.training_script) == (True, "murmur")
    assert arguments.max_restarts >= 100
    assert service["spec"]["clusterIP"] == "None"  # its name has the addresses of all pods
    assert service["spec"]["publishNotReadyAddresses"] is True  # none is ready before all have met
    assert spec["podManagementPolicy"] == "Parallel"
    assert "volumeClaimTemplates" not in spec
    (claim,) = of_kind(documents, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (budget,) = [
        d
        for d in of_kind(documents, "PodDisruptionBudget")
        if d["metadata"]["name"] == learner["metadata"]["name"]
    ]
    assert budget["spec"]["maxUnavailable"] == 1


def test_learners_of_a_run_reach_one_another_and_names(built: dict[str, list[Manifest]]) -> None:
    policies = of_kind(built["overlays/ranks"], "NetworkPolicy")
    (policy,) = [p for p in policies if p["metadata"]["name"] == "ranks"]
    (learner,) = of_kind(built["overlays/ranks"], "StatefulSet")
    labels = learner["spec"]["template"]["metadata"]["labels"]
    selector = policy["spec"]["podSelector"]
    assert matches(selector["matchLabels"], labels)
    (incoming,) = policy["spec"]["ingress"]
    assert incoming == {"from": [{"podSelector": selector}]}  # every port, no other source
    to_peers, to_names = policy["spec"]["egress"]
    assert to_peers == {"to": [{"podSelector": selector}]}
    assert {port["port"] for port in to_names["ports"]} == {53}


def test_the_autoscalers_ask_for_a_metric_that_is_recorded(
    built: dict[str, list[Manifest]],
) -> None:
    (rule,) = of_kind(built["overlays/gpu"], "PrometheusRule")
    records = {r.get("record") for g in rule["spec"]["groups"] for r in g["rules"]}
    adapter = yaml.safe_load((K8S / "components/autoscaling/adapter-rules.yaml").read_text())
    (external,) = adapter["rules"]["external"]
    assert external["seriesQuery"].split("{")[0] in records
    (autoscaler,) = of_kind(built["overlays/gpu"], "HorizontalPodAutoscaler")
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == external["name"]["as"]
    (scaled,) = of_kind(built["keda"], "ScaledObject")
    assert scaled["spec"]["triggers"][0]["metadata"]["query"].split("(")[1].split("{")[0] in records
    assert not of_kind(built["keda"], "HorizontalPodAutoscaler")
    for name in ("overlays/gpu", "keda"):  # nothing else sets the number of servers
        (servers,) = of_kind(built[name], "Deployment")
        assert "replicas" not in servers["spec"]


def test_the_learner_has_a_place_for_every_server(built: dict[str, list[Manifest]]) -> None:
    """A server that finds none gives up, and is started again and again."""
    (autoscaler,) = of_kind(built["overlays/gpu"], "HorizontalPodAutoscaler")
    (scaled,) = of_kind(built["keda"], "ScaledObject")
    (servers,) = of_kind(built["overlays/gpu"], "Deployment")
    (container,) = containers(servers["spec"]["template"])
    given = {e["name"]: e["value"] for e in container["env"]}
    experiment = load(str(K8S / "base/experiment.yaml"))
    sessions = int(given["MURMUR__ENV_SERVER__NUM_WORKERS"])
    sessions *= experiment.env_server.sessions_per_worker
    for most in (autoscaler["spec"]["maxReplicas"], scaled["spec"]["maxReplicaCount"]):
        assert most * sessions <= experiment.learner.max_sessions
    (autoscaler,) = of_kind(built["overlays/ranks"], "HorizontalPodAutoscaler")
    (learner,) = of_kind(built["overlays/ranks"], "StatefulSet")
    places = experiment.learner.max_sessions * learner["spec"]["replicas"]
    assert autoscaler["spec"]["maxReplicas"] * sessions <= places


@pytest.mark.parametrize("name", ["overlays/cpu", "overlays/gpu"])
def test_only_environment_servers_reach_the_learner(
    built: dict[str, list[Manifest]], name: str
) -> None:
    """Who may open which port of which pod, read from the policies."""
    documents = built[name]
    policies = of_kind(documents, "NetworkPolicy")
    everyone = [p for p in policies if not p["spec"]["podSelector"]]
    assert any(
        set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"} and "ingress" not in p["spec"]
        for p in everyone
    )
    opened = set()
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            for peer in rule["from"]:
                who = (
                    peer.get("namespaceSelector", {})
                    .get("matchLabels", {})
                    .get(
                        "kubernetes.io/metadata.name",
                        peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component"),
                    )
                )
                opened |= {(policy["metadata"]["name"], who, p["port"]) for p in rule["ports"]}
    assert opened == {("learner", "env-server", "grpc"), ("metrics", "monitoring", "metrics")}


def test_the_rules_are_those_of_prometheus() -> None:
    assert TARGET.read_text() == prometheus_rule(), "run: python -m monitoring.kubernetes"
