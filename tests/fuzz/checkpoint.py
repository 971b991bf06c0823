"""Files that are no checkpoint of this run are refused in one line, whatever they are."""

import io
import pickle
import zipfile

import torch

from murmur.learner_service.checkpoint.contents import check_spec, spec_text
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.shared.process.errors import CheckpointError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import spec_to_proto
from tests.fuzz import Reader, scratch
from tests.fuzz.stand_in import SPEC

MODULES = ("murmur.learner_service.checkpoint.contents", "murmur.learner_service.checkpoint.files")
_RUN = scratch()
_FOLDER = CheckpointFolder(_RUN, 1)
_FILE = _FOLDER.path / "update-000001.pt"
_SPEC = spec_to_proto(SPEC).SerializeToString(deterministic=True)


def _valid() -> bytes:
    path = _FOLDER.save({"spec": spec_text(SPEC), "w": torch.ones(2)}, 1)
    return path.read_bytes()


_VALID = _valid()
with zipfile.ZipFile(io.BytesIO(_VALID)) as _archive:
    _PARTS = {i.filename: _archive.read(i) for i in _archive.infolist()}
_LIST = _FILE.with_suffix(".json")
_PICKLE = next(name for name in _PARTS if name.endswith("data.pkl"))
SEEDS = [
    b"\4",
    b"\4\1\0\0\0{",
    b"\0" + _VALID[:64],
    b"\1",
    b"\2",
    b"\3" + pickle.dumps({"format": 1}, 2),
    b"\5\1",
    b"\6\1",
    b"\3" + pickle.dumps({"format": 1, "spec": 5}, 2),
]


_WRITTEN = io.BytesIO()
torch.save({"format": 1, "spec": spec_text(SPEC)}, _WRITTEN)
_OLDER = _WRITTEN.getvalue()  # without a list of its own


def one(data: bytes) -> str:
    reader = Reader(data)
    _LIST.unlink(missing_ok=True)
    match reader.below(7):
        case 0:
            content = reader.rest()
        case 1:
            content = reader.edited(_VALID)
        case 2:
            content = _archived(reader.edited(_PARTS[_PICKLE]))
        case 3:
            content = _archived(reader.rest())
        case 4:
            content = _OLDER
            _LIST.write_bytes(reader.edited(b'{"0": "replay-00000-000001.pt"}'))
        case 5:
            return _spec(reader.edited(_SPEC).hex())
        case _:
            return _spec(reader.edited(_SPEC.hex().encode()).decode("latin-1"))
    _FILE.write_bytes(content)
    try:
        _, state = _FOLDER.load_latest()
        check_spec(_FILE, state, SPEC)
    except CheckpointError:
        return "refused"
    return "loaded"


def _archived(data: bytes) -> bytes:
    """A checkpoint with right checksums around another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, part in _PARTS.items():
            archive.writestr(name, data if name == _PICKLE else part)
    return out.getvalue()


def _spec(text: str) -> str:
    """A checkpoint that says it is of this spec."""
    try:
        check_spec(_FILE, {"spec": text}, SPEC)
    except CheckpointError:
        return "refused spec"
    pb.EnvSpec.FromString(bytes.fromhex(text))
    return "same spec"
