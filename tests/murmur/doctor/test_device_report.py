"""What the doctor says about the device, from a run's log and from a metrics port."""

import json
from pathlib import Path

from murmur.doctor.device_report import device_lines, gpu_figures, run_busy_text
from murmur.runs.run_folder import RunFolder
from murmur.runs.snapshots import Snapshot, _snapshot, from_run
from tests.learner_service.telemetry.test_gpu import Driver

GPU = {
    "utilization_ratio": 0.2,
    "clock_hertz_sm": 1.62e9,
    "clock_max_hertz_sm": 1.98e9,
    "clock_hertz_memory": 3.2e9,
    "throttled_power_cap": 0.0,
    "throttled_software_thermal": 1.0,
    "power_watts": 340.5,
    "power_limit_watts": 700.0,
    "memory_used_bytes": 30 * 2.0**30,
    "memory_total_bytes": 140 * 2.0**30,
    "temperature_celsius": 85.0,
}
ABOUT = {"name": "NVIDIA H200", "driver": "570.1", "cuda": "12.6", "precision": "bf16"}


def snapshot(at: float, device: dict[str, float], about: dict[str, str] | None = None) -> Snapshot:
    return Snapshot(at, 0, 0, 0.0, {}, device=device, about=about or {})


def test_figures_of_a_gpu_in_lines() -> None:
    lines = device_lines(snapshot(0, {}), snapshot(10, GPU, ABOUT), busy=0.9)
    assert lines == [
        "NVIDIA H200, driver 570.1, CUDA 12.6, bf16",
        "NVML: kernels run 20 % of the time, sm clock 1620 of 1980 MHz, memory clock 3200 MHz, "
        "340 of 700 W, 30.0 of 140.0 GiB, 85 °C",
        "the device waits for launches: kernels run 20 % of the time by NVML, while work is under "
        "way 90 % by CUDA events; CUDA graphs (learner.cuda_graph), larger batches",
        "clocks are kept down by software_thermal",
    ]
    assert len(device_lines(snapshot(0, {}), snapshot(10, GPU), busy=0.25)) == 2  # it only idles


def test_counts_are_between_the_snapshots() -> None:
    """In 10 s: 20 MB in, 5 MB out, 400 replays, 100 eager calls."""
    before = {"copied_to_device_bytes": 1e6, "copied_to_host_bytes": 0.0, "graph_replays": 100.0}
    after = {
        "copied_to_device_bytes": 21e6,
        "copied_to_host_bytes": 5e6,
        "graph_replays": 500.0,
        "eager_calls": 100.0,
        "graph_fallbacks": 1.0,
    }
    assert device_lines(snapshot(0, before), snapshot(10, after), busy=0.1) == [
        "1 CUDA graphs could not be captured, their calls run eagerly; the log of the learner says "
        "why",
        "copied 2 MB/s to the device, 0.5 MB/s to the host",
        "40 replays of CUDA graphs and 10 eager calls a second",
    ]


def test_nothing_is_said_of_a_run_of_before() -> None:
    assert device_lines(snapshot(0, {}), snapshot(10, {}), busy=0.5) == []


def test_a_metrics_port_and_a_log_give_the_same_figures(tmp_path: Path) -> None:
    served = [
        ("rows_received_total", {}, 1.0),
        ("state_seconds_total", {"thread": "inference", "state": "act"}, 1.0),
        ("device_info", ABOUT, 1.0),
        ("device_memory_bytes", {}, 7.0),
        ("device_copied_bytes_total", {"direction": "to_device"}, 5.0),
        ("graph_replays_total", {"graph": "update"}, 3.0),
        ("graph_replays_total", {"graph": "act"}, 4.0),
        ("gpu_utilization_ratio", {}, 0.5),
        ("gpu_clock_hertz", {"clock": "sm", "instance": "learner:9101"}, 2e9),
        ("gpu_throttled", {"reason": "power_cap"}, 1.0),
    ]
    from_port = _snapshot(0.0, [(f"murmur_learner_{n}", k, v) for n, k, v in served], "here")
    figures = {
        "memory_bytes": 7.0,
        "copied_to_device_bytes": 5.0,
        "graph_replays": 7.0,
        "utilization_ratio": 0.5,
        "clock_hertz_sm": 2e9,
        "throttled_power_cap": 1.0,
    }
    assert (from_port.device, from_port.about) == (figures, ABOUT)
    run = RunFolder(tmp_path)
    lines = [
        {
            **{"kind": "progress", "time": float(t), "env_steps": 1, "agent_steps": 1},
            **{"rows_received": t, "updates": t, "device_busy_s": 0.0, "machine_busy": 0.1},
            **{"environments_limit": 0, "ledger": {}, "device": figures},
        }
        for t in (1, 40)
    ]
    run.progress_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "command.json").write_text(json.dumps({"device": ABOUT}))
    from_log = from_run(run, None)[1]
    assert (from_log.device, from_log.about) == (figures, ABOUT)


def test_both_clocks_of_a_run_over_its_processes() -> None:
    """10 s busy for 4.9, then another process, 20 s later, busy for 6.1 of 10: 11 of 20."""
    gpu = {"device": {"utilization_ratio": 0.25}}
    records = [
        {"time": 0.0, "device_busy_s": 2.0, **gpu},
        {"time": 10.0, "device_busy_s": 6.9, **gpu},
        {"time": 30.0, "device_busy_s": 0.0, "device": {"utilization_ratio": 0.5}},
        {"time": 40.0, "device_busy_s": 6.1},
    ]
    words = "works 55 % of the time by CUDA events, 33 % by NVML"
    assert run_busy_text(records) == words
    assert run_busy_text([{**record, "device": {}} for record in records]) == ""


def test_what_a_driver_answers_reaches_terminal_and_page(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    answered, none = driver.recent(), driver.recent(INIT="9")
    driver.close()
    assert gpu_figures(answered) == {"GPU (NVML)": "87 %", "GPU memory": "0.0 of 0.0 GiB"}
    assert gpu_figures(none) == {}


def test_memory_of_a_gpu_that_nvml_does_not_know() -> None:
    device = {"memory_bytes": 3 * 2.0**30, "memory_peak_bytes": 4 * 2.0**30}
    assert gpu_figures(device) == {"GPU memory": "3.0 GiB"}
    assert gpu_figures({"memory_bytes": 3 * 2.0**30}, 0.5) == {}
