"""Checkpoints: whole or not at all, rotated, and refused with a message."""

import resource
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from murmur.learner_service.checkpoint.contents import check_spec, saved_spec, spec_text
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.shared.process.errors import CheckpointError
from murmur.shared.wire.spec import EXPERT_ACTION, ArraySpec
from tests.learner_service.toys import make_coma, parameters, random_batch, vector_spec


def state(n: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(n)), "n": n}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    path = folder.save(state(7), 7)
    assert path.name == "update-000007.pt"
    loaded = folder.load(path)
    assert loaded["n"] == 7
    assert torch.equal(loaded["weights"], torch.full((1000,), 7.0))
    assert [p.name for p in path.parent.iterdir()] == ["update-000007.pt"]  # nothing beside it


def test_the_oldest_beyond_the_limit_are_deleted_and_best_stays(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.save_best(state(1))
    for n in (2, 10, 9, 999_999, 1_000_000):  # by number, not by name
        folder.save(state(n), n)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "best.pt",
        "update-1000000.pt",
        "update-999999.pt",
    ]
    assert folder.load(folder.find("latest"))["n"] == 1_000_000
    assert folder.load(folder.find("best"))["n"] == 1


def test_find_names_what_is_missing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        folder.find("latest")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint 'nowhere\.pt'; give best, latest or a file"
    ):
        folder.find("nowhere.pt")
    with pytest.raises(CheckpointError, match="start without --resume"):
        folder.load_latest()
    folder.save(state(3), 3)
    assert folder.find("best").name == "update-000003.pt"  # no evaluation yet


