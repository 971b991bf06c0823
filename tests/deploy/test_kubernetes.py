"""The manifests: built by kustomize, checked against Kubernetes' schemas and against murmur."""

import os
import re
import shutil
import signal
import subprocess
import sys
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from monitoring.kubernetes import TARGET, prometheus_rule
from murmur.cli import app
from murmur.shared.config.files import load
from murmur.shared.wire.credentials import FILES, CredentialFolder
from tests.deploy.custom_resources import check
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
VERSIONS = ("1.35", "1.36", "1.37")
JOBSETS = ("overlays/jobset", "overlays/jobset-gpu")
EVALUATIONS = ("evaluation", "evaluation-ended")
OVERLAYS = ("overlays/cpu", "overlays/gpu", "overlays/ranks", *JOBSETS, *EVALUATIONS)
# Not Kubernetes' own: checked by tests/deploy/schemas.
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject", "JobSet", "Certificate", "Issuer"}
Manifest = dict[str, Any]


def tool(name: str) -> str | None:
    """The program beside this Python, where .ci/run puts it, or that of the machine."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def build(folder: Path) -> str:
    if kubectl := tool("kubectl"):
        command = [kubectl, "kustomize", str(folder)]
    elif alone := tool("kustomize"):
        command = [alone, "build", str(folder)]
    else:
        pytest.skip("neither kubectl nor kustomize is installed (.ci/run does it on Linux x86-64)")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr  # warnings of deprecated fields
    return result.stdout


def documents_of(text: str) -> list[Manifest]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    return [document for document in yaml.load_all(text, loader) if document]


def kustomize(folder: Path) -> list[Manifest]:
    return documents_of(build(folder))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """Every overlay; with KEDA in place of the HPA, and with cert-manager and Kueue."""
    found = {name: kustomize(K8S / name) for name in OVERLAYS}
    copy = tmp_path_factory.mktemp("k8s") / "repository"
    shutil.copytree(K8S, copy / "k8s")
    shutil.copytree(ROOT / "monitoring", copy / "monitoring")
    file = copy / "k8s/overlays/gpu/kustomization.yaml"
    file.write_text(
        file.read_text().replace("components/autoscaling\n", "components/autoscaling-keda\n")
    )
    found["keda"] = kustomize(file.parent)
    found["keda jobset"] = kustomize(copy / "k8s/overlays/jobset-gpu")
    file = copy / "k8s/overlays/jobset/kustomization.yaml"
    file.write_text(file.read_text().replace("# - ../", "- ../") + IMAGES)
    found["jobset, all"] = kustomize(file.parent)
    file = copy / "k8s/overlays/cpu/kustomization.yaml"
    added = "components:\n  - ../../components/cert-manager\n  - "
    file.write_text(file.read_text().replace("components: [", added).replace("policy]", "policy"))
    found["cert-manager"] = kustomize(file.parent)
    return found


# As an overlay of the user's names them.
IMAGES = """
images:
  - {name: murmur-learner, newName: registry.example/murmur-learner, newTag: "7"}
  - {name: murmur-env, newName: registry.example/murmur-env, newTag: "7"}
