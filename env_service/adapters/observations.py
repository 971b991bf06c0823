"""Gymnasium's observation spaces as arrays of the contract: vectors and images.

Needs gymnasium; plug-ins import this module when they make an environment.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from murmur.env_service.adapters.casts import VECTOR, Path, Write, subject_of, write_box
from murmur.env_service.adapters.factory import AdapterConfig
from murmur.env_service.adapters.pixels import reduced_shape, reducing_writer
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK, STATE, ArraySpec, shown_agents
from murmur.shared.wire.timestep import Array

Space = spaces.Space[Any]
Part = tuple[Path, Write, Array]

_IMAGE = "image"
_USUAL_CHANNELS = (1, 3, 4)  # of a picture whose other sides are at least _PICTURE_SIDE
_PICTURE_SIDE = 16  # pixels
_MAP_SIDE = 5  # cells, of an array of three dimensions
_DIM = 64  # an image whose bytes stay below is no picture


def _without_mask(space: Space) -> Space:
    """Remove the mask of legal actions that a Dict observation may hold in PettingZoo."""
    if not isinstance(space, spaces.Dict) or ACTION_MASK not in space.spaces:
        return space
    return spaces.Dict({k: s for k, s in space.spaces.items() if k != ACTION_MASK})


@dataclass(frozen=True)
class _Leaf:
    """One part of an observation that is no Dict or Tuple.

    Attributes:
        path: keys that lead to it.
        write: function that writes a value into its view.
        shape: shape in the environment; flat for one-hot vectors.
        image: (shape [C, H, W], dtype) of an image as sent; None if it is no image.
        channels_last: true if `shape` has an image's channels at its end.
        doubt: sentence about a guess of its meaning; empty if there was none.
        named: true if it is an array of its own, but no image; `image` is then its layout.
        reduced: true if `write` makes an image smaller; it then writes [C, H, W].
    """

    path: Path
    write: Write
    shape: tuple[int, ...]
    image: tuple[tuple[int, ...], str] | None = None
    channels_last: bool = False
    reduced: bool = False
    doubt: str = ""
    named: bool = False

    @property
    def name(self) -> str:
        """Return the name of its array, if that is not the vector."""
        if self.named:
            return self.subject
        keys = [str(key) for key in self.path if key != VECTOR]
        return ".".join([_IMAGE, *keys])

    @property
    def subject(self) -> str:
        """Return the name of this part in notices: its keys, or `observation`."""
        return subject_of(self.path)

    def view(self, place: Array) -> Array:
        """Return this part's place, of one copy or of all, as a view in the environment's shape."""
        if self.reduced or self.named:
            return place
        if self.image is None:
            return place.reshape(*place.shape[:-1], *self.shape)
        if len(self.shape) == 2:
            return place.reshape(*place.shape[:-3], *self.shape)
        return np.moveaxis(place, -3, -1) if self.channels_last else place


class ObservationLayout:
    """Layout of each agent's observation in the arrays of the contract.

    Everything but images is flattened into one float32 vector per agent, `observation`, in the
    order of the space; Discrete and MultiDiscrete parts become one-hot. Images become arrays
    [C, H, W] of their own, `image` or `image.<key>`. Agents that observe less than others have
    zeros: at the end of the vector, or in the image that they lack.

    Attributes:
        arrays: specs of the arrays.
        reduced: lines for the log about images that are sent smaller.
        doubts: name of an observation -> sentence about a guess of its meaning.
        keys: [A] sets of keys that each agent's dictionary may hold, the mask included.
        masks_seen: [A] bool, true if the agent's observation holds an action mask.
    """

    def __init__(self, agents: Mapping[str, Space], config: AdapterConfig) -> None:
        """Lay out the agents' observations.

        Args:
            agents: name -> observation space.
            config: options, which say what images are and how they are sent.

        Raises:
            ConfigError: for a space of no fixed size, images that differ in size or share a name,
                or if all observations have size zero.
        """
        own = {name: _without_mask(space) for name, space in agents.items()}
        self.masks_seen = [own[name] is not space for name, space in agents.items()]
        self._leaves = [list(_leaves(space, (), name, config)) for name, space in own.items()]
        every = [leaf for leaves in self._leaves for leaf in leaves]
        _require_arrays(config.arrays, every)
        found = self._images(agents)
        reduced = {
            f"{leaf.name} {list(leaf.shape)} travels as {_image_text(leaf.image)}"
            for leaf in every
            if leaf.reduced
        }
        self.reduced = sorted(reduced)
        self.keys = [
            {ACTION_MASK, *(space.spaces if isinstance(space, spaces.Dict) else ())}
            for space in agents.values()
        ]
        self.doubts = {leaf.subject: leaf.doubt for leaf in every if leaf.doubt}
        width = max(sum(_size(leaf) for leaf in leaves) for leaves in self._leaves)
        vector = [ArraySpec(VECTOR, "float32", (width,))] if width else []
        pictures = [ArraySpec(name, dtype, shape) for name, (shape, dtype) in found.items()]
        self.arrays = (*vector, *pictures)
        if not self.arrays:
            raise ConfigError(
                "no agent observes anything: every observation space (but for masks) has size "
                "zero; declare one with at least one number, if need be a constant"
            )

    def _images(self, agents: Iterable[str]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return (shape, dtype) of all images by name.

        Raises:
            ConfigError: if images of one name differ in size, or two of an agent share a name.
        """
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
                    fix = (
                        "give them one shape, with absent entities masked, or leave it out of "
                        "environment.arrays"
                        if leaf.named
                        else "set environment.resize to one size for all, or environment.images: "
                        "none to flatten them"
                    )
                    raise ConfigError(
                        f"agent '{agent}' sees '{leaf.name}' as {_image_text(leaf.image)}, another "
                        f"agent as {_image_text(found[leaf.name])}; {fix}"
                    )
        return found

    def parts(self, arrays: Mapping[str, Array], copy: int, agent: int) -> list[Part]:
        """Return (path, writer, view) of each part of an agent's observation in a copy."""
        return [
            (leaf.path, leaf.write, leaf.view(place[copy]))
            for leaf, place in self._places(arrays, agent)
        ]

    def parts_of_all(
        self, arrays: Mapping[str, Array], agent: int
    ) -> list[tuple[Path, Callable[[Any], None]]]:
        """Return (path, writer) of each part of an agent's observation in all copies at once.

        A writer takes a batch as Gymnasium's vectorised environments give it, [N, ...]. Numbers and
        images as they are take one assignment; the rest is written copy by copy.
        """
        return [(leaf.path, _write_all(leaf, place)) for leaf, place in self._places(arrays, agent)]

    def _places(self, arrays: Mapping[str, Array], agent: int) -> Iterator[tuple[_Leaf, Array]]:
        """Yield each part of an agent's observation with its place, a view [N, ...]."""
        start = 0
        for leaf in self._leaves[agent]:
            if leaf.image:
                yield leaf, arrays[leaf.name][:, agent]
            elif size := _size(leaf):
                yield leaf, arrays[VECTOR][:, agent, start : start + size]
                start += size


