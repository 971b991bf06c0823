"""Topic `augment`: 32 images of 512 x 512 augmented on the device, beside OpenCV on one core."""

import torch

from murmur.benchmarks.gpu_topics.figures import LAUNCH_US, NODE_US, TB_PER_S, Figure, Value
from murmur.benchmarks.gpu_topics.topics import Context

_LAUNCHES = {"standard": 38, "strong": 52, "minimal": 16}  # as `murmur bench augment` counts them
_COUNT, _SIDE = 32, 512
_LOOP_MS = {"standard": 100.0, "strong": 284.0, "minimal": 107.0}  # of a core of an AMD EPYC
_CLAIM = 12.0


def plan_augment(context: Context) -> list[Figure]:
    """Plan the times of both, and the speed-up of the device."""
    del context
    images_gb = _COUNT * 3 * _SIDE**2 * 4 / 1e9
    figures = []
    for preset, launches in _LAUNCHES.items():
        moved_ms = launches * 2 * images_gb / TB_PER_S  # each reads and writes all images
        graph = max((launches * NODE_US + LAUNCH_US) / 1e3, moved_ms)
        eager = max(launches * LAUNCH_US / 1e3, moved_ms)
        loop = _LOOP_MS[preset]
        figures += [
            Figure(f"augment {preset}: one core / graph", _CLAIM, ">=", loop / graph),
            Figure(f"augment {preset}: one core / eager", _CLAIM, ">=", loop / eager),
            Figure(f"augment {preset}: graph, ms", expected=graph),
            Figure(f"augment {preset}: eager, ms", expected=eager),
            Figure(f"augment {preset}: OpenCV loop on one core, ms", expected=loop),
            Figure(f"augment {preset}: mean difference of images", 0.02, expected=0.001),
        ]
    return figures


def augment(context: Context) -> dict[str, Value]:
    """Measure the loop in CPU time, the device in wall time."""
    from murmur.benchmarks import augment as benchmark  # needs OpenCV, which other topics do not

    device = torch.device(context.device)
    count, side = context.effort.choose((2, 64), (_COUNT, _SIDE), (_COUNT, _SIDE))
    batch = benchmark.make_batch(count, side)
    values: dict[str, Value] = {}
    for preset in context.effort.choose(("standard",), tuple(_LAUNCHES), tuple(_LAUNCHES)):
        subject = f"augment {preset}"
        if context.has(subject):
            continue
        loop = benchmark.loop_ms(preset, batch, context.effort.choose(1, 3, 7))
        values[f"{subject}: OpenCV loop on one core, ms"] = loop
        for name, call in benchmark.device_calls(preset, batch, device).items():
            ms = benchmark.call_ms(call, context.effort.choose(1, 20, 100), device)
            values[f"{subject}: {name}, ms"] = ms
            values[f"{subject}: one core / {name}"] = loop / ms
        values[f"{subject}: mean difference of images"] = benchmark.difference_on(
            preset, batch, device
        )
        context.save(values)
    return values