"""
ALL = (*OVERLAYS, "keda", "keda jobset", "jobset, all", "cert-manager")
WITH_JOBSET = (*JOBSETS, "keda jobset", "jobset, all")


def of_kind(documents: list[Manifest], *kinds: str) -> list[Manifest]:
    return [d for d in documents if d["kind"] in kinds]


def pods(documents: list[Manifest]) -> list[tuple[str, Manifest]]:
    found = of_kind(documents, "Deployment", "StatefulSet", "Job")
    return [(f"{d['kind']} {d['metadata']['name']}", d["spec"]["template"]) for d in found] + [
        (f"JobSet {job['name']}", job["template"]["spec"]["template"])
        for d in of_kind(documents, "JobSet")
        for job in d["spec"]["replicatedJobs"]
    ]


def jobs(documents: list[Manifest]) -> dict[str, Manifest]:
    """The Jobs of a JobSet by name."""
    (jobset,) = of_kind(documents, "JobSet")
    return {job["name"]: job["template"] for job in jobset["spec"]["replicatedJobs"]}


def containers(template: Manifest) -> list[Manifest]:
    return template["spec"].get("initContainers", []) + template["spec"]["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL)
def test_schemas(built: dict[str, list[Manifest]], name: str, version: str) -> None:
    for document in built[name]:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)
        elif document["kind"] == "JobSet":
            for job in jobs(built[name]).values():
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}} | job
                kubernetes_validate.validate(whole, version, strict=True)


@pytest.mark.parametrize("name", ALL)
def test_schemas_of_custom_resources(built: dict[str, list[Manifest]], name: str) -> None:
    for document in of_kind(built[name], *CUSTOM):
        check(document)


def test_a_wrong_manifest_is_found(built: dict[str, list[Manifest]]) -> None:
    (learner,) = of_kind(built["overlays/cpu"], "StatefulSet")
    wrong = {**learner, "spec": {**learner["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
    for overlay, kind in (
        ("jobset, all", "JobSet"),
        ("jobset, all", "Certificate"),
        ("keda", "ScaledObject"),
    ):
        document = of_kind(built[overlay], kind)[0]
        with pytest.raises(jsonschema.ValidationError, match="replica"):
            check({**document, "spec": {**document["spec"], "replica": 1}})


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
    if name not in EVALUATIONS:
        (namespace,) = of_kind(built[name], "Namespace")
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def matches(selector: Manifest, labels: Manifest) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("name", [name for name in ALL if name not in EVALUATIONS])
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
    for learner in of_kind(documents, "StatefulSet"):
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
            if "projected" in volume:
                made = {c["spec"]["secretName"] for c in of_kind(documents, "Certificate")}
                named = {source["secret"]["name"] for source in volume["projected"]["sources"]}
                assert named <= made | {"tokens"}, where
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
            if "murmur-env" in container["image"] and command == "env-server":
                assert config.env_server.learner == "learner:50051"
                assert int(container["resources"]["limits"]["cpu"]) == config.env_server.num_workers


def murmurs(container: Manifest) -> list[str]:
    """What follows `murmur` on a container's command line."""
    arguments: list[str] = container["args"]
    if container.get("command") == ["torchrun"]:
        return arguments[arguments.index("murmur") + 1 :]
    assert container.get("command", ["murmur"])[-1] == "murmur"
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
    if "projected" in volume:
        certificate, tokens = (source["secret"] for source in volume["projected"]["sources"])
        assert certificate["name"] == f"{where.split()[1]}-certificate"
        assert {item["path"] for item in certificate["items"]} | {tokens["name"]} == set(FILES)
        assert volume["projected"]["defaultMode"] == 0o440
        return
    assert volume["secret"]["secretName"] == f"{where.split()[1]}-credentials"
    assert volume["secret"]["defaultMode"] == 0o440


def test_images_are_those_of_compose(built: dict[str, list[Manifest]]) -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    mine = {c["image"] for _, t in pods(built["jobset, all"]) for c in containers(t)}
    assert mine == {"registry.example/murmur-learner:7", "registry.example/murmur-env:7"}
    others = [name for name in ALL if name != "jobset, all"]
    images = {c["image"] for name in others for _, t in pods(built[name]) for c in containers(t)}
    assert images == {"murmur-learner:0.2.0", "murmur-env:0.2.0"}
    for image in images:
        assert f":-{image}}}" in compose