class StateLayout(NamedTuple):
    """Layout of a state.

    Attributes:
        spec: spec of its array.
        write: function that writes a state to a view.
        view: function from the state's place to the view that `write` takes.
        doubt: sentence about a guess of its meaning; empty if there was none.
    """

    spec: ArraySpec
    write: Callable[[Any, Any], None]
    view: Callable[[Array], Any]
    doubt: str


def state_layout(space: Space, config: AdapterConfig, agents: Sequence[str] = ()) -> StateLayout:
    """Lay out the global state, or a Dict of the agents' states.

    Args:
        space: space of the state.
        config: options of the adapter.
        agents: names of the agents, in the order of their rows.

    Raises:
        ConfigError: if the state, or an agent's, is no plain vector or image.
    """
    if isinstance(space, spaces.Dict) and set(space) == set(agents):
        return _states_layout([state_layout(space[agent], config) for agent in agents], agents)
    leaves = list(_leaves(space, (), STATE, config))
    if len(leaves) != 1 or leaves[0].path:
        names = shown_agents(tuple(agents))
        own = f", a Dict with a state of each agent ({names})" if agents else ""
        raise ConfigError(
            f"state() gives a {space}; give one array{own}, or set environment.state: false"
        )
    leaf = leaves[0]
    shape, dtype = leaf.image or ((math.prod(leaf.shape),), "float32")
    spec = ArraySpec(STATE, dtype, shape, per_agent=False)
    return StateLayout(spec, leaf.write, leaf.view, leaf.doubt)


