"""No client on the machine makes ranks run code: the store that they meet on is not unpickled."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from murmur.runs.run_folder import RunFolder
from tests.listeners import Listeners
from tests.system.conftest import SPREAD, Training
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.system]

# For each port that a store answers at: what torchrun keeps there becomes a pickle of a command.
_PLANT = """
import base64, os, pickle, sys
from datetime import timedelta
from torch.distributed import TCPStore

class Command:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}",)

stores = 0
for port in map(int, sys.argv[2:]):
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        keys = store.list_keys()
    except RuntimeError:
        continue  # another service
    stores += 1
    for key in {*keys, "/torch.rendezvous.none"}:
        if "rendezvous" in key:
            store.set(key.removeprefix("/"), base64.b64encode(pickle.dumps(Command())))
print(stores)
"""


def test_planted_pickle_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(SPREAD.replace("num_workers: 1", "num_workers: 2"))
    training = Training(tmp_path / "two.yaml", tmp_path / "run", ["--learners", "2"])
    trace = tmp_path / "ran"
    try:
        with Listeners(training.process.pid) as found:
            training.until(lambda: training.updates() > 0, 120)
            ranks = [RunFolder(tmp_path / "run").process(f"learner{n}.json") for n in ("", "-1")]
            environment = psutil.Process(ranks[1]).environ()
            ports = {text.rpartition(":")[2] for text in found.beyond}
            ports.add(environment["MASTER_PORT"])
        command = [sys.executable, "-c", _PLANT, str(trace)]
        planted = subprocess.run(
            [*command, *ports],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},
            check=True,
        )
        assert int(planted.stdout) >= 1  # that of the ranks
        at = training.updates()  # torchrun reads its state every 5 s
        training.until(lambda: training.updates() > at, 120)
        with pytest.raises(TimeoutError):
            wait_until(trace.exists, timeout_s=12)
        assert psutil.pid_exists(ranks[1])
    finally:
        training.close()
    assert not trace.exists()