def test_devices(built: dict[str, list[Manifest]]) -> None:
    devices = {}
    for name in ("overlays/cpu", "overlays/gpu", "overlays/ranks", *JOBSETS):
        ((_, learner),) = [(w, t) for w, t in pods(built[name]) if "learner" in w]
        (container,) = containers(learner)
        (device,) = [e["value"] for e in container["env"] if e["name"] == "MURMUR__LEARNER__DEVICE"]
        devices[name] = (device, container["resources"]["limits"].get("nvidia.com/gpu"))
    gpu = ("cuda", "1")
    assert devices == {
        "overlays/cpu": ("cpu", None),
        "overlays/gpu": gpu,
        "overlays/ranks": gpu,
        "overlays/jobset": ("cpu", None),
        "overlays/jobset-gpu": gpu,
    }


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


@pytest.mark.parametrize("name", ["overlays/cpu", "overlays/gpu", *JOBSETS])
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


@pytest.mark.parametrize("name", WITH_JOBSET)
def test_a_jobset_ends_with_its_learner(built: dict[str, list[Manifest]], name: str) -> None:
    documents = built[name]
    scaled = ("StatefulSet", "Deployment", "HorizontalPodAutoscaler", "ScaledObject")
    assert not of_kind(documents, *scaled, "PodDisruptionBudget")
    (jobset,) = of_kind(documents, "JobSet")
    spec, of_set = jobset["spec"], jobs(documents)
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["learner"]}
    assert list(of_set) == ["learner", "env-server"]
    learner, servers = (job["spec"] for job in of_set.values())
    # Its failure is the set's, which starts again that often; a mistake is not repeated.
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert rule["targetReplicatedJobs"] == ["learner"]
    assert (learner["parallelism"], learner["completions"], learner["backoffLimit"]) == (1, 1, 0)
    assert learner["template"]["spec"]["restartPolicy"] == "Never"  # as podFailurePolicy asks
    actions = {
        tuple(r["onExitCodes"]["values"]): r["action"]
        for r in learner["podFailurePolicy"]["rules"]
        if "onExitCodes" in r
    }
    assert actions == {(2,): "FailJob", (143,): "Ignore"}
    for rule in learner["podFailurePolicy"]["rules"]:
        named = rule.get("onExitCodes", {}).get("containerName", "learner")
        assert named == learner["template"]["spec"]["containers"][0]["name"]
    # A server is started again without the set.
    assert servers["parallelism"] == servers["completions"] >= 1
    assert servers["backoffLimit"] >= 100
    assert servers["template"]["spec"]["restartPolicy"] == "OnFailure"
    # The experiment has an end, and its run is on the volume that the other overlays use.
    (text,) = [
        d["data"]["experiment.yaml"]
        for d in of_kind(documents, "ConfigMap")
        if "experiment.yaml" in d["data"]
    ]
    limits = {"max_minutes", "max_updates", "max_env_steps", "max_episodes"}
    assert set(yaml.safe_load(text)["run"]) & limits
    (claim,) = of_kind(documents, "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "runs-learner-0"
    assert "cert-manager" not in str(built["overlays/cpu"])


def test_the_jobset_has_the_pods_of_the_overlay(built: dict[str, list[Manifest]]) -> None:
    """But for what a Job's pods need: an end, and the volume that a StatefulSet claims."""
    for name, other in (
        ("overlays/jobset", "overlays/cpu"),
        ("overlays/jobset-gpu", "overlays/gpu"),
    ):
        of_other = {where.split()[1]: template for where, template in pods(built[other])}
        for where, template in pods(built[name]):
            template = deepcopy(template)
            spec = template["spec"]
            assert spec.pop("restartPolicy")
            for container in spec["containers"]:
                assert container.pop("command")
            spec["volumes"] = [
                v for v in spec["volumes"] if v["name"] not in ("runs", "experiment")
            ]
            expected = deepcopy(of_other[where.split()[1]])
            expected["spec"]["volumes"] = [
                v for v in expected["spec"]["volumes"] if v["name"] != "experiment"
            ]
            assert template == expected


def test_kueue_is_told_of_the_jobset_alone(built: dict[str, list[Manifest]]) -> None:
    label = "kueue.x-k8s.io/queue-name"
    labelled = [d["kind"] for d in built["jobset, all"] if label in d["metadata"].get("labels", {})]
    assert labelled == ["JobSet"]
    assert not any(label in t["metadata"]["labels"] for _, t in pods(built["jobset, all"]))


_SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # in order, as a learner does
open(sys.argv[1], "w").close()
time.sleep(60 if sys.argv[2] == "stays" else 0)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("ends", "code"), [("0", 0), ("2", 2), ("1", 1), ("stays", 143)])
def test_a_pod_that_is_asked_to_go_is_not_done(
    built: dict[str, list[Manifest]], tmp_path: Path, ends: str, code: int
) -> None:
    """A Job takes 0 for done: only the end of the run may give it."""
    murmur = tmp_path / "murmur"
    murmur.write_text(f"#!{sys.executable}\n{_SAVES}")
    murmur.chmod(0o755)
    for template in jobs(built["overlays/jobset"]).values():
        (container,) = template["spec"]["template"]["spec"]["containers"]
        started = tmp_path / f"started-{container['name']}"
        process = subprocess.Popen(
            [*container["command"], str(started), ends],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )
        try:
            wait_until(started.exists, "the pod's process starts", 30)
            if ends == "stays":
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) == code
        finally:
            process.kill()
            process.wait()


