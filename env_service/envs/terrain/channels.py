"""The channels of the actor's and the critic's maps, [H, W], one pixel per lattice position."""

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.terrain.belief import P_MIN, Pool
from murmur.env_service.envs.terrain.config import ActorChannel, Config, CriticChannel
from murmur.shared.wire.derived_maps import Channel, DerivedMap
from murmur.shared.wire.spec import STATE

ACTOR_CHANNELS: tuple[str, ...] = get_args(ActorChannel)
CRITIC_CHANNELS: tuple[str, ...] = get_args(CriticChannel)
BUDGET, AGENT_ID, POSITION, W_ENTROPY, LOCAL_W_ENTROPY, PROB, FOOTPRINT = range(7)
LOCAL_PROB = 7  # the last camera image as probabilities; not a channel that can be configured
WEIGHT_LOW, WEIGHT_HIGH = 0.499, 0.501
POSITIONS, GLOBAL_W_ENTROPY, GLOBAL_PROB, FOOTPRINTS = range(4)


@compiled()
def weighted_entropy(prob: NDArray[np.float64], out: NDArray[np.float32]) -> None:
    """Compute w H of probabilities, in bits; w = 1 above 0.501, 0 below 0.499, else 0.5.

    Args:
        prob: [H, W] probabilities, clamped to [1e-4, 0.9999].
        out: [H, W] receives the product.
    """
    for r in range(prob.shape[0]):
        for c in range(prob.shape[1]):
            p = min(max(prob[r, c], P_MIN), 1 - P_MIN)
            weight = 1.0 if p > WEIGHT_HIGH else (0.5 if p >= WEIGHT_LOW else 0.0)
            value = 0.0
            if weight > 0:
                value = -weight * (p * math.log2(p) + (1 - p) * math.log2(1 - p))
            out[r, c] = value


@compiled()
def probability(prob: NDArray[np.float64], out: NDArray[np.float32]) -> None:
    """Clamp probabilities [H, W] to [1e-4, 0.9999]."""
    for r in range(prob.shape[0]):
        for c in range(prob.shape[1]):
            out[r, c] = min(max(prob[r, c], P_MIN), 1 - P_MIN)


@compiled()
def pool_image(
    seen: NDArray[np.uint8],
    offset: tuple[int, int],
    visible: tuple[int, int],
    size: tuple[int, int],
    accuracy: float,
    column: NDArray[np.float32],
    out: NDArray[np.float64],
) -> None:
    """Pool the last camera image, as probabilities, by area to [H, W].

    A pixel is `accuracy` for a report of 1, 1 - accuracy for a report of 0, and 0.5 outside the
    map.

    Args:
        seen: [>= rows, >= columns] the camera's report of the visible part, from [0, 0] on.
        offset: image row and column at which the visible part begins.
        visible: rows and columns of the visible part.
        size: rows and columns of the image.
        accuracy: probability that a report is right.
        column: [>= visible columns] scratch.
        out: [H, W] receives the pooled image.
    """
    height, width = out.shape
    scale_x, scale_y = size[0] / height, size[1] / width
    gain = (accuracy - 0.5) / (scale_x * scale_y)
    for r in range(height):
        low, high = r * scale_x - offset[0], (r + 1) * scale_x - offset[0]
        column[: visible[1]] = 0
        for i in range(max(math.floor(low), 0), min(math.ceil(high), visible[0])):
            share = np.float32(min(i + 1, high) - max(i, low))
            report = seen[i, : visible[1]]
            target = column[: visible[1]]
            for j in range(visible[1]):
                target[j] += share * np.float32(2 * np.int32(report[j]) - 1)
        for c in range(width):
            left, right = c * scale_y - offset[1], (c + 1) * scale_y - offset[1]
            total = 0.0
            for j in range(max(math.floor(left), 0), min(math.ceil(right), visible[1])):
                total += (min(j + 1, right) - max(j, left)) * column[j]
            out[r, c] = 0.5 + gain * total


@compiled()
def _edges(
    rects: NDArray[np.int64], shown: NDArray[np.uint8], first: int, out: NDArray[np.int64]
) -> int:
    """Write the shown rectangles' sorted borders on an axis (first = 0 or 2); return the number."""
    count = 0
    for a in range(rects.shape[0]):
        if not shown[a]:
            continue
        for side in range(2):
            value = rects[a, first + side]
            k = count
            while k > 0 and out[k - 1] > value:
                out[k] = out[k - 1]
                k -= 1
            out[k] = value
            count += 1
    return count


@compiled()
def _block(
    rects: NDArray[np.int64], shown: NDArray[np.uint8], own: int, others: float, x: int, y: int
) -> float:
    """Return the value of cell (x, y) in `footprints`, less 0.5."""
    value = 0.0
    for a in range(rects.shape[0]):
        inside = shown[a] and rects[a, 0] <= x < rects[a, 1] and rects[a, 2] <= y < rects[a, 3]
        if inside and a == own:
            return 0.5
        if inside:
            value = others - 0.5
    return value


