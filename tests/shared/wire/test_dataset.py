"""Datasets: what was written comes back to the bit, and damaged files are refused by name."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import (
    HEADER,
    OBSERVATION,
    Dataset,
    DatasetWriter,
    array_layout,
)
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_MASK,
    STATE,
    ActionSpec,
    ArraySpec,
    Composite,
    Continuous,
    Discrete,
    EnvSpec,
)
from murmur.shared.wire.timestep import Array, StepType

KEY = "algorithm.replay.dataset"
ACTIONS: dict[str, ActionSpec] = {
    "discrete": Discrete(5),
    "continuous": Continuous(3, -2.0, 2.0),
    "choices": Composite((2, 4)),
    "hybrid": Composite((2, 3), (-1.0, -np.inf), (1.0, np.inf)),
}


def spec_of(action: ActionSpec) -> EnvSpec:
    num_alternatives = {"Discrete": 5, "Composite": sum(getattr(action, "factors", ()))}
    masks = num_alternatives.get(type(action).__name__, 0)
    arrays = [
        ArraySpec("image/\N{GREEK SMALL LETTER ALPHA}.npy", "uint8", (1, 4, 3)),
        ArraySpec("count", "int32", ()),
        ArraySpec("half", "float16", (2,)),
        ArraySpec("view", "float32", (7,)),
        ArraySpec(AGENT_MASK, "uint8", ()),
        ArraySpec(STATE, "float32", (2, 2), per_agent=False),
    ]
    if masks:
        arrays.append(ArraySpec(ACTION_MASK, "uint8", (masks,)))
    return EnvSpec("toy", 2, tuple(arrays), action, agents=("left", "right"))


def episode(spec: EnvSpec, steps: int, *, terminated: bool, seed: int = 0) -> dict[str, Array]:
    """Return an episode of random numbers; agent 1 is gone in its second half."""
    random = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, (dtype, shape) in array_layout(spec).items():
        arrays[name] = random.normal(scale=50, size=(steps + 1, *shape)).astype(dtype)
    kinds = np.full(steps + 1, int(StepType.MID), np.uint8)
    kinds[0], kinds[-1] = int(StepType.FIRST), int(StepType.LAST)
    arrays["step_type"], arrays["discount"] = kinds, np.ones(steps + 1, np.float32)
    arrays["discount"][-1] = 0 if terminated else 1
    arrays["reward"][0] = 0
    action = np.zeros_like(arrays["action"])
    if isinstance(spec.action, Discrete):
        action[:-1] = random.integers(spec.action.num_actions, size=action[:-1].shape)
    elif isinstance(spec.action, Continuous):
        action[:-1] = random.uniform(-2, 2, action[:-1].shape)
    else:
        action[..., 1] = 1
        action[:-1, :, 2:] = random.uniform(-1, 1, action[:-1, :, 2:].shape)
    arrays["action"] = action
    alive = np.ones((steps + 1, 2), np.uint8)
    alive[steps // 2 + 1 :, 1] = 0
    arrays[OBSERVATION + AGENT_MASK] = alive
    if (name := OBSERVATION + ACTION_MASK) in arrays:
        arrays[name] = np.ones_like(arrays[name])
        arrays[name][..., 0] = random.integers(2, size=arrays[name].shape[:-1])
    return arrays


def write(folder: Path, spec: EnvSpec, *episodes: dict[str, Array]) -> Path:
    with DatasetWriter(folder, {"baseline": "random"}, {"name": "toy"}) as writer:
        writer.begin(spec)
        for seed, arrays in enumerate(episodes):
            writer.add(arrays, 2**63 - 1 - seed)
    return folder


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_array_comes_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    spec = spec_of(ACTIONS[kind])
    written = [episode(spec, n, terminated=n % 2 == 0, seed=n) for n in (1, 4, 5)]
    dataset = Dataset(write(tmp_path / "data", spec, *written), KEY)
    assert dataset.spec == spec
    assert (dataset.num_episodes, dataset.num_transitions) == (3, 10)
    assert dataset.source == {"baseline": "random"}
    (read,) = dataset.parts()
    assert read.length.tolist() == [2, 5, 6]
    assert read.seed.tolist() == [2**63 - 1, 2**63 - 2, 2**63 - 3]
    for name in array_layout(spec):
        whole = np.concatenate([arrays[name] for arrays in written])
        assert read.arrays[name].dtype == whole.dtype
        assert read.arrays[name].tobytes() == whole.tobytes(), name
    assert read.arrays["discount"][[1, 6, 12]].tolist() == [1, 0, 1]  # terminated: the second
    second = read.chosen(np.array([False, True, False]))
    assert second.arrays["reward"].tobytes() == written[1]["reward"].tobytes()


def test_numpy_alone_reads_a_file(tmp_path: Path) -> None:
    spec = spec_of(Discrete(5))
    arrays = episode(spec, 3, terminated=True)
    folder = write(tmp_path / "data", spec, arrays)
    with np.load(folder / "episodes-00000.npz", allow_pickle=False) as file:
        assert (file["action"] == arrays["action"]).all()
        assert file["episode_rows"].tolist() == [4]


def test_a_session_that_is_played_again_is_kept_once(tmp_path: Path) -> None:
    spec = spec_of(Discrete(5))
    with DatasetWriter(tmp_path / "data", {}, {}) as writer:
        writer.begin(spec)
        writer.add(episode(spec, 2, terminated=True), 1)
        writer.keep()
        writer.begin(spec)
        writer.add(episode(spec, 3, terminated=True), 2)
        writer._write_file()  # as of one that is large
        writer.begin(spec)
        writer.add(episode(spec, 4, terminated=True), 3)
    dataset = Dataset(tmp_path / "data", KEY)
    assert [part.seed.tolist() for part in dataset.parts()] == [[1], [3]]
    assert sorted(path.name for path in dataset.folder.iterdir()) == [
        HEADER,
        "episodes-00000.npz",
        "episodes-00001.npz",
    ]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    spec = spec_of(Discrete(5))
    arrays = episode(spec, 2, terminated=True)
    arrays["reward"][1, 1] = np.nan
    with pytest.raises(ConfigError, match="what is recorded has nan in reward of agent 'right'"):
        write(tmp_path / "data", spec, arrays)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "data", spec, episode(spec, 2, terminated=True))
    with pytest.raises(ConfigError, match="exists; name another folder"):
        write(tmp_path / "data", spec)


# ---------------------------------------------------------------- what is refused


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the header of a dataset."""

    def damage(folder: Path) -> None:
        data = json.loads((folder / HEADER).read_text())
        change(data)
        (folder / HEADER).write_text(json.dumps(data))

    return damage


