"""How many processors there are, by mask and quota, and what is made of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from murmur.shared.config.cores import available_cores, choose
from murmur.shared.config.experiment import ExperimentConfig
from murmur.sweeps.capacity import LEARNER_GIB, PROCESS_GIB

WORKERS, THREADS = "env_server.num_workers", "learner.num_threads"
MASK = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root folder with a control group of this process, and the groups' files."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, MASK),
        # The group above is narrower.
        (
            "0::/pod/container\n",
            {
                "sys/fs/cgroup/pod/cpu.max": "25000 100000\n",
                "sys/fs/cgroup/pod/container/cpu.max": "75000 100000\n",
            },
            0.25,
        ),
        # The path is the host's: in the container the mount is the group.
        ("0::/docker/1f\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            "5:memory:/a\n4:cpu,cpuacct:/a\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "30000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            0.3,
        ),
        (
            "4:cpu,cpuacct:/a\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            MASK,
        ),
        # Version 2 beside version 1, as systemd mounts it.
        (
            "3:cpu:/\n0::/user.slice\n",
            {
                "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
                "41 31 0:38 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/unified/user.slice/cpu.max": "60000 100000\n",
            },
            0.6,
        ),
        # In a container, a group below the one that is mounted.
        (
            "0::/docker/1f/train\n",
            {
                "proc/self/mountinfo": "41 31 0:38 /docker/1f /sys/fs/cgroup ro - cgroup2 c rw\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
                "sys/fs/cgroup/train/cpu.max": "70000 100000\n",
            },
            0.7,
        ),
        (
            "4:cpu,cpuacct:/docker/1f/a b\n",
            {
                "proc/self/mountinfo": "36 25 0:31 /docker/1f /cg/my\\040cpu rw - cgroup c "
                "rw,cpu,cpuacct\n37 25 0:32 / /cg/set rw - cgroup c rw,cpuset\n",
                "cg/my cpu/a b/cpu.cfs_quota_us": "40000\n",
                "cg/my cpu/a b/cpu.cfs_period_us": "100000\n",
                "cg/my cpu/cpu.cfs_quota_us": "90000\n",
                "cg/my cpu/cpu.cfs_period_us": "100000\n",
            },
            0.4,
        ),
        # A group outside what this namespace shows.
        (
            "0::/../other\n",
            {
                "proc/self/mountinfo": "41 31 0:38 /.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/cpu.max": "80000 100000\n",
            },
            0.8,
        ),
        ("", {}, MASK),
    ],
)
def test_cores_are_those_of_mask_and_quota(
    tmp_path: Path, groups: str, files: dict[str, str], cores: float
) -> None:
    assert available_cores(machine(tmp_path, groups, files)) == cores


def test_a_real_quota_of_version_1_counts(request: pytest.FixtureRequest) -> None:
    """In a group below that of this process, where this machine lets us make one."""
    group = Path("/sys/fs/cgroup/cpu") / f"murmur-test-{os.getpid()}"
    try:
        group.mkdir()
        request.addfinalizer(group.rmdir)
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    code = (
        f"import os, pathlib; pathlib.Path('{group}/cgroup.procs').write_text(str(os.getpid()))\n"
        "from murmur.shared.config.cores import available_cores; print(available_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == 0.5


def config(**sections: dict[str, object]) -> ExperimentConfig:
    """A configuration on defaults but for these keys."""
    return ExperimentConfig.model_validate({"environment": {"name": "spread"}, **sections})


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "alone"),
    [
        (0.5, 1, 1, 1),
        (1, 1, 1, 1),
        (2, 1, 1, 2),
        (4, 2, 1, 4),
        (8, 5, 2, 8),
        (16, 11, 4, 16),
        (64, 31, 8, 31),  # two sessions each: learner.max_sessions is 64, two of them for others
    ],
)
def test_workers_have_what_the_learner_leaves(
    cores: float, workers: int, threads: int, alone: int
) -> None:
    chosen = {WORKERS: workers, THREADS: threads}
    assert choose(config(), cores) == chosen
    assert choose(config(), cores, alone=True)[WORKERS] == alone


@pytest.mark.parametrize(
    ("cores", "learners", "threads"), [(2, 1, 2), (4, 1, 3), (8, 2, 3), (64, 1, 8)]
)
def test_offline_learners_have_the_processors_of_workers(
    cores: float, learners: int, threads: int
) -> None:
    offline = config(run={"offline": True}, imitation={"dataset": "data"})
    chosen = {WORKERS: learners, THREADS: threads}
    assert choose(offline, cores, learners=learners) == chosen


def test_sizes_of_the_deployment_page_are_what_is_chosen() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    section = page.partition("## How large")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) GiB \|$", section, re.MULTILINE)
    assert len(rows) == 4
    for cores, beside, alone, memory in rows:
        workers = choose(config(), float(cores))[WORKERS]
        envs = config().env_server.envs_per_worker
        assert (int(beside), int(alone)) == (
            workers * envs,
            choose(config(), float(cores), alone=True)[WORKERS] * envs,
        )
        assert float(memory) == pytest.approx(LEARNER_GIB + workers * PROCESS_GIB, rel=0.06)


def test_sync_takes_nothing_from_the_machine() -> None:
    sync = config(learner={"pipeline": "sync"})
    for cores in (0.5, 1, 2, 64):
        assert choose(sync, cores) == {WORKERS: 1, THREADS: 1}
    assert choose(sync, 2, learners=3) == {WORKERS: 3, THREADS: 1}


def test_what_is_configured_stays_as_it_is() -> None:
    given = config(env_server={"num_workers": 3}, learner={"num_threads": 2})
    assert choose(given, 2) == {}
    assert choose(config(learner={"num_threads": 2}), 2).keys() == {WORKERS}
    auto = config(env_server={"num_workers": "auto"}, learner={"num_threads": "auto"})
    assert auto == config()
    chosen = auto.changed(choose(auto, available_cores()))
    assert chosen.env_server.num_workers >= 1
    assert chosen.learner.num_threads >= 1
    assert auto.environment.name == "spread"
