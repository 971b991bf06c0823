"""Gymnasium's spaces as arrays of the contract: vectors, images, actions.

Needs gymnasium; plug-ins import this module when they make an environment.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from env_service.adapters.pixels import Reduction
from shared.errors import ConfigError
from shared.spec import ACTION_MASK, STATE, ActionSpec, ArraySpec, Continuous, Discrete
from shared.timestep import Array

Space = spaces.Space[Any]
Path = tuple[Any, ...]  # keys that lead from an observation to one of its parts
Write = Callable[[Array, Any], None]  # writes a part into its place
Part = tuple[Path, Write, Array]
_AS_IT_IS = Reduction()

VECTOR = "observation"
_IMAGE = "image"
_MOST_JOINT_ACTIONS = 4096  # of a MultiDiscrete or MultiBinary space


def split_mask(space: Space) -> tuple[Space, bool]:
    """PettingZoo's convention: a Dict observation may hold the mask of legal actions.

    Returns:
        the space without the mask, and whether there was one.
    """
    if not isinstance(space, spaces.Dict) or ACTION_MASK not in space.spaces:
        return space, False
    return spaces.Dict({k: s for k, s in space.spaces.items() if k != ACTION_MASK}), True


@dataclass(frozen=True)
class _Leaf:
    """One part of an observation that is no Dict or Tuple.

    Attributes:
        path: how to get at it.
        write: puts a value into its view.
        shape: as the environment gives it, but flat for one-hot vectors.
        image: [C, H, W], as it travels, and dtype if it is an image, else None.
        channels_last: whether `shape` has an image's channels at its end.
        reduced: whether `write` makes an image smaller; it then writes [C, H, W].
    """

    path: Path
    write: Write
    shape: tuple[int, ...]
    image: tuple[tuple[int, ...], str] | None = None
    channels_last: bool = False
    reduced: bool = False

    @property
    def name(self) -> str:
        """Name of an image's array."""
        keys = [str(key) for key in self.path if key != VECTOR]
        return ".".join([_IMAGE, *keys])

    def view(self, place: Array) -> Array:
        """The place of this part, in the shape the environment gives it."""
        if self.reduced:
            return place
        if self.image is None or len(self.shape) == 2:
            return place.reshape(self.shape)
        return place.transpose(1, 2, 0) if self.channels_last else place


class ObservationLayout:
    """Where each agent's observation goes.

    Everything but images is flattened into one float32 vector per agent, `observation`, in the
    order of the space; Discrete and MultiDiscrete parts become one-hot. Images become arrays
    [C, H, W] of their own, `image` or `image.<key>`. Agents that observe less than others have
    zeros: at the end of the vector, or in the image they do not have.

    Attributes:
        arrays: specs of the arrays.
        reduced: how downscaled images are sent; text for the log.
    """

    def __init__(
        self,
        agents: Mapping[str, Space],
        images: str,
        channels_last: bool | str,
        reduction: Reduction = _AS_IT_IS,
    ) -> None:
        """Lay out the agents' observations.

        Args:
            agents: name -> observation space, without action mask.
            images: which Boxes are images: "uint8", "all" of three dimensions, "none".
            channels_last: of images; "auto" guesses from the shape.
            reduction: of images of bytes.

        Raises:
            ConfigError: for a space of no fixed size, images that differ in size or that have
                one name, or if all that the agents observe is of size zero.
        """
        self._leaves = [
            list(_leaves(space, (), name, images, channels_last, reduction))
            for name, space in agents.items()
        ]
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for agent, leaves in zip(agents, self._leaves, strict=True):
            names = [leaf.name for leaf in leaves if leaf.image]
            for name in names:
                if names.count(name) > 1:
                    raise ConfigError(
                        f"agent '{agent}' observes {names.count(name)} images that would all be "
                        f"named '{name}'; rename one of their keys in a factory of your own"
                    )
            for leaf in leaves:
                if leaf.image and found.setdefault(leaf.name, leaf.image) != leaf.image:
                    raise ConfigError(
                        f"agent '{agent}' sees '{leaf.name}' as {_image_text(leaf.image)}, another "
                        f"agent as {_image_text(found[leaf.name])}; set environment.resize to one "
                        "size for all, or environment.images: none to flatten them"
                    )
        smaller = [leaf for leaves in self._leaves for leaf in leaves if leaf.reduced]
        self.reduced = sorted(
            {
                f"{leaf.name} {list(leaf.shape)} travels as {_image_text(leaf.image)}"
                for leaf in smaller
            }
        )
        width = max(sum(_size(leaf) for leaf in leaves) for leaves in self._leaves)
        vector = [ArraySpec(VECTOR, "float32", (width,))] if width else []
        pictures = [ArraySpec(name, dtype, shape) for name, (shape, dtype) in found.items()]
        self.arrays = (*vector, *pictures)
        if not self.arrays:
            raise ConfigError(
                "no agent observes anything: every observation space (but for masks) has size "
                "zero; declare one with at least one number, if need be a constant"
            )

    def parts(self, arrays: Mapping[str, Array], copy: int, agent: int) -> list[Part]:
        """What to write where when this agent of this copy observes something."""
        parts: list[Part] = []
        start = 0
        for leaf in self._leaves[agent]:
            if leaf.image:
                place = arrays[leaf.name][copy, agent]
            elif _size(leaf):
                place = arrays[VECTOR][copy, agent, start : start + _size(leaf)]
                start += _size(leaf)
            else:
                continue
            parts.append((leaf.path, leaf.write, leaf.view(place)))
        return parts