def test_an_evaluation_after_the_end_needs_no_learner(built: dict[str, list[Manifest]]) -> None:
    (during,), (after,) = (of_kind(built[name], "Job") for name in EVALUATIONS)
    during = deepcopy(during)
    assert during["spec"]["template"]["spec"].pop("affinity")
    assert during == after


def _issued(spec: Manifest, issuer: Manifest | None) -> Manifest:
    """Issue a key and certificates by a Certificate's spec, as cert-manager does."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec["commonName"])])
    now = datetime.now(UTC)
    hours = int(spec["duration"].removesuffix("h"))
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer["certificate"].subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(hours=hours))
        .add_extension(x509.BasicConstraints(spec.get("isCA", False), None), critical=True)
    )
    if names := spec.get("dnsNames"):
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False
        )
    usages = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH}
    usages |= {"client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
    if extended := [usages[u] for u in spec.get("usages", []) if u in usages]:
        builder = builder.add_extension(x509.ExtendedKeyUsage(extended), critical=False)
    certificate = builder.sign(issuer["key"] if issuer else key, hashes.SHA256())
    return {"key": key, "certificate": certificate}


def test_murmur_takes_the_certificates_of_cert_manager(
    built: dict[str, list[Manifest]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = built["cert-manager"]
    specs = {c["metadata"]["name"]: c["spec"] for c in of_kind(documents, "Certificate")}
    issuers = {i["metadata"]["name"]: i["spec"] for i in of_kind(documents, "Issuer")}
    for name, spec in specs.items():
        of_issuer = issuers[spec["issuerRef"]["name"]]
        assert of_issuer == (
            {"selfSigned": {}} if name == "authority" else {"ca": {"secretName": "authority"}}
        )
        assert spec["privateKey"]["algorithm"] == "ECDSA"
        if name != "authority":  # renewed before murmur warns of the end, 14 days ahead
            assert int(spec["renewBefore"].removesuffix("h")) > 14 * 24
    authority = _issued(specs["authority"], None)
    made = {name: _issued(specs[name], authority) for name in ("learner", "env-server")}
    folders = {}
    for where, template in pods(documents):
        name = where.split()[1]
        (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == "credentials"]
        secret = {
            "ca.crt": authority["certificate"].public_bytes(Encoding.PEM),
            "tls.crt": made[name]["certificate"].public_bytes(Encoding.PEM),
            "tls.key": made[name]["key"].private_bytes(
                Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
            ),
        }
        (tmp_path / name).mkdir()
        for item in volume["projected"]["sources"][0]["secret"]["items"]:
            (tmp_path / name / item["path"]).write_bytes(secret[item["key"]])
        (tmp_path / name / "tokens").write_text(f"environment {'0123456789abcdef' * 3}")
        for file in (tmp_path / name).iterdir():
            file.chmod(volume["projected"]["defaultMode"])
        folders[name] = CredentialFolder(tmp_path / name).current()
    assert not caplog.records
    token = folders["env-server"].token_for("environment")
    assert folders["learner"].role_of(token) == specs["env-server"]["commonName"] == "environment"
    (service,) = of_kind(documents, "Service")
    assert specs["learner"]["dnsNames"] == [service["metadata"]["name"]]


@pytest.mark.parametrize("name", ["overlays/cpu", "overlays/gpu", "overlays/jobset"])
def test_the_chart_is_what_kustomize_builds(tmp_path: Path, name: str) -> None:
    """Helm lints and prints it; braces of alerts and dashboards are not Helm's."""
    helm = tool("helm")
    if helm is None:
        pytest.skip("helm is not installed (.ci/run does it on Linux x86-64)")
    chart = tmp_path / "chart"
    shutil.copytree(K8S / "chart", chart, ignore=shutil.ignore_patterns("murmur.yaml.*"))
    (chart / "murmur.yaml").unlink(missing_ok=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [helm, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    missing = run("template", "murmur", str(chart))
    assert missing.returncode != 0
    assert "murmur.yaml is missing: kubectl kustomize" in missing.stderr
    (chart / "murmur.yaml").write_text(build(K8S / name))
    linted = run("lint", "--strict", str(chart))
    assert linted.returncode == 0, linted.stdout
    printed = run("template", "murmur", str(chart))

    def by_name(text: str) -> dict[tuple[str, str], Manifest]:
        return {(d["kind"], d["metadata"]["name"]): d for d in documents_of(text)}

    assert by_name(printed.stdout) == by_name(build(K8S / name))


@pytest.mark.parametrize("base", ["cpu", "gpu", "jobset"])
def test_an_environment_outside_the_repository(tmp_path: Path, base: str) -> None:
    """The overlay that docs/own-environment.md shows, on a folder that is none of murmur's."""
    page = (ROOT / "docs" / "own-environment.md").read_text()
    (example,) = re.findall(r"```\n# deploy/kustomization.yaml\n(.*?)```", page, re.DOTALL)
    shutil.copytree(ROOT / "examples" / "own-environment", tmp_path / "meet")
    (tmp_path / "meet" / "meet.py").write_text("class Meet: ...\n")
    (tmp_path / "meet" / "meet.yaml").write_text("environment: {name: meet:Meet}\n")
    (tmp_path / "deploy").mkdir()
    murmur = os.path.relpath(ROOT, tmp_path / "deploy")
    text = example.replace("../murmur/k8s/overlays/jobset", f"{murmur}/k8s/overlays/{base}")
    (tmp_path / "deploy" / "kustomization.yaml").write_text(text)
    documents = kustomize(tmp_path / "deploy")
    (config,) = [d for d in of_kind(documents, "ConfigMap") if "experiment.yaml" in d["data"]]
    assert set(config["data"]) == {"experiment.yaml", "meet.py"}
    for where, template in pods(documents):
        (mount,) = [
            m
            for volume in template["spec"]["volumes"]
            if volume.get("configMap", {}).get("name") == config["metadata"]["name"]
            for container in containers(template)
            for m in container["volumeMounts"]
            if m["name"] == volume["name"]
        ]
        (container,) = containers(template)
        # Beside the configuration, which is where code is looked for.
        assert murmurs(container)[1] == f"{mount['mountPath']}/experiment.yaml"
        own = "registry.example/murmur-own-env:1"
        assert container["image"] == ("murmur-learner:0.2.0" if "learner" in where else own)
