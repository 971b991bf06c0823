"""The device of a run, as text and in command.json."""

import json
import os
from pathlib import Path

import pytest
import torch

from murmur.learner_service.telemetry.device_info import describe_device, device_text, keep_device

CPU = torch.device("cpu")
H200 = {
    "name": "NVIDIA H200",
    "type": "cuda",
    "driver": "570.1",
    "driver_cuda": "12.8",
    "cuda": "12.6",
    "memory": "139.8 GiB",
    "torch": "2.13.0+cu126",
    "precision": "bf16",
}


def test_the_cpu_is_described_without_a_driver() -> None:
    about = describe_device(CPU, "fp32", None)
    assert about["type"] == "cpu"
    assert about["name"]
    assert about["driver"] == about["cuda"] == about["memory"] == ""
    assert device_text(about) == f"{about['name']} (cpu), torch {torch.__version__}, fp32"


def test_a_gpu_with_a_message() -> None:
    assert device_text(H200) == (
        "NVIDIA H200 (cuda), driver 570.1, CUDA 12.6, 139.8 GiB, torch 2.13.0+cu126, bf16"
    )


def test_the_device_is_added_to_command_json(tmp_path: Path) -> None:
    file = tmp_path / "command.json"
    file.write_text('{"pid": 17}')
    os.utime(file, (1e9, 1e9))
    keep_device(tmp_path, H200)
    assert json.loads(file.read_text()) == {"pid": 17, "device": H200}
    assert file.stat().st_mtime == 1e9  # whether process 17 is alive is decided by it


def test_a_learner_without_murmur_train_writes_the_file(tmp_path: Path) -> None:
    keep_device(tmp_path, H200)
    keep_device(tmp_path, {**H200, "precision": "fp16"})
    about = json.loads((tmp_path / "command.json").read_text())
    assert about["device"]["precision"] == "fp16"


def test_a_folder_that_is_gone_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_device(tmp_path / "gone", H200)
    assert "the device is not noted: cannot write" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_is_described() -> None:
    about = describe_device(torch.device("cuda"), "bf16", None)
    assert about["name"] == torch.cuda.get_device_name()
    assert about["cuda"] == torch.version.cuda
    assert about["memory"].endswith(" GiB")
