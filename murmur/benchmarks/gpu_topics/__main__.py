"""One topic in this process: `python -m murmur.benchmarks.gpu_topics TOPIC EFFORT DEVICE FILE`.

Writes {"figures": ...} as JSON into FILE, also what there is so far; figures that FILE holds at the
start are not measured again.
"""

import json
import sys
from pathlib import Path
from typing import Any

from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics.catalogue import TOPICS
from murmur.benchmarks.gpu_topics.topics import Context, without_errors
from shared.files import write_whole


def main() -> None:
    """Measure and write."""
    name, effort, device, path = sys.argv[1:]
    file = Path(path)
    known = json.loads(file.read_text())["figures"] if file.exists() else {}

    def keep(figures: dict[str, Any]) -> None:
        write_whole(file, json.dumps({"figures": figures}))

    context = Context(device, Effort(effort), without_errors(known), keep)
    keep({**context.known, **TOPICS[name].measure(context)})


if __name__ == "__main__":
    main()
