"""`precision: auto` on CUDA: the fastest of timed updates, measured once."""

import json
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.device.device import select_device
from murmur.learner_service.ranks.group import ALONE
from murmur.learner_service.tuning import resolve
from murmur.learner_service.tuning.probe import (
    Probe,
    _median_seconds,
    update_seconds,
)
from murmur.learner_service.tuning.resolve import fastest, with_precision
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.running import experiment
from tests.learner_service.toys import CPU, vector_spec
from tests.pretend_cuda import Kind, pretend_cuda
from tests.supply.toy_source import ToySource

GPU, SPEC = torch.device("cuda"), vector_spec()


class Timed:
    """Seconds by precision, and what they were asked for."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked = seconds, list[ExperimentConfig]()

    def __call__(self, config: ExperimentConfig, spec: EnvSpec) -> float:
        self.asked.append(config)
        return self.seconds[config.learner.precision]


@pytest.mark.parametrize(
    ("bf16", "chosen"), [(0.5, "bf16"), (0.96, "fp32"), (2.0, "fp32"), (float("inf"), "fp32")]
)
def test_16_bits_must_be_faster_by_5_percent(bf16: float, chosen: str) -> None:
    assert fastest({"fp32": 1.0, "bf16": bf16}) == chosen


def test_the_fastest_precision_is_measured_once_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = experiment(learner={"device": "cuda"}, algorithm={"data_passes": 3, "batch_size": 0})
    measure = Timed(fp32=1.0, bf16=0.5)
    monkeypatch.setattr(resolve, "update_seconds", measure)
    with pretend_cuda():
        first = with_precision(config, ALONE, SPEC, tmp_path, GPU)
        again = with_precision(config, ALONE, SPEC, tmp_path, GPU)
        assert [c.learner.precision for c in measure.asked] == ["fp32", "bf16"]
        larger = experiment(learner={"device": "cuda"}, network={"hidden": [16]})
        with_precision(larger, ALONE, SPEC, tmp_path, GPU)
    assert first.learner.precision == again.learner.precision == "bf16"
    assert first.algorithm == config.algorithm
    assert len(measure.asked) == 4
    tried = measure.asked[0].algorithm.options
    assert tried["data_passes"] == 1
    assert tried["batch_size"] > 0
    assert json.loads((tmp_path / "precision.json").read_text())["precision"] == "bf16"


def test_a_probe_learns_from_augmented_batches() -> None:
    spec = EnvSpec("p", 1, (ArraySpec("image", "uint8", (1, 8, 8)),), Discrete(2))
    options = {"network": {"name": "cnn", "channels": [4], "kernels": [3], "strides": [1]}}
    config = experiment(**options, augment={"preset": "random-shift"})
    assert Probe(config, spec).algorithm.transforms.draws
    assert not Probe(experiment(**options), spec).algorithm.transforms.draws


@pytest.mark.parametrize(
    ("device", "learner"),
    [
        (CPU, {}),
        (GPU, {"pipeline": "sync"}),
        (GPU, {"precision": "fp16"}),
    ],
)
def test_nothing_is_measured_on_a_cpu_in_sync_or_if_it_is_set(
    tmp_path: Path, device: torch.device, learner: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, measure = experiment(learner=learner), Timed()
    monkeypatch.setattr(resolve, "update_seconds", measure)
    assert with_precision(config, ALONE, SPEC, tmp_path, device) is config
    assert not measure.asked


@pytest.mark.parametrize(
    ("eager", "expected"),
    [(range(4), 0.0), (range(2, 9), 0.0), (range(99), 0.02)],
    ids=["at the start", "late", "always"],
)
def test_only_replayed_updates_are_timed(eager: range, expected: float) -> None:
    graphs, done = Graphs(torch.device("cuda")), count()

    def update() -> None:
        if next(done) in eager:
            graphs.eager_calls["step"] += 1
            time.sleep(0.02)

    found = _median_seconds(update, lambda: None, 5, graphs)
    assert found == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_is_timed_in_the_precision(precision: str) -> None:
    assert 0 < update_seconds(experiment(learner={"precision": precision}), SPEC, repeats=2) < 60


def test_the_choice_is_timed_on_the_device(tmp_path: Path) -> None:
    replay = {"capacity_rows": 400, "start_rows": 24, "batch_size": 16, "update_interval": 12}
    config = experiment(learner={"device": "cuda"})
    algorithm = PluginConfig(name="qmix", replay={**replay, "unroll_steps": 4})
    config = config.model_copy(update={"algorithm": algorithm})
    with pretend_cuda() as cuda:
        chosen = with_precision(config, ALONE, SPEC, tmp_path, torch.device("cuda", 0))
    assert chosen.learner.precision in ("fp32", "bf16")
    assert not [fault for fault in cuda.report.faults if fault.kind is not Kind.SYNC]


def test_a_run_times_updates_with_their_gradients(tmp_path: Path) -> None:
    config = experiment(learner={"device": "cuda"})
    with pretend_cuda():
        device = torch.device("cuda", 0)
        chosen = with_precision(config, ALONE, SPEC, tmp_path, device)
    assert chosen.learner.precision in ("fp32", "bf16")


def test_the_choice_is_timed_on_samples(tmp_path: Path) -> None:
    config = validate(
        ExperimentConfig,
        {
            "source": {"name": "faces"},
            "algorithm": {"name": "segmentation", "batch_size": 2},
            "network": {"name": "unet", "channels": [8, 8], "groups": 4},
            "augment": {"preset": "minimal"},
            "learner": {"device": "cuda"},
        },
    )
    with pretend_cuda() as cuda:
        device = torch.device("cuda", 0)
        spec = ToySource().spec
        chosen = with_precision(config, ALONE, spec, tmp_path, device)
    assert chosen.learner.precision in ("fp32", "bf16")
    assert json.loads((tmp_path / "precision.json").read_text())["found_for"]["augment"]
    assert not [fault for fault in cuda.report.faults if fault.kind is not Kind.SYNC]


def test_a_sync_run_on_cuda_asks_for_deterministic_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    asked: list[bool] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append(on)
    )
    for flag in ("benchmark", "deterministic"):
        monkeypatch.setattr(torch.backends.cudnn, flag, False)
    with pretend_cuda():
        select_device(experiment(learner={"device": "cuda", "cuda_graph": False}).learner)
        assert not torch.backends.cudnn.benchmark  # acting batches have any size
        select_device(experiment(learner={"device": "cuda"}).learner)
        assert torch.backends.cudnn.benchmark
        assert not asked
        select_device(experiment(learner={"device": "cuda", "pipeline": "sync"}).learner)
    assert asked == [True]
    torch.set_float32_matmul_precision("highest")
