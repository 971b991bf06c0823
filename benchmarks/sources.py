"""Sources: pairs of image and mask that one server core supplies, beside torch's DataLoader.

Two readers get the same folder of portraits, JPEG of 512² with PNG masks: a worker process of
murmur, through its SUPPLY session and gRPC, and a DataLoader with one worker, which decodes and
resizes with OpenCV as its documentation does. Both run over the whole folder in turns. The figure
is the worker process's CPU time for each pair, as the kernel counts it, the median of several
turns. The receiving side runs in this process for both, takes the arrays and keeps none.

`read` is the source alone, in this process, with no transport.
"""

import asyncio
import contextlib
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from grpc import aio

from murmur.benchmarks._processes import cpu_s
from murmur.benchmarks.effort import Effort
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import EnvServerConfig, ExperimentConfig
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import SERVER_OPTIONS, stream_handler
from murmur.shared.wire.notices import NOTICES_TAG
from murmur.shared.wire.sample_codec import Grant, SampleCodec, pack_grant
from murmur.shared.wire.samples import SampleSpec, samples_from_proto

DESCRIPTION = (
    "pairs a second that one core supplies from a folder of JPEGs of 512², beside a DataLoader "
    "with one worker (target ≥ 0.9 of it)"
)
NEEDS = ("cv2",)

_START_S = 120.0
_BATCH = 8  # of the DataLoader


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure CPU ms of a pair and pairs per CPU-second, for each size of the samples."""
    count, rounds = effort.choose((8, 1), (64, 3), (128, 7))
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as name:
        folder = Path(name)
        write_folder(folder, count + 1)
        result["JPEG, KiB"] = statistics.mean(
            f.stat().st_size / 1024 for f in (folder / "images").iterdir()
        )
        for size in effort.choose((128,), (512, 128), (512, 256, 128)):
            result[f"512² to {size}²"] = compare(folder, size, count, rounds)
    result["load_average"] = psutil.getloadavg()[0]
    return result


def write_folder(folder: Path, count: int) -> None:
    """Write portraits as the source `folder` reads them; one of them to validate with."""
    import cv2

    from murmur.env_service.sources.faces import Config, build
    from murmur.env_service.sources.faces.classes import CLASSES

    portraits = build(Config(size=512, train=count))
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    for i in range(count):
        sample = portraits.read("train", i)
        image = sample["image"].transpose(1, 2, 0)[..., ::-1]
        cv2.imwrite(str(folder / f"images/{i:04}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        cv2.imwrite(str(folder / f"masks/{i:04}.png"), sample["mask"])
    names = [f"{i:04}" for i in range(count)]
    (folder / "train.txt").write_text("\n".join(names[:-1]))
    (folder / "valid.txt").write_text(names[-1])


def compare(folder: Path, size: int, count: int, rounds: int) -> dict[str, Any]:
    """Measure both ways and the source alone, in turns."""
    plugin = PluginConfig(name="folder", path=str(folder), size=size)
    turns: dict[str, list[tuple[float, float]]] = {"supply": [], "DataLoader": [], "read": []}
    with Supply(plugin) as supply, Loader(folder, size, count) as loader:
        for _ in range(rounds + 1):  # the first is for files and allocators
            turns["supply"].append(_timed(partial(supply.epoch, count), supply.pid))
            turns["DataLoader"].append(_timed(loader.epoch, loader.pid))
            turns["read"].append(_timed(partial(_read, plugin, count), None))
    table: dict[str, Any] = {}
    for name, spent in turns.items():
        cpu, wall = (statistics.median(t[i] for t in spent[1:]) / count for i in (0, 1))
        table[name] = {"CPU ms a pair": cpu * 1e3, "pairs per CPU-second": 1 / cpu}
        table[name]["pairs/s, wall"] = 1 / wall
    ratios = [b[0] / a[0] for a, b in zip(turns["supply"], turns["DataLoader"], strict=True)]
    table["supply / DataLoader"] = statistics.median(ratios[1:])
    return table


def _timed(epoch: "partial[None] | Any", pid: int | None) -> tuple[float, float]:  # noqa: ANN401
    """Return CPU seconds of a process, and elapsed ones."""
    process = psutil.Process(pid)
    cpu, began = cpu_s(process), time.monotonic()
    epoch()
    return cpu_s(process) - cpu, time.monotonic() - began


def _read(plugin: PluginConfig, count: int) -> None:
    from murmur.env_service.sources.source import make_source, read_sample

    source = make_source(plugin)
    for index in range(count):
        read_sample(source, "train", index)


class Files(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Data set of the same files, read in the common way."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        """List the files."""
        self._images = sorted((folder / "images").iterdir())[:count]
        self._masks = sorted((folder / "masks").iterdir())[:count]
        self._size = size

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import cv2

        cv2.setNumThreads(0)
        image = cv2.cvtColor(cv2.imread(str(self._images[index])), cv2.COLOR_BGR2RGB)
        mask = cv2.imread(str(self._masks[index]), cv2.IMREAD_UNCHANGED)
        if image.shape[0] != self._size:
            size = (self._size, self._size)
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
            mask = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
        return torch.from_numpy(image).permute(2, 0, 1).contiguous(), torch.from_numpy(mask)


class Loader:
    """A DataLoader with one worker, which stays alive between turns."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        """Prepare the DataLoader."""
        self._loader = torch.utils.data.DataLoader(
            Files(folder, size, count),
            _BATCH,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="spawn",
        )

    def __enter__(self) -> "Loader":
        """Start the worker."""
        before = {child.pid for child in psutil.Process().children()}
        self.epoch()
        (self.pid,) = (
            child.pid
            for child in psutil.Process().children()
            if child.pid not in before and "resource_tracker" not in " ".join(child.cmdline())
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker."""
        del self._loader

    def epoch(self) -> None:
        """Read every pair once."""
        for _ in self._loader:
            pass


