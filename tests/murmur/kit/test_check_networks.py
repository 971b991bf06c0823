"""`murmur check` times the networks of configurations."""

import io

import pytest
import torch
from rich.console import Console

from murmur.kit.check_networks import Speed, network_speeds, speeds_table


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_speeds_in_a_table() -> None:
    """500 rows in 250 ms are 2000 a second; 0.5 GFLOP in 250 ms are 0.002 TFLOP/s."""
    speed = Speed("spread", "cuda", "bf16", 500, 0.5, 250.0, 32, 0.25)
    out = io.StringIO()
    Console(file=out, width=200).print(speeds_table([speed]))
    shown = out.getvalue().splitlines()[-1].split()
    assert shown == ["spread", "cuda", "bf16", "500", "250", "2,000", "0.002", "32", "0.250"]


def test_networks_are_timed_in_each_precision() -> None:
    fp32, bf16 = network_speeds(["spread"], "cpu")
    assert (fp32.precision, bf16.precision) == ("fp32", "bf16")
    for speed in (fp32, bf16):
        # Whole unrolls for one minibatch of 1200 agent-transitions, 400 rows of 3 agents.
        assert speed.rows >= 400
        assert speed.acting_rows == 32  # 64 environments of a worker in 2 sessions
        assert 0 < speed.act_ms < speed.update_ms
        assert speed.gflop == fp32.gflop > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_there_are_three_precisions() -> None:
    speeds = list(network_speeds(["spread"], "cuda"))
    assert [s.precision for s in speeds] == ["fp32", "bf16", "fp16"]
    assert all(s.update_ms > 0 for s in speeds)
