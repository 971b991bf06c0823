"""The decorator of the environments' machine code, and the folder of that code."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numba
from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def cache_folder() -> Path:
    """Return a folder for machine code that only these exact sources share.

    numba notices a change in the file of the function it compiled, but not in the files of the
    functions that this one calls. So the folder's name is a digest of all sources that may hold
    such functions. It is in NUMBA_CACHE_DIR if set, else in the user's cache folder.
    """
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.glob("envs/**/*.py")]):
        digest.update(source.relative_to(here).as_posix().encode())
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    if base is None:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a user without a home
            base = tempfile.gettempdir()
    return Path(base) / "murmur" / f"numba-{digest.hexdigest()[:16]}"


numba.config.CACHE_DIR = str(cache_folder())


def compiled(reassociate: bool = False) -> Callable[[Function], Function]:
    """Compile a function at its first call, without the GIL, and keep the result on disk.

    If `cache_folder` cannot be written (a read-only image), each process compiles the function
    again, 10 to 20 s for an environment.

    Args:
        reassociate: true if sums of floats may be reordered, so that they use vector registers.
    """
    fastmath = {"contract", "reassoc"} if reassociate else {"contract"}

    def decorate(function: Function) -> Function:
        options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        try:
            result: Function = njit(cache=True, **options)(function)
        except RuntimeError:  # numba: no locator available
            result = njit(**options)(function)
        return result

    return decorate