class Supply:
    """A worker process of murmur that supplies samples, and the learner's end of its session."""

    def __init__(self, plugin: PluginConfig) -> None:
        """Prepare the server and the worker."""
        self._plugin = plugin
        self._loop = asyncio.new_event_loop()
        self._asked: asyncio.Queue[int] = asyncio.Queue()
        self._done: asyncio.Queue[None] = asyncio.Queue()

    def __enter__(self) -> "Supply":
        """Listen, start the worker, and wait for its first samples."""
        port = self._loop.run_until_complete(self._listen())
        context = mp.get_context("spawn")
        self._process = context.Process(target=_work, args=(self._plugin, port), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.epoch(1)
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker."""
        self._process.kill()
        self._process.join()
        self._loop.run_until_complete(self._server.stop(None))
        self._loop.close()

    def epoch(self, count: int) -> None:
        """Read the first `count` pairs once."""

        async def play() -> None:
            await self._asked.put(count)
            async with asyncio.timeout(_START_S):
                await self._done.get()

        self._loop.run_until_complete(play())

    async def _listen(self) -> int:
        self._server = aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((stream_handler(self._serve),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def _serve(self, _: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        """Send grants as the learner does: several ahead."""
        from murmur.learner_service.images.supply import grant_sizes

        hello = pb.WorkerMessage.FromString(await context.read()).hello
        spec = samples_from_proto(hello.source)
        await context.write(pb.LearnerMessage(welcome=pb.Welcome(run_seed=1)).SerializeToString())
        size, window = grant_sizes(spec, 0)
        codec, sequence = SampleCodec(spec), 0
        while True:
            count = await self._asked.get()
            pending = _grants(spec, count, size, sequence)
            sequence += -(-count // size)
            owed: list[Grant] = []
            with contextlib.suppress(StopIteration):
                while len(owed) * size < window:
                    owed.append(next(pending))
                    await context.write(pack_grant(owed[-1]))
            while owed:
                message = await context.read()
                assert isinstance(message, bytes), "the worker is gone"
                if message.startswith(NOTICES_TAG) or codec.receive(message, owed[0]) is None:
                    continue
                owed.pop(0)
                if (grant := next(pending, None)) is not None:
                    owed.append(grant)
                    await context.write(pack_grant(grant))
            await self._done.put(None)


def _grants(spec: SampleSpec, count: int, size: int, before: int) -> Iterator[Grant]:
    """Yield grants for the first samples of the training split, in order."""
    for number, first in enumerate(range(0, count, size), before + 1):
        indices = tuple(range(first, min(first + size, count)))
        yield Grant(number, 0, 0, indices)


def _work(plugin: PluginConfig, port: int) -> None:
    """Supply as a worker of an environment server does. A spawned process's outermost function."""
    from prometheus_client import CollectorRegistry

    from murmur.env_service.metrics import WorkerMetrics
    from murmur.env_service.sessions.supply import run_supply
    from murmur.env_service.watchdog.faults import Heartbeat
    from murmur.shared.process.process import new_event_loop, wake_without_preempting

    wake_without_preempting()
    config = ExperimentConfig(
        source=plugin, env_server=EnvServerConfig(learner=f"127.0.0.1:{port}")
    )

    async def supply() -> None:
        metrics = WorkerMetrics("supply", CollectorRegistry())
        await run_supply(config, 0, asyncio.Event(), metrics, Heartbeat.private(1))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(supply())
