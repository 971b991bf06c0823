"""Run folders as training leaves them, for tests of what reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmur.runs.run_folder import RunFolder
from murmur.shared.config.files import load, save


def write_run(
    path: Path,
    evaluations: Sequence[tuple[int, float]],
    *overrides: str,
    config: str = "spread",
    metric: str = "return",
    **last: Any,
) -> RunFolder:
    """A run with evaluations of (environment steps, mean of the metric).

    Its progress ends with the last of them unless `last` has other env_steps.
    """
    (path / "checkpoints").mkdir(parents=True)
    run = RunFolder(path)
    save(load(config, ["run.max_env_steps=1000", *overrides], environ={}), run.path / "config.yaml")
    lines: list[dict[str, Any]] = [
        {
            "kind": "evaluation",
            "env_steps": steps,
            "updates": steps // 10,
            "metrics": {metric: {"mean": value, "ci95": [value - 1, value + 1]}},
        }
        for steps, value in evaluations
    ]
    end = {"env_steps": evaluations[-1][0] if evaluations else 0, "updates": 1, "seconds": 60.0}
    lines.append({"kind": "progress", "return": 0.0, "metrics": {}, **end, **last})
    run.progress_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run