def state_layout(
    space: Space, images: str, channels_last: bool | str, reduction: Reduction = _AS_IT_IS
) -> tuple[ArraySpec, Write, Callable[[Array], Array]]:
    """The global state: its spec, its writer, and its place in a row as the writer wants it.

    Raises:
        ConfigError: if it is no plain vector or image.
    """
    leaves = list(_leaves(space, (), STATE, images, channels_last, reduction))
    if len(leaves) != 1 or leaves[0].path:
        raise ConfigError(f"state() gives a {space}; set environment.state: false")
    leaf = leaves[0]
    shape, dtype = leaf.image or ((math.prod(leaf.shape),), "float32")
    return ArraySpec(STATE, dtype, shape, per_agent=False), leaf.write, leaf.view


def _leaves(
    space: Space,
    path: Path,
    agent: str,
    images: str,
    channels_last: bool | str,
    reduction: Reduction,
) -> Iterator[_Leaf]:
    """The parts of an observation, in order.

    Raises:
        ConfigError: for a space of no fixed size.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in inner:
            yield from _leaves(part, (*path, key), agent, images, channels_last, reduction)
    elif isinstance(space, spaces.Discrete):
        n = int(space.n)
        yield _Leaf(path, _one_hot(n, int(space.start)), (n,))
    elif isinstance(space, spaces.MultiDiscrete):
        nvec, starts = space.nvec.reshape(-1), np.asarray(space.start).reshape(-1)
        yield _Leaf(path, _one_hots(nvec, starts), (int(nvec.sum()),))
    elif isinstance(space, spaces.MultiBinary):
        yield _Leaf(path, _write_box, space.shape)
    elif isinstance(space, spaces.Box):
        if not _is_image(space, images):
            yield _Leaf(path, _write_box, space.shape)
            return
        shape, chw, last = space.shape, space.shape, False
        if len(shape) == 2:
            chw = (1, *shape)
        else:
            last = shape[2] <= shape[0] if channels_last == "auto" else bool(channels_last)
            chw = (shape[2], *shape[:2]) if last else shape
        small = space.dtype == np.uint8
        dtype, write = ("uint8", _write_bytes) if small else ("float32", _write_box)
        if small and (reduce := reduction.writer(shape, channels_last=last)):
            yield _Leaf(path, reduce, shape, (reduction.shape(chw), dtype), last, reduced=True)
            return
        yield _Leaf(path, write, shape, (chw, dtype), last)
    else:
        where = f" at {'.'.join(map(str, path))}" if path else ""
        raise ConfigError(
            f"'{agent}' observes a {type(space).__name__} space{where}; murmur takes Box, "
            "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them: wrap the "
            "environment in a factory of your own"
        )


def _is_image(space: spaces.Box, images: str) -> bool:
    if images == "none":
        return False
    if space.dtype != np.uint8:
        return images == "all" and len(space.shape) == 3
    return len(space.shape) == 3 or (len(space.shape) == 2 and bool((space.high == 255).all()))


def _size(leaf: _Leaf) -> int:
    """Numbers of a part in the vector."""
    return 0 if leaf.image else math.prod(leaf.shape)


def _image_text(image: tuple[tuple[int, ...], str] | None) -> str:
    return f"{image[1]} {list(image[0])}" if image else ""


def _write_box(place: Array, value: Any) -> None:  # noqa: ANN401 - whatever the environment gives
    """Numbers of exactly the declared shape.

    Raises:
        ValueError: if they are not.
    """
    if getattr(value, "shape", None) != place.shape:
        value = np.asarray(value)
        if value.shape != place.shape:
            raise ValueError(f"has shape {value.shape}, its space says {place.shape}")
    place[...] = value


def _write_bytes(place: Array, value: Any) -> None:  # noqa: ANN401
    """A uint8 image.

    Raises:
        ValueError: if it is none: a float would be cut to an integer silently.
    """
    if np.asarray(value).dtype != np.uint8:
        raise ValueError(f"has dtype {np.asarray(value).dtype}, its space says uint8")
    _write_box(place, value)


def _one_hot(n: int, start: int) -> Write:
    """Writes an integer as a one-hot vector."""

    def write(place: Array, value: Any) -> None:  # noqa: ANN401
        place[...] = 0
        number = int(value)
        if not start <= number < start + n:
            raise ValueError(f"is {number}, not one of {start} to {start + n - 1}")
        place[number - start] = 1

    return write


def _one_hots(nvec: NDArray[np.integer], starts: NDArray[np.integer]) -> Write:
    """Writes each of an array's integers as a one-hot vector, one behind the other."""
    offsets = np.cumsum(nvec) - nvec - starts
    low, high = starts, starts + nvec

    def write(place: Array, value: Any) -> None:  # noqa: ANN401
        place[...] = 0
        values = np.asarray(value).reshape(-1)
        if values.shape != low.shape or (values < low).any() or (values >= high).any():
            raise ValueError(f"is {value}, not {len(low)} numbers from {low} to {high - 1}")
        place[offsets + values] = 1

    return write