def _states_layout(layouts: Sequence[StateLayout], agents: Sequence[str]) -> StateLayout:
    """Lay out states of the agents, one beside the other; see `state_layout`.

    Raises:
        ConfigError: if they are not alike.
    """
    specs = {layout.spec for layout in layouts}
    if len(specs) > 1:
        shapes = ", ".join(sorted(f"{spec.dtype} {spec.shape}" for spec in specs))
        raise ConfigError(
            f"state() gives agents states of different shapes, {shapes}; give all one shape, or "
            "set environment.state: false"
        )

    def write(places: Sequence[Array], states: Mapping[str, Any]) -> None:
        for agent, place, layout in zip(agents, places, layouts, strict=True):
            if agent in states:
                layout.write(place, states[agent])

    def view(row: Array) -> list[Array]:
        return [layout.view(own) for own, layout in zip(row, layouts, strict=True)]

    spec = replace(layouts[0].spec, per_agent=True)
    return StateLayout(spec, write, view, layouts[0].doubt)


def _leaves(space: Space, path: Path, agent: str, config: AdapterConfig) -> Iterator[_Leaf]:
    """Yield the parts of an observation, in order.

    Raises:
        ConfigError: for a space of no fixed size.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in inner:
            yield from _leaves(part, (*path, key), agent, config)
    elif subject_of(path) in config.arrays:
        if isinstance(space, spaces.Box) and _is_image(space, config.images):
            raise ConfigError(
                f"environment.arrays names '{subject_of(path)}', an image, which is an array of "
                "its own already; leave it out, or set environment.images: none"
            )
        yield _named(space, path)
    elif isinstance(space, spaces.Discrete):
        n = int(space.n)
        yield _Leaf(path, _one_hot(n, int(space.start)), (n,))
    elif isinstance(space, spaces.MultiDiscrete):
        nvec, starts = space.nvec.reshape(-1), np.asarray(space.start).reshape(-1)
        yield _Leaf(path, _one_hots(nvec, starts), (int(nvec.sum()),))
    elif isinstance(space, spaces.MultiBinary):
        yield _Leaf(path, write_box, space.shape)
    elif isinstance(space, spaces.Box):
        if not _is_image(space, config.images):
            yield _Leaf(path, write_box, space.shape, doubt=_flattened(space, config.images))
            return
        shape, chw, last, doubt = space.shape, space.shape, False, ""
        if len(shape) == 2:
            chw = (1, *shape)
        else:
            last, guessed = _channels(shape)
            if config.channels_last != "auto":
                last, guessed = config.channels_last, False
            chw = (shape[2], *shape[:2]) if last else shape
            if guessed:
                order = "[H, W, C]" if last else "[C, H, W]"
                doubt = (
                    f"shape {list(shape)} is read as {order} with {chw[0]} channels, which is a "
                    "guess; environment.channels_last: true or false says it"
                )
        small = space.dtype == np.uint8
        if small and not doubt and (high := int(space.high.max())) < _DIM:
            doubt = (
                f"its bytes are at most {high}, and networks divide images by 255; give floats of "
                "0 to 1 and set environment.images: all, or to none for a vector"
            )
        dtype, write = ("uint8", _write_bytes) if small else ("float32", write_box)
        wanted = reduced_shape(chw, config.resize, config.gray) if small else chw
        if wanted != chw:
            reduce = reducing_writer(shape, wanted, channels_last=last)
            yield _Leaf(path, reduce, shape, (wanted, dtype), last, reduced=True, doubt=doubt)
            return
        yield _Leaf(path, write, shape, (chw, dtype), last, doubt=doubt)
    else:
        where = f" at {'.'.join(map(str, path))}" if path else ""
        raise ConfigError(
            f"'{agent}' observes a {type(space).__name__} space{where}; murmur takes Box, "
            "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them: wrap the "
            "environment in a factory of your own"
        )


def _require_arrays(names: tuple[str, ...], leaves: list[_Leaf]) -> None:
    """Refuse a name in environment.arrays that no agent observes.

    Raises:
        ConfigError: naming it and the arrays that agents observe.
    """
    there = {leaf.subject for leaf in leaves}
    for name in names:
        if name not in there or name == VECTOR:
            known = ", ".join(f"'{key}'" for key in sorted(there - {VECTOR}))
            raise ConfigError(
                f"environment.arrays names '{name}', which no agent observes; "
                f"{f'a Dict observation here has {known}' if known else 'there is no Dict here'}"
            )


def _named(space: Space, path: Path) -> _Leaf:
    """Return a part that stays an array of its own: bytes if it holds flags, else float32.

    Raises:
        ConfigError: for a space without a shape.
    """
    if not isinstance(space, spaces.Box | spaces.MultiBinary):
        raise ConfigError(
            f"environment.arrays names '{subject_of(path)}', a {type(space).__name__} space; "
            "only a Box or MultiBinary stays an array"
        )
    shape = tuple(space.shape)
    flags = isinstance(space, spaces.MultiBinary) or (
        space.dtype.kind in "biu" and bool((space.low >= 0).all() and (space.high <= 1).all())
    )
    if flags:
        return _Leaf(path, _write_flags, shape, (shape, "uint8"), named=True)
    return _Leaf(path, write_box, shape, (shape, "float32"), named=True)


def _write_flags(place: Array, value: Any) -> None:
    """Write flags as bytes.

    Raises:
        ValueError: for a value beside 0 and 1, or another shape.
    """
    given = np.asarray(value)
    if len(wrong := given[(given != 0) & (given != 1)]):
        raise ValueError(f"holds {wrong[0]}, where 0 or 1 must be")
    write_box(place, given)


def _is_image(space: spaces.Box, images: str) -> bool:
    if images == "none":
        return False
    if space.dtype != np.uint8:
        return images == "all" and len(space.shape) == 3
    return len(space.shape) == 3 or (len(space.shape) == 2 and bool((space.high == 255).all()))


def _channels(shape: tuple[int, ...]) -> tuple[bool, bool]:
    """Return whether an image's last axis holds its channels, and whether that is a guess."""
    first, middle, last = shape
    if first == middle != last:  # two equal sides are height and width
        return True, False
    if middle == last != first:
        return False, False
    usual = min(first, last) in _USUAL_CHANNELS and min(max(first, last), middle) >= _PICTURE_SIDE
    return last <= first, not usual


