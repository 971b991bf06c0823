"""One topic in this process: `python -m murmur.benchmarks.gpu_topics TOPIC EFFORT DEVICE S FILE`.

Writes {"figures": ..., "settings": ..., "whole": ...} as JSON into FILE, also what there is so far;
figures that FILE holds at the start are not measured again. S is the limit in seconds. The process
is set up as a learner's.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics.catalogue import TOPICS
from murmur.benchmarks.gpu_topics.topics import Context, without_errors
from murmur.learner_service.app import set_up_process
from murmur.learner_service.device.device import select_device
from murmur.runs.child import join_supervisor
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.files import write_whole


def main() -> None:
    """Measure and write."""
    began = time.monotonic()
    name, effort, device, limit, path = sys.argv[1:]
    file = Path(path)
    known = json.loads(file.read_text())["figures"] if file.exists() else {}
    join_supervisor()
    set_up_process()
    select_device(LearnerConfig.model_validate({"device": device}))
    settings = {
        "switch interval, ms": 1e3 * sys.getswitchinterval(),
        "products in fp32": torch.get_float32_matmul_precision(),  # high: TF32
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }

    def keep(figures: dict[str, Any], whole: bool) -> None:
        record = {"figures": figures, "settings": settings, "whole": whole}
        write_whole(file, json.dumps(record))

    end = began + float(limit)
    context = Context(device, Effort(effort), without_errors(known), keep, end)
    keep({**context.known}, False)
    keep({**context.known, **TOPICS[name].measure(context)}, True)


if __name__ == "__main__":
    main()