def content(change: Callable[[bytes], bytes], *, known: bool = True) -> Callable[[Path], None]:
    """Return a function that changes the file, and if `known` its entry in the header too."""

    def damage(folder: Path) -> None:
        file = folder / "episodes-00000.npz"
        raw = change(file.read_bytes())
        file.write_bytes(raw)
        if known:
            digest = hashlib.sha256(raw).hexdigest()
            header(lambda d: d["files"][0].update(bytes=len(raw), sha256=digest))(folder)

    return damage


def arrays(change: Callable[[dict[str, Array]], Any], **how: Any) -> Callable[[Path], None]:
    """Return a function that changes the arrays of the file, with a digest that fits."""

    def changed(raw: bytes) -> bytes:
        with np.load(io.BytesIO(raw), allow_pickle=True) as file:
            data = {name: file[name] for name in file.files}
        change(data)
        out = io.BytesIO()
        (np.savez_compressed if how.get("compressed") else np.savez)(out, **data)  # type: ignore[operator]
        return out.getvalue()

    return content(changed)


def forged(raw: bytes) -> bytes:
    """Return a file in which an array's header names a shape far larger than the file."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename == "reward.npy":
                data = data.replace(b"(6, 2)", b"(6, 2000000000)").replace(b" " * 9, b"", 1)
            new.writestr(info.filename, data)
    return out.getvalue()


def put(name: str, value: Any, *index: Any) -> Callable[[dict[str, Array]], None]:
    return lambda data: data[name].__setitem__(index or slice(None), value)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no header": (lambda f: (f / HEADER).unlink(), "it has no dataset.json"),
    "half a header": (
        lambda f: (f / HEADER).write_text((f / HEADER).read_text()[:200]),  # type: ignore[dict-item, return-value]
        "dataset.json is damaged",
    ),
    "a list": (lambda f: (f / HEADER).write_text("[]"), "is of another format"),  # type: ignore[dict-item, return-value]
    "newer": (header(lambda d: d.update(version=2)), "it is of version 2 of the format"),
    "a path": (
        header(lambda d: d["files"][0].update(name="../x.npz")),
        "damaged at 'files.0.name'",
    ),
    "text for a count": (header(lambda d: d.update(episodes="2")), "damaged at 'episodes'"),
    "other counts": (header(lambda d: d.update(transitions=7)), "is not consistent: 7 transitions"),
    "no episodes": (
        header(lambda d: d.update(files=[], episodes=0, transitions=0)),
        "it has no episodes",
    ),
    "a file too many": (
        lambda f: (f / "episodes-00001.npz").write_bytes(b"x"),  # type: ignore[dict-item, return-value]
        "episodes-00001.npz is not in dataset.json",
    ),
    "a file twice": (
        header(lambda d: d.update(files=d["files"] * 2, episodes=4, transitions=8)),
        "episodes-00000.npz is not in dataset.json, or twice",
    ),
    "a spec without agents": (
        header(lambda d: d["spec"].update(num_agents=0)),
        "has no valid spec",
    ),
    "no spec": (header(lambda d: d.update(spec={"x": 1})), "has no valid spec"),
    "a file missing": (
        lambda f: (f / "episodes-00000.npz").unlink(),
        "episodes-00000.npz cannot be read: No such file",
    ),
    "cut": (content(lambda raw: raw[:-100], known=False), "bytes, dataset.json says .*: it is cut"),
    "a bit": (
        content(lambda raw: raw[:300] + bytes([raw[300] ^ 1]) + raw[301:], known=False),
        "is damaged: its digest differs",
    ),
    "no archive": (content(lambda raw: b"x" * 99), "is damaged: File is not a zip file"),
    "a missing array": (arrays(lambda d: d.pop("reward")), "array 'reward' is missing"),
    "one more array": (
        arrays(lambda d: d.update(more=np.zeros(3))),
        "array 'more' is missing or not in the spec",
    ),
    "another dtype": (
        arrays(lambda d: d.update(reward=d["reward"].astype(np.float64))),
        "array 'reward' is float64",
    ),
    "pickle": (
        arrays(lambda d: d.update(reward=np.array([{}] * 12).reshape(6, 2))),
        "array 'reward' is object",
    ),
    "fewer rows": (arrays(lambda d: d.update(reward=d["reward"][:-1])), r"is float32 \(5, 2\)"),
    "a forged shape": (content(forged), r"array 'reward' is float32 \(6, 2000000000\)"),
    "compressed": (arrays(lambda d: None, compressed=True), "is compressed"),
    "episodes that do not add up": (
        arrays(put("episode_rows", 4, 0)),
        "its episodes have 7 rows, the header says 6",
    ),
    "an episode without end": (
        arrays(put("step_type", 1, 2)),
        "step_type 1, where LAST must be, in step 2 of the episode with seed 9223372036854775807",
    ),
    "infinity": (
        arrays(put(OBSERVATION + "view", np.inf, 1, 1, 4)),
        "inf in observation 'view' of agent 'right' at index .4. in step 1",
    ),
    "an action beyond": (
        arrays(put("action", 5, 1, 0)),
        r"action 5 of agent 'left', outside \[0, 4\], in step 1",
    ),
    "a reward on FIRST": (arrays(put("reward", 1, 3, 0)), "on FIRST, .* in step 0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_datasets_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    spec = spec_of(Discrete(5))
    folder = write(
        tmp_path / "data",
        spec,
        episode(spec, 2, terminated=True),
        episode(spec, 2, terminated=False, seed=1),
    )
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(ConfigError, match=f"{KEY}={folder}.*{message}"):
        list(Dataset(folder, KEY).parts())


def test_datasets_of_other_environments_are_refused(tmp_path: Path) -> None:
    spec = spec_of(Discrete(5))
    dataset = Dataset(write(tmp_path / "data", spec, episode(spec, 2, terminated=True)), KEY)
    dataset.require_spec(replace(spec, name="other", metrics=("x",), max_episode_steps=3))
    dataset.require_spec(replace(spec, agents=()))
    wider = (replace(spec.observations[3], shape=(8,)), *spec.observations[:3])
    for other, message in (
        (replace(spec, agents=("right", "left")), "agents: right, left here, left, right there"),
        (replace(spec, observations=wider), "name: view here, image"),
        (replace(spec, observations=spec.observations[:-1], action=Discrete(4)), "observations: "),
    ):
        with pytest.raises(ConfigError, match=f"{KEY}=.*'toy', this run is in 'toy': .*{message}"):
            dataset.require_spec(other)