class _Choices(dict[int, Any]):
    """Number of an action -> the action as the environment wants it."""

    def __init__(self, agent: str, actions: Sequence[Any]) -> None:
        super().__init__(enumerate(actions))
        self._agent = agent

    def __missing__(self, number: int) -> Any:  # noqa: ANN401
        raise ValueError(
            f"agent '{self._agent}' has {len(self)} actions and was told to take number {number}; "
            f"the policy must apply '{ACTION_MASK}'"
        )


class ActionLayout:
    """How actions of the contract become actions of the environment.

    Discrete, MultiDiscrete (every combination is one action) and MultiBinary become Discrete with
    as many actions as the richest agent has. Boxes become Continuous of the largest size, scaled
    from [-1, 1] to each Box's bounds; what an agent does not have is ignored.

    Attributes:
        spec: of the contract.
        counts: [A] how many of the discrete actions each agent has; empty if continuous.
        convert: [A] functions from an agent's entry of `prepare` to its action.
        maskable: whether all agents' spaces are Discrete, so that the environment's masks fit.
    """

    def __init__(self, agents: Mapping[str, Space]) -> None:
        """Find what the agents have in common.

        Raises:
            ConfigError: if it is too little, naming the agents and the fix.
        """
        finite = {name: _choices(name, space) for name, space in agents.items()}
        boxes = {name: s for name, s in agents.items() if isinstance(s, spaces.Box)}
        for name, space in agents.items():
            if finite[name] is None and name not in boxes:
                team = isinstance(space, spaces.Tuple)
                raise ConfigError(
                    f"agent '{name}' acts in a {type(space).__name__} space; murmur takes "
                    "Discrete, MultiDiscrete, MultiBinary and Box: wrap the environment in a "
                    "factory of your own"
                    + "; or, for a Gymnasium environment whose tuples have one entry for each "
                    "agent of a team, set environment.team: true" * team
                )
        if boxes and len(boxes) < len(agents):
            rest = [name for name in agents if name not in boxes]
            raise ConfigError(
                f"agents {_list(boxes)} have continuous actions, {_list(rest)} discrete ones; all "
                "must be of one kind: wrap the environment in a factory of your own that gives "
                "the continuous ones some fixed actions to choose from"
            )
        self.spec: ActionSpec
        self.counts: list[int] = []
        self.convert: list[Callable[[Any], Any]] = []
        self.maskable = all(isinstance(s, spaces.Discrete) for s in agents.values())
        if boxes:
            self._continuous(boxes)
            return
        for choices in finite.values():
            assert choices is not None
            self.counts.append(len(choices))
            self.convert.append(choices.__getitem__)
        self.spec = Discrete(max(self.counts))

    def _continuous(self, boxes: Mapping[str, spaces.Box]) -> None:
        sizes = [math.prod(box.shape) for box in boxes.values()]
        self.spec = Continuous(max(sizes))
        # Other numbers, rounded to float32, could lie outside of their bounds.
        dtype = np.result_type(np.float32, *(box.low.dtype for box in boxes.values()))
        self._low = np.zeros((len(boxes), max(sizes)), dtype)
        self._high = np.zeros_like(self._low)
        for a, (name, box) in enumerate(boxes.items()):
            low, high = _inside(box.low, dtype), _inside(box.high, dtype)
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise ConfigError(
                    f"agent '{name}' acts in {box}, which has no bounds to scale [-1, 1] to; "
                    "wrap it, for example in gymnasium.wrappers.TransformAction, in a factory of "
                    "your own"
                )
            self._low[a, : sizes[a]], self._high[a, : sizes[a]] = low.ravel(), high.ravel()
            self.convert.append(_box_action(box, sizes[a], self._low))
        self._half = self._high / 2 - self._low / 2
        self._middle = self._high / 2 + self._low / 2

    def prepare(self, action: Array) -> Any:  # noqa: ANN401 - [copy][agent]
        """Actions of all copies, ready for `convert`; nothing in it changes later."""
        if isinstance(self.spec, Discrete):
            return action.tolist()
        scaled = np.clip(action.astype(self._low.dtype), -1, 1)
        scaled *= self._half
        scaled += self._middle
        return np.clip(scaled, self._low, self._high, out=scaled)  # rounding may step outside