@pytest.mark.parametrize("damage", ["torn", "empty", "foreign", "code", "a flipped bit"])
def test_damaged_file_is_refused_with_the_reason_and_skipped(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    good = folder.save(state(1), 1)
    bad = folder.save(state(2), 2)
    if damage == "torn":
        bad.write_bytes(bad.read_bytes()[:-500])
    elif damage == "empty":
        bad.write_bytes(b"")
    elif damage == "foreign":
        torch.save({"format": 0}, bad)
    elif damage == "a flipped bit":
        data = bytearray(bad.read_bytes())
        at = data.index(torch.full((100,), 2.0).numpy().tobytes())
        data[at + 2] ^= 1  # of a weight: torch alone would read it
        bad.write_bytes(data)
        assert torch.load(bad, weights_only=True)["weights"][0] != 2
    else:
        torch.save({"format": 1, "x": Path("made by pickle")}, bad)
    with pytest.raises(CheckpointError, match=r"update-000002\.pt") as refused:
        folder.load(bad)
    assert "\n" not in str(refused.value)
    assert ("has format 0" in str(refused.value)) == (damage == "foreign")
    path, loaded = folder.load_latest()
    assert path == good
    assert loaded["n"] == 1
    assert "the run continues from update-000001.pt" in caplog.text
    # Out of the way: with keep=1 it would be kept in place of the next one.
    assert folder.find("latest") == good
    assert CheckpointFolder(tmp_path, keep=1).save(state(1), 1).is_file()
    assert bad.with_suffix(".refused").is_file()


@pytest.mark.parametrize("part", ["actor", "actor_optimizer"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_checkpoint_that_holds_nan_is_named_and_passed_over(
    tmp_path: Path, part: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    spec = vector_spec()
    coma = make_coma(spec)
    coma.update(random_batch(spec, 5, 2))
    folder = CheckpointFolder(tmp_path, keep=3)
    good = folder.save({"algorithm": coma.state_dict()}, 1)
    saved = coma.state_dict()["parts"][part]
    tensor = next(iter(saved.values())) if part == "actor" else saved["state"][0]["exp_avg_sq"]
    tensor.flatten()[3] = value
    bad = folder.save({"algorithm": coma.state_dict()}, 2)
    with pytest.raises(CheckpointError, match=rf"{bad.name}: {part}\.\S+ holds {value}, so that"):
        folder.load(bad)
    assert folder.load_latest()[0] == good
    assert "the run continues from update-000001.pt" in caplog.text
    assert bad.with_suffix(".refused").is_file()


@pytest.mark.parametrize("kind", ["compressed", "overlapping", "no archive"])
def test_a_checkpoint_that_expands_is_refused_unread(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    path = folder.save(state(1), 1)
    if kind == "no archive":  # torch's old format asks for what it announces
        torch.save({"format": 1}, path, _use_new_zipfile_serialization=False)
    else:
        how = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", how) as archive:
            for i in range(4):
                archive.writestr(f"archive/data/{i}", bytes(4 << 20))
                if kind == "overlapping":
                    archive.filelist *= 8  # the directory names each of them eight times
        assert kind == "overlapping" or path.stat().st_size < 1 << 16

    def read(*_: object, **__: object) -> None:
        pytest.fail("it was read")

    monkeypatch.setattr(torch, "load", read)
    with pytest.raises(CheckpointError, match=r"it would expand from|it is no checkpoint"):
        folder.load(path)


class Chunked:
    """A storage with one chunk."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def chunks(self) -> dict[int, Any]:
        return {0: lambda: {"rows": torch.full((500,), self.value)}}


@pytest.mark.parametrize("damage", ["torn", "missing", "a flipped bit"])
def test_a_checkpoint_whose_replay_is_damaged_is_passed_over(tmp_path: Path, damage: str) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    good = folder.save(state(1), 1, Chunked(1.0))  # type: ignore[arg-type]
    bad = folder.save(state(2), 2, Chunked(2.0))  # type: ignore[arg-type]
    (chunk,) = bad.parent.glob("replay-*-000002.pt")
    data = bytearray(chunk.read_bytes())
    if damage == "torn":
        chunk.write_bytes(data[:-300])
    elif damage == "missing":
        chunk.unlink()
    else:
        data[len(data) // 2] ^= 4
        chunk.write_bytes(data)
    folder = CheckpointFolder(tmp_path, keep=3)
    assert folder.load_latest()[0] == good


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    folder.save(state(1), 1)
    left = tmp_path / "checkpoints" / "update-000002.tmp"
    left.write_bytes(b"half")
    assert folder.load_latest()[1]["n"] == 1
    folder.save(state(3), 3)
    assert not left.exists()


def test_the_best_is_written_while_the_next_one_is(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    failed: list[CheckpointError] = []

    def write_best() -> None:
        try:
            for n in range(200):
                folder.save_best(state(n))
        except CheckpointError as error:
            failed.append(error)

    thread = threading.Thread(target=write_best)
    thread.start()
    n = 0
    while thread.is_alive():
        folder.save(state(n := n + 1), n)
    assert not failed
    assert folder.load(tmp_path / "checkpoints/best.pt")["n"] == 199
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_if_all_are_torn_the_newest_ones_reason_is_given(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for n in (1, 2):
        folder.save(state(n), n).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"update-000002\.pt"):
        folder.load_latest()


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.shared.process.errors import CheckpointError
folder = CheckpointFolder(Path(sys.argv[1]), keep=1)
folder.save_best({"n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # as a full disk
try:
    folder.save_best({"weights": torch.zeros(100_000)})
except CheckpointError as error:
    print(error)
    sys.exit(2)
"""


def test_failed_write_keeps_the_old_file_and_logs_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("cannot write checkpoint")
    assert "earlier checkpoints are untouched" in lines[0]
    folder = CheckpointFolder(tmp_path, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["best.pt"]
    assert folder.load(folder.find("best"))["n"] == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20_000


def test_a_folder_that_cannot_be_made_is_an_error_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        CheckpointFolder(tmp_path, keep=1).save(state(1), 1)


def test_checkpoint_of_another_environment_names_the_difference(tmp_path: Path) -> None:
    two, three = vector_spec(num_agents=2), vector_spec(num_agents=3)
    saved = {"spec": spec_text(two)}
    assert saved_spec(saved) == two
    check_spec(tmp_path, saved, two)
    with pytest.raises(CheckpointError, match="num_agents: 2 here, 3 there"):
        check_spec(tmp_path, saved, three)


def test_a_run_keeps_its_imitation_when_it_continues(tmp_path: Path) -> None:
    plain = vector_spec()
    expert = ArraySpec(EXPERT_ACTION, "int32", ())
    told = replace(plain, observations=(*plain.observations, expert))
    for saved, now, words in (
        (told, plain, "with imitation, this one is without"),
        (plain, told, "without imitation, this one is with"),
    ):
        with pytest.raises(CheckpointError, match=f"{words}; set imitation.baseline as it was"):
            check_spec(tmp_path, {"spec": spec_text(saved)}, now)


def test_an_algorithm_survives_the_file(tmp_path: Path) -> None:
    spec, folder = vector_spec(), CheckpointFolder(tmp_path, keep=1)
    coma, other = make_coma(spec, critic_lr=1e-2), make_coma(spec, critic_lr=1e-2, seed=50)
    coma.update(random_batch(spec, 5, 2))
    other.load_state_dict(
        folder.load(folder.save({"algorithm": coma.state_dict()}, 1))["algorithm"]
    )
    for update in (1, 2):
        coma.update(random_batch(spec, 5, 2, seed=update))
        other.update(random_batch(spec, 5, 2, seed=update))
    assert all(torch.equal(a, b) for a, b in zip(parameters(coma), parameters(other), strict=True))


@pytest.mark.parametrize("spec", [None, 5, "zz", "0aff", "08ffff", ""])
def test_a_checkpoint_of_something_else_is_refused(spec: object) -> None:
    """Found by fuzzing: it is whole and has the right format, but what it says is no spec."""
    state = {} if spec is None else {"spec": spec}
    with pytest.raises(CheckpointError, match="names no environment"):
        saved_spec(state)


@pytest.mark.parametrize("found", [torch.ones(2), "1", None, [1]])
def test_a_format_that_is_no_number_is_refused(tmp_path: Path, found: object) -> None:
    """A tensor was found by fuzzing."""
    path = tmp_path / "x.pt"
    torch.save({"format": found}, path)
    with pytest.raises(CheckpointError, match=r"has format .*, this murmur reads 1"):
        CheckpointFolder(tmp_path, 1).load(path)


@pytest.mark.parametrize(
    "chunks", [b"{", b"[]", b'{"0": 5}', b'{"0": "../x.pt"}', b"\xff", b"[" * 100_000]
)
def test_damaged_list_of_replay_files_deletes_nothing(tmp_path: Path, chunks: bytes) -> None:
    folder = CheckpointFolder(tmp_path, 2)
    path = folder.path / "update-000001.pt"
    folder.path.mkdir()
    torch.save({"format": 1}, path)  # as older murmurs wrote it: only the other file names chunks
    path.with_suffix(".json").write_bytes(chunks)
    with pytest.raises(CheckpointError, match=r"update-000001\.json: "):
        folder.load_latest()
    kept = folder.path / "replay-00000-000001.pt"
    kept.write_bytes(b"")
    folder.save({"spec": ""}, 2)
    assert kept.exists()
