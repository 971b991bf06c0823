"""Running a coroutine to its end, also in a notebook's thread, which runs an event loop."""

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in another thread if this one already runs an event loop.

    Raises:
        BaseException: any exception of the coroutine; KeyboardInterrupt after cancelling it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    tasks: list[asyncio.Task[Any]] = []

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await coroutine

    with ThreadPoolExecutor(1, "murmur-asyncio") as pool:
        future = pool.submit(asyncio.run, watched())
        try:
            return future.result()
        except KeyboardInterrupt:
            for task in tasks:
                with contextlib.suppress(RuntimeError):  # its loop has just ended
                    task.get_loop().call_soon_threadsafe(task.cancel)
            raise