def _choices(agent: str, space: Space) -> _Choices | None:
    """All actions of a finite space, or None if it is none.

    Raises:
        ConfigError: if there are too many.
    """
    if isinstance(space, spaces.Discrete):
        return _Choices(agent, [int(space.start) + k for k in range(int(space.n))])
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec, np.asarray(space.start)
    elif isinstance(space, spaces.MultiBinary):
        nvec, start = np.full(space.shape, 2), np.zeros(space.shape, np.int64)
    else:
        return None
    count = math.prod(int(n) for n in nvec.reshape(-1))
    if count > _MOST_JOINT_ACTIONS:
        raise ConfigError(
            f"agent '{agent}' acts in {space}: {count} combinations, more than "
            f"{_MOST_JOINT_ACTIONS}; choose some of them in a factory of your own"
        )
    digits = np.unravel_index(np.arange(count), nvec.reshape(-1))
    combinations = np.stack(digits, axis=-1).reshape(count, *nvec.shape) + start
    combinations = combinations.astype(space.dtype)
    combinations.flags.writeable = False  # the environment is given these very arrays
    return _Choices(agent, list(combinations))


def _inside(bound: Array, dtype: np.dtype[Any]) -> Array:
    """A bound of a Box in another dtype; where that cannot hold it, the next number towards 0."""
    cast = bound.astype(dtype)
    if bound.dtype.kind in "iu":  # beyond 2**53; Python compares such integers exactly
        pairs = zip(cast.ravel().tolist(), bound.ravel().tolist(), strict=True)
        outside = [abs(int(x)) > abs(exact) for x, exact in pairs]
        cast = np.where(np.reshape(outside, cast.shape), np.nextafter(cast, 0), cast)
    return cast


def _box_action(box: spaces.Box, size: int, rows: Array) -> Callable[[Any], Any]:
    """Cuts and shapes one agent's row of scaled actions, which is one like those of `rows`."""
    dtype, shape, whole = box.dtype, box.shape, np.issubdtype(box.dtype, np.integer)
    if dtype == rows.dtype and shape == rows.shape[1:]:
        return lambda row: row

    def convert(row: Any) -> Any:  # noqa: ANN401
        cut = row[:size].reshape(shape)
        return (np.rint(cut) if whole else cut).astype(dtype)

    return convert


def _list(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
