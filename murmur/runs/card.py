"""The card of an exported policy: what it is, how good it is, how to use it; for model hubs too."""

from collections.abc import Mapping
from typing import Any

import yaml

from murmur.runs.run_folder import RunFolder
from murmur.runs.settings import changed
from murmur.shared.config.extras import DISTRIBUTION
from murmur.shared.config.text import one_line, without_secrets
from murmur.text import counted, number

_USES = {
    ".onnx": """import onnxruntime

policy = onnxruntime.InferenceSession("{file}")
given = {{x.name: observations[x.name] for x in policy.get_inputs()}}
outputs = policy.run(None, given)  # in the order of the table below""",
    ".pt2": """import torch

policy = torch.export.load("{file}").module()
outputs = policy(observations)  # tensors by name""",
    ".safetensors": """from safetensors import safe_open

with safe_open("{file}", "pt") as file:
    weights = {{name: file.get_tensor(name) for name in file.keys()}}
    about = file.metadata()["murmur"]  # JSON""",
}


def model_card(run: RunFolder, file: str, about: Mapping[str, Any]) -> str:
    """Return the card as Markdown, with the metadata that Hugging Face reads at its top.

    Args:
        run: the run that trained the policy.
        file: name of the exported file.
        about: description in the file; see docs/export.md.
    """
    config = run.config()
    task = config.source if config.supervised else config.environment
    name = str(task.options.get("factory", task.name))
    algorithm = config.algorithm.name
    kind = "image-segmentation" if config.supervised else "reinforcement-learning"
    head = {
        "library_name": "murmur",
        "pipeline_tag": kind,
        "tags": [kind, algorithm, name.replace(":", "-")],
    }
    whose = "" if config.supervised else f" for {counted(about['spec']['num_agents'], 'agent')}"
    options = [f"{k}: {one_line(v)}" for k, v in without_secrets(changed(config)).items()]
    arrays = [
        f"| input | `{x['name']}` | {['rows', *x['shape']]} | {x['dtype']} |"
        for x in about["inputs"]
    ]
    arrays += [f"| output | `{output}` | | |" for output in about["outputs"]]
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {config.run.name}",
        f"A policy{whose}, trained by {DISTRIBUTION} with `{algorithm}` in `{name}`, seed "
        f"{config.run.seed}: {about['checkpoint']}, after {counted(about['updates'], 'update')}.",
        *_results(run, about["updates"]),
        "## Use",
        f"```python\n{_USES['.' + file.rpartition('.')[2]].format(file=file)}\n```",
        *(
            ["Agents hear each other: run all of them in one place, or send messages."]
            if about.get("execution") == "centralized"
            else []
        ),
        "Actions are the best ones, not drawn. It has seen only the environment below; of others, "
        "and of changed options, nothing is known.",
        "\n".join(["| | name | shape, rows first | type |", "|---|---|---|---|", *arrays]),
        "## Configuration",
        "What differs from murmur's defaults:",
        "\n".join(["```yaml", *options, "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def _results(run: RunFolder, updates: int) -> list[str]:
    """Return the evaluation of the policy with this number of updates; empty if there is none."""
    found = [e for e in run.records("evaluation") if e["updates"] == updates]
    if not found:
        return []
    rows = [
        f"| {name} | {number(of['mean'])} | {' to '.join(map(number, of['ci95']))} | "
        f"{of['episodes']} |"
        for name, of in found[-1]["metrics"].items()
        if "ci95" in of
    ]
    return [
        "## Results",
        "| evaluated | mean | 95 % interval | episodes |\n|---|---|---|---|\n" + "\n".join(rows),
    ]
