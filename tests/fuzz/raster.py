"""Files that are no raster are refused in one line; what is taken is finite and has two values."""

import io

import numpy as np
from PIL import Image

from murmur.env_service.envs.terrain.world import load_raster
from murmur.shared.process.errors import RasterError
from tests.fuzz import Reader, scratch

MODULES = ("murmur.env_service.envs.terrain.world",)
_FOLDER = scratch()
_IMAGE = np.arange(64, dtype=np.uint8).reshape(8, 8)


def _npy() -> bytes:
    out = io.BytesIO()
    np.save(out, _IMAGE.astype(np.float32))
    return out.getvalue()


def _image(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(_IMAGE).save(out, kind)
    return out.getvalue()


_VALID = {
    ".npy": _npy(),
    ".png": _image("png"),
    ".tif": _image("tiff"),
}
SEEDS = [bytes([k, 1]) for k in range(3)] + [
    bytes([k, 0]) + valid for k, valid in enumerate(_VALID.values())
]


def one(data: bytes) -> str:
    reader = Reader(data)
    suffix = list(_VALID)[reader.below(3)]
    content = reader.edited(_VALID[suffix]) if reader.below(4) else reader.rest()
    path = _FOLDER / f"fuzzed{suffix}"
    path.write_bytes(content)
    try:
        values = load_raster(str(path))
    except RasterError:
        return "refused"
    assert values.ndim == 2
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    assert values.min() < values.max()
    return "read"
