"""Schemas of the custom resources in k8s/, cut down from their projects' definitions.

`python -m tests.deploy.custom_resources KIND SOURCE < CRD.yaml` writes one into schemas/. Left out
are descriptions, what is Kubernetes' own (a pod's template; it is checked as such), and parts that
no manifest here uses. Rules in CEL, and what webhooks of the controllers refuse, are not in them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Schema = dict[str, Any]
FOLDER = Path(__file__).with_name("schemas")
# By kind: dotted paths of parts that are not kept.
_OMITTED = {
    "JobSet": ["status", "spec.replicatedJobs.template", "spec.volumeClaimPolicies"],
    "Certificate": ["status", "spec.keystores"],
    "Issuer": ["status", "spec.acme", "spec.vault", "spec.venafi"],
    "PodMonitor": ["status"],
    "PrometheusRule": ["status"],
    "ScaledObject": ["status"],
}
_KEPT = (
    *("type", "enum", "required", "pattern", "minimum", "maximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
)


def reduced(schema: Schema, omitted: list[str], path: str = "") -> Schema:
    """Return what jsonschema checks of a CRD's schema; unknown fields are errors."""
    found = {key: schema[key] for key in _KEPT if key in schema}
    if "pattern" in found:  # Go takes flags anywhere, Python at the start
        found["pattern"] = found["pattern"].replace("^(?i)", "(?i)^")
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if "properties" in schema:
        found["properties"] = {
            name: {} if below in omitted else reduced(part, omitted, below)
            for name, part in schema["properties"].items()
            for below in [f"{path}.{name}".lstrip(".")]
        }
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = reduced(schema[key], omitted, path)
    return found


def check(document: dict[str, Any]) -> None:
    """Check a custom resource.

    Raises:
        jsonschema.ValidationError: if a field is unknown, missing or of a wrong type.
    """
    kept = json.loads((FOLDER / f"{document['kind']}.json").read_text())
    assert document["apiVersion"] == kept["apiVersion"]
    jsonschema.validate(document, kept["schema"])


def main(kind: str, source: str) -> None:
    """Write the schema of a definition on standard input."""
    definition = yaml.safe_load(sys.stdin)
    (version,) = [v for v in definition["spec"]["versions"] if v["storage"]]
    schema = reduced(version["schema"]["openAPIV3Schema"], _OMITTED[kind])
    schema["properties"]["metadata"] = {"type": "object"}
    kept = {
        "apiVersion": f"{definition['spec']['group']}/{version['name']}",
        "source": source,
        "schema": schema,
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{kind}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
