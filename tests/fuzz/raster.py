"""Files that are no raster are refused in one line; what is taken is finite and has two values."""

import io
import logging
import os
import tempfile
from pathlib import Path

import cv2
import numpy as np
import tifffile

from env_service.envs.terrain.raster import load_raster
from shared.errors import RasterError
from tests.fuzz import Reader

logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)
MODULES = ("env_service.envs.terrain.raster",)
_FOLDER = Path(tempfile.mkdtemp(prefix="murmur-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))  # fmt: skip  # noqa: E501, S108
_IMAGE = np.arange(64, dtype=np.uint8).reshape(8, 8)


def _npy() -> bytes:
    out = io.BytesIO()
    np.save(out, _IMAGE.astype(np.float32))
    return out.getvalue()


def _tif() -> bytes:
    out = io.BytesIO()
    tifffile.imwrite(out, _IMAGE, extratags=[(42113, "s", 0, "-1", True)])
    return out.getvalue()


_VALID = {
    ".npy": _npy(),
    ".png": cv2.imencode(".png", _IMAGE)[1].tobytes(),
    ".tif": _tif(),
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
