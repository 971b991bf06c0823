"""The decorator of the environments' machine code."""

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(reassociate: bool = False) -> Callable[[Function], Function]:
    """Compile a function at its first call, without the GIL, and keep the result on disk.

    numba keeps it in NUMBA_CACHE_DIR if set, else beside the source, else in the user's cache
    folder. Where none of these can be written (a read-only image without a home) the function is
    compiled anew in each process, 10 to 20 s for an environment.

    Args:
        reassociate: whether sums of floats may be reordered, so that they use vector registers.
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