def _flattened(space: spaces.Box, images: str) -> str:
    """Return a sentence about a picture that becomes a vector by default; else ""."""
    shape = space.shape
    if images == "none" or len(shape) < 2:
        return ""
    sides = sorted(shape)[-2:]
    least = _MAP_SIDE if len(shape) == 3 else _PICTURE_SIDE
    if sides[0] < least or (len(shape) == 2 and space.dtype != np.uint8):
        return ""
    if len(shape) == 2:
        fix = "declare it with high 255 to make it an image"
    elif len(shape) == 3:
        fix = "environment.images: all makes it an image"
    else:
        fix = "an image has three dimensions: join the others to its channels in a wrapper"
    return (
        f"{space.dtype} of shape {list(shape)} is flattened into {math.prod(shape)} numbers; {fix}"
        "; environment.images: none says that a vector is meant"
    )


def _size(leaf: _Leaf) -> int:
    """Return the number of a part's entries in the vector; 0 for an image."""
    return 0 if leaf.image else math.prod(leaf.shape)


def _write_all(leaf: _Leaf, place: Array) -> Callable[[Any], None]:
    """Return the writer of a part's batch [N, ...] into its place."""
    whole = leaf.view(place)
    if leaf.write in (write_box, _write_bytes):
        return partial(leaf.write, whole)

    def write(batch: Any) -> None:
        if len(batch) != len(whole):
            raise ValueError(f"holds {len(batch)} copies, not {len(whole)}")
        for row, value in zip(whole, batch, strict=True):
            leaf.write(row, value)

    return write


def _image_text(image: tuple[tuple[int, ...], str] | None) -> str:
    return f"{image[1]} {list(image[0])}" if image else ""


def _write_bytes(place: Array, value: Any) -> None:
    """Write a uint8 image.

    Raises:
        ValueError: for another dtype: a float would be cut to an integer silently.
    """
    if np.asarray(value).dtype != np.uint8:
        raise ValueError(f"has dtype {np.asarray(value).dtype}, its space says uint8")
    write_box(place, value)


def _one_hot(n: int, start: int) -> Write:
    """Return a writer of an integer as a one-hot vector."""

    def write(place: Array, value: Any) -> None:
        place[...] = 0
        number = int(value)
        if not start <= number < start + n or number != value:
            raise ValueError(f"is {value}, not one of {start} to {start + n - 1}")
        place[number - start] = 1

    return write


def _one_hots(nvec: NDArray[np.integer], starts: NDArray[np.integer]) -> Write:
    """Return a writer of an array's integers as one-hot vectors, one behind the other."""
    offsets = np.cumsum(nvec) - nvec - starts
    low, high = starts, starts + nvec

    def write(place: Array, value: Any) -> None:
        place[...] = 0
        values = np.asarray(value).reshape(-1)
        if values.shape != low.shape or (values < low).any() or (values >= high).any():
            raise ValueError(f"is {value}, not {len(low)} numbers from {low} to {high - 1}")
        place[offsets + values] = 1

    return write
