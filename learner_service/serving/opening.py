"""The first session begins the run: once, even if that session ends."""

import asyncio
from collections.abc import Callable


class Opening:
    """Lets one session begin the run while the others wait. Used on the event loop."""

    def __init__(self) -> None:
        """Nothing is open yet."""
        self._lock = asyncio.Lock()

    async def once(self, is_open: Callable[[], bool], begin: Callable[[], None]) -> None:
        """Return when the run is open; call `begin`, in its own thread, if no session has.

        A session that ends while `begin` runs does not let go of it: the next session waits for
        the same call, also where `is_open` says so before `begin` returns. Two calls at once would
        build two learners in one process.

        Raises:
            Exception: what `begin` raises, to the session that called it; the next one tries again.
        """
        opening = asyncio.ensure_future(self._begin(is_open, begin))
        # asyncio prints an exception that no session is left to take.
        opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(opening)

    async def _begin(self, is_open: Callable[[], bool], begin: Callable[[], None]) -> None:
        async with self._lock:
            if not is_open():
                await asyncio.get_running_loop().run_in_executor(None, begin)