@compiled()
def footprints(
    rects: NDArray[np.int64],
    shown: NDArray[np.uint8],
    own: int,
    others: float,
    rows: Pool,
    columns: Pool,
    out: NDArray[np.float32],
) -> None:
    """Draw the last footprints as an image, area-pooled to [H, W].

    A cell is 1 in one's own footprint, else `others` in a shown one, else 0.5. The borders of the
    rectangles cut the map into a few blocks of one value each; a block's part of every bin is the
    product of its parts along both axes, so no cell is visited.

    Args:
        rects: [A, 4] last footprints.
        shown: [A] agents to draw footprints of.
        own: agent with the footprint on top; -1 for none.
        others: value of the other footprints.
        rows: pooling along x.
        columns: pooling along y.
        out: [H, W] receives the pooled image.
    """
    height, width = out.shape
    out[:] = 0.5
    xs = np.empty(2 * rects.shape[0], np.int64)
    ys = np.empty(2 * rects.shape[0], np.int64)
    band = np.empty(width, np.float64)
    count = _edges(rects, shown, 0, xs)
    _edges(rects, shown, 2, ys)
    area = rows.scale * columns.scale
    for k in range(count - 1):
        if xs[k] == xs[k + 1]:
            continue
        band[:] = 0
        for m in range(count - 1):
            if ys[m] == ys[m + 1]:
                continue
            value = _block(rects, shown, own, others, xs[k], ys[m])
            if value != 0:
                low, high = columns.overlap[ys[m]], columns.overlap[ys[m + 1]]
                for c in range(width):
                    band[c] += value * (high[c] - low[c])
        low, high = rows.overlap[xs[k]], rows.overlap[xs[k + 1]]
        for r in range(height):
            part = (high[r] - low[r]) / area
            if part > 0:
                for c in range(width):
                    out[r, c] += part * band[c]


@compiled()
def own_position(
    cells: NDArray[np.int32],
    heard: NDArray[np.uint8],
    own: int,
    shape: NDArray[np.int32],
    out: NDArray[np.float32],
) -> None:
    """Draw the area and the heard agents around an agent.

    The agent's own cell is at [H // 2, W // 2]; 1 inside the area, 0 outside; cells of the agent
    and of heard agents hold (z + 1) / (Z + 1). The agent itself is drawn last.

    Args:
        cells: [A, 3] positions.
        heard: [A] agents that were heard.
        own: number of the agent.
        shape: [3] positions along each axis.
        out: [H, W] receives the image.
    """
    height, width = out.shape
    x0, y0 = cells[own, 0] - height // 2, cells[own, 1] - width // 2
    for r in range(height):
        for c in range(width):
            out[r, c] = 0 <= x0 + r < shape[0] and 0 <= y0 + c < shape[1]
    for a in range(cells.shape[0]):
        r, c = cells[a, 0] - x0, cells[a, 1] - y0
        if heard[a] and 0 <= r < height and 0 <= c < width:
            out[r, c] = (cells[a, 2] + 1) / (shape[2] + 1)
    out[height // 2, width // 2] = (cells[own, 2] + 1) / (shape[2] + 1)


@compiled()
def all_positions(
    cells: NDArray[np.int32], shape: NDArray[np.int32], out: NDArray[np.float32]
) -> None:
    """Draw (z + 1) / Z at every agent's position, else 0; the last of agents in one column wins."""
    out[:] = 0
    for a in range(cells.shape[0]):
        out[cells[a, 0], cells[a, 1]] = (cells[a, 2] + 1) / shape[2]


ACTOR_SENT, CRITIC_SENT, BUDGET_LEFT = "channels", "state_channels", "budget_left"
_ENTROPY_OF = {"w_entropy": "prob", "local_w_entropy": "local_prob"}


@dataclass(frozen=True)
class ChannelPlan:
    """The channels that an environment draws and sends.

    Attributes:
        actor: codes of the channels that are drawn for each agent, in order.
        critic: codes of the channels of the global state, in order.
        derived: maps that the learner computes from them; empty if all channels are drawn here.
        budget_left: true if the share of moves that are left is sent as a number.
    """

    actor: tuple[int, ...]
    critic: tuple[int, ...]
    derived: tuple[DerivedMap, ...] = ()
    budget_left: bool = False


def channel_plan(config: Config) -> ChannelPlan:
    """Choose the channels to draw and to derive for a configuration."""
    if config.channels_by == "server":
        return ChannelPlan(
            tuple(map(ACTOR_CHANNELS.index, config.actor_channels)),
            tuple(map(CRITIC_CHANNELS.index, config.critic_channels)),
        )
    actor_names, maps = _derive("maps", ACTOR_SENT, config.actor_channels, config.num_agents)
    derived = [maps]
    critic_names: list[str] = []
    if config.critic_channels:
        critic_names, state = _derive(STATE, CRITIC_SENT, config.critic_channels, 1)
        derived.append(state)
    codes = {name: code for code, name in enumerate(ACTOR_CHANNELS)} | {"local_prob": LOCAL_PROB}
    return ChannelPlan(
        tuple(codes[name] for name in actor_names),
        tuple(map(CRITIC_CHANNELS.index, critic_names)),
        tuple(derived),
        "budget" in config.actor_channels,
    )


def _derive(
    name: str, sent: str, channels: tuple[str, ...], num_agents: int
) -> tuple[list[str], DerivedMap]:
    """Return the names of the channels to draw, and the map derived from them."""
    drawn: list[str] = []

    def index(channel: str) -> int:
        if channel not in drawn:
            drawn.append(channel)
        return drawn.index(channel)

    made = []
    for channel in channels:
        if channel == "budget":
            made.append(Channel("fill", BUDGET_LEFT))
        elif channel == "agent_id":
            numbers = tuple((a + 1) / num_agents for a in range(num_agents))
            made.append(Channel("constant", values=numbers))
        elif channel in _ENTROPY_OF:
            limits = (P_MIN, WEIGHT_LOW, WEIGHT_HIGH)
            made.append(Channel("entropy", sent, index(_ENTROPY_OF[channel]), limits))
        else:
            made.append(Channel("copy", sent, index(channel)))
    return drawn, DerivedMap(name, tuple(made))
