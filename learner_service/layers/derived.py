"""Maps that a spec derives from the observations that travel; see shared.config.derived."""

import dataclasses
import threading
from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor

from shared.config.derived import Channel, DerivedMap
from shared.wire.spec import ArraySpec, EnvSpec


class Derivation:
    """Replaces the sources of derived maps by the maps.

    Attributes:
        spec: spec that networks see: derived maps as float32 observations, none of their sources.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Plan the computation."""
        self._maps = spec.derived
        self._num_agents = spec.num_agents
        self._sources = {source for derived in self._maps for source in derived.sources}
        self._constants: dict[tuple[int, torch.device], dict[tuple[str, int], Tensor]] = {}
        seen = [spec.derived_array(derived) for derived in self._maps]
        seen += [o for o in spec.observations if o.name not in self._sources]
        self.spec = dataclasses.replace(spec, observations=tuple(seen), derived=(), symmetries=())
        self._shapes: dict[str, ArraySpec] = {array.name: array for array in seen}

    def __call__(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Observations by name, [B, A, ...] or [B, ...], as `spec` lists them."""
        seen = {n: x for n, x in observation.items() if n not in self._sources}
        return {m.name: self._compute(m, observation) for m in self._maps} | seen

    def _compute(self, derived: DerivedMap, observation: Mapping[str, Tensor]) -> Tensor:
        """[B, A, C, H, W], or [B, C, H, W] of a map that agents share."""
        first = observation[next(derived.sources)]
        array = self._shapes[derived.name]
        height, width = array.shape[1:]
        leading = (first.shape[0], *((self._num_agents,) * array.per_agent))
        parts = []
        for start, run in _runs(derived.channels):
            kind, source, count = run[0].kind, run[0].source, len(run)
            if kind == "constant":
                values = self._constant(derived, start, run, first.device)  # [A, n], or [n]
                part = values[..., None, None].expand(*leading, count, height, width)
            else:
                axis = -1 if kind == "fill" else -3
                part = observation[source].narrow(axis, run[0].index, count)
                if kind == "fill":
                    part = part[..., None, None].expand(*leading, count, height, width)
                elif kind == "entropy":
                    part = weighted_entropy(part, *run[0].values)
            parts.append(part)
        return torch.cat(parts, -3)

    def _constant(
        self, derived: DerivedMap, start: int, run: list[Channel], device: torch.device
    ) -> Tensor:
        """Values of adjacent constant channels; a copy per thread, as each has its own stream."""
        known = self._constants.setdefault((threading.get_ident(), device), {})
        key = derived.name, start
        if key not in known:
            with torch.inference_mode(False):
                values = torch.tensor([channel.values for channel in run]).T  # [A or 1, n]
                if self._shapes[derived.name].per_agent:
                    values = values.expand(self._num_agents, -1)
                else:
                    values = values[0]
                values = values.contiguous()
                if device.type == "cuda":
                    values = values.pin_memory().to(device, non_blocking=True)
            if type(values) is not Tensor:  # one that only traces
                return values
            known[key] = values
        return known[key]


def derivation(spec: EnvSpec) -> tuple[Derivation | None, EnvSpec]:
    """Return what computes derived maps, None without any, and the spec that networks see."""
    derive = Derivation(spec)
    return derive if spec.derived else None, derive.spec


def weighted_entropy(probability: Tensor, p_min: float, low: float, high: float) -> Tensor:
    """Binary entropy in bits times a weight: 0 below `low`, 1 above `high`, 0.5 between.

    Args:
        probability: probabilities of any shape, float32.
        p_min: probabilities are clamped to [p_min, 1 - p_min] first.
        low: probability below which the weight is 0.
        high: probability above which the weight is 1.
    """
    p = probability.clamp(p_min, 1 - p_min)
    weight = ((p > high).float() + (p >= low).float()) / 2
    q = 1 - p
    return -weight * (p * p.log2() + q * q.log2())


def _runs(channels: tuple[Channel, ...]) -> list[tuple[int, list[Channel]]]:
    """Channels that one operation computes, with the number of the first of them."""
    numbered = list(enumerate(channels))

    def key(item: tuple[int, Channel]) -> object:
        number, channel = item
        if channel.kind == "constant":
            return channel.kind
        return channel.kind, channel.source, channel.index - number, channel.values

    return [
        (run[0][0], [channel for _, channel in run])
        for run in ([*group] for _, group in groupby(numbered, key))
    ]
