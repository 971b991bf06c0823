"""How many processors there are, by mask and quota, and what is made of them."""

import os
from pathlib import Path

import pytest

from shared.config import ExperimentConfig, PluginConfig
from shared.cores import SYNC_CHOICE, Choice, available_cores, choose, with_threads, with_workers

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
        ("", {}, MASK),
    ],
)
def test_cores_are_those_of_mask_and_quota(
    tmp_path: Path, groups: str, files: dict[str, str], cores: float
) -> None:
    assert available_cores(machine(tmp_path, groups, files)) == cores


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
    assert choose(config(), cores) == Choice(workers, threads)
    assert choose(config(), cores, alone=True).num_workers == alone


def test_sync_takes_nothing_from_the_machine() -> None:
    sync = config(learner={"pipeline": "sync"})
    assert {choose(sync, cores) for cores in (0.5, 1, 2, 64)} == {SYNC_CHOICE}
    chosen = with_threads(sync)
    assert (chosen.env_server.num_workers, chosen.learner.num_threads) == (1, 1)


def test_what_is_configured_stays_as_it_is() -> None:
    given = config(env_server={"num_workers": 3}, learner={"num_threads": 2})
    assert with_workers(with_threads(given)) == given
    auto = config(env_server={"num_workers": "auto"}, learner={"num_threads": "auto"})
    assert auto == config()
    chosen = with_workers(with_threads(auto))
    assert chosen.env_server.num_workers >= 1
    assert chosen.learner.num_threads >= 1
    assert auto.environment == PluginConfig(name="spread")
