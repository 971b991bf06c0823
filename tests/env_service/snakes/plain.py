"""The game once more, slowly: lists of (row, column), Python integers, one game at a time."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS = 10, 20
STEPS = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}
REVERSE = {0: 1, 1: 0, 2: 3, 3: 2}
MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
Cell = tuple[int, int]
CELLS = [(row, column) for row in range(ROWS) for column in range(COLUMNS)]


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


class Luck:
    """SplitMix64."""

    def __init__(self, seed: int, number: int) -> None:
        self.state = mix((seed + (number + 1) * GOLDEN) & MASK64)

    def below(self, count: int) -> int:
        self.state = (self.state + GOLDEN) & MASK64
        return (mix(self.state) >> 32) * count >> 32


def move(cell: Cell, direction: int) -> Cell:
    rows, columns = STEPS[direction]
    return (cell[0] + rows) % ROWS, (cell[1] + columns) % COLUMNS


def around(offset: int, size: int) -> int:
    return min((offset, offset - size, offset + size), key=abs)


class PlainGame:
    """One game, played from its seed."""

    def __init__(self, seed: int) -> None:
        self.luck, self.opponent_luck = Luck(seed, 0), Luck(seed, 1)
        self.time = 0
        self.over = False
        self.snakes: list[list[Cell]] = []
        self.heading: list[int] = []
        self.beans: list[Cell] = []
        self.reward, self.score, self.deaths, self.eaten = ([0] * 6 for _ in range(4))
        while len(self.snakes) < 6:
            head, heading = CELLS[self.luck.below(200)], self.luck.below(4)
            middle = move(head, REVERSE[heading])
            snake = [head, middle, move(middle, REVERSE[heading])]
            if not any(cell in other for other in self.snakes for cell in snake):
                self.snakes.append(snake)
                self.heading.append(heading)
        self._refill()

    def free(self) -> list[Cell]:
        taken = {cell for snake in self.snakes for cell in snake} | set(self.beans)
        return [cell for cell in CELLS if cell not in taken]

    def _refill(self) -> None:
        while len(self.beans) < 5 and (free := self.free()):
            self.beans.append(free[self.luck.below(len(free))])

    def step(self, actions: list[int]) -> None:
        self.time += 1
        for p, action in enumerate(actions):
            turn = action
            if turn == REVERSE[self.heading[p]]:
                turn = [k for k in range(4) if k != turn][self.luck.below(3)]
            self.heading[p] = turn
            self.snakes[p].insert(0, move(self.snakes[p][0], turn))
            self.reward[p] = int(self.snakes[p][0] in self.beans)
            if self.reward[p]:
                self.beans.remove(self.snakes[p][0])
                self.eaten[p] += 1
            else:
                self.snakes[p].pop()
        every = [cell for snake in self.snakes for cell in snake]
        dead = [p for p in range(6) if every.count(self.snakes[p][0]) > 1]
        for p in dead:
            self.reward[p] += 3 - len(self.snakes[p])
            self.deaths[p] += 1
            self.snakes[p] = []
        self.score = [s + r for s, r in zip(self.score, self.reward, strict=True)]
        for p in dead:
            self.snakes[p], self.heading[p] = self._new_snake()
        self._refill()
        self.over = self.time == 200 or sum(map(len, self.snakes)) + 5 > 200

    def _new_snake(self) -> tuple[list[Cell], int]:
        free = set(self.free())
        for start in sorted(free):
            queue, order = [start], [start]
            while queue:
                cell = queue.pop(0)
                for direction in (3, 1, 0, 2):
                    near = move(cell, direction)
                    if near in free and near not in order:
                        order.append(near)
                        queue.append(near)
            if len(order) >= 3:
                first, second, third = order[:3]
                beside = third in [move(first, k) for k in range(4)]
                snake = [second, first, third] if beside else [first, second, third]
                return snake, next(k for k in range(4) if move(snake[1], k) == snake[0])
        raise AssertionError("these games have room")

    def greedy(self, players: range) -> list[int]:
        left, moves = list(self.beans), []
        bodies = {cell for snake in self.snakes for cell in snake}
        for p in players:
            head = self.snakes[p][0]
            target = min(left, key=lambda bean: math.dist(head, bean))
            left.remove(target)
            options = [k for k in range(4) if move(head, k) not in bodies] or [0]
            moves.append(min(options, key=lambda k: math.dist(move(head, k), target)))
        return moves

    def script(self, name: str, players: range) -> list[int]:
        if name == "greedy":
            return self.greedy(players)
        return [self.opponent_luck.below(4) for _ in players]

    # What is seen and paid

    def order(self, me: int) -> list[int]:
        """Players by the number that `me`'s side gives them."""
        return [0, 1, 2, 3, 4, 5] if me < 3 else [3, 4, 5, 0, 1, 2]

    def vector(self, me: int, width: int) -> list[float]:
        order, head = self.order(me), self.snakes[me][0]

        def code(cell: Cell) -> int:
            owners = [q for q, p in enumerate(order) if cell in self.snakes[p]]
            return 2 + owners[0] if owners else int(cell in self.beans)

        def offset(cell: Cell) -> tuple[int, int]:
            return around(cell[1] - head[1], COLUMNS), around(cell[0] - head[0], ROWS)

        numbers: list[float] = [*head, *(code(move(head, k)) for k in range(4))]
        numbers += [x for bean in self.beans for x in bean]
        heads = [x for p in order if p != me for x in self.snakes[p][0]]
        if width == 26:
            return numbers + heads
        for bean in sorted(self.beans, key=lambda b: math.hypot(*offset(b)))[:2]:
            numbers += [*offset(bean), math.hypot(*offset(bean))]
        numbers += [len(self.snakes[me]) / 20, *heads]
        for p in order[3:5]:
            closeness = 1 / (math.hypot(*offset(self.snakes[p][0])) + 1)
            numbers.append(closeness * len(self.snakes[p]) / len(self.snakes[me]))
        return numbers

    def images(self, me: int) -> NDArray[np.uint8]:
        order = self.order(me)
        mates = [p for p in order[:3] if p != me]
        heads = {p: [self.snakes[p][0]] for p in range(6)}
        channels: list[list[Cell]] = [
            [cell for snake in self.snakes for cell in snake],
            heads[me],
            [heads[p][0] for p in order[:3]],
            [heads[p][0] for p in order[3:]],
            self.beans,
            *(self.snakes[p] for p in (me, *mates, *order[3:])),
        ]
        return drawn(channels)

    def state(self, side: int) -> NDArray[np.uint8]:
        order = self.order(3 * side)
        bodies = [self.snakes[p] for p in order]
        return drawn([*bodies, *([body[0]] for body in bodies), self.beans])

    def turned(self, me: int, turn: int) -> int:
        """The direction of a turn: 0 ahead, 1 back, 2 left, 3 right."""
        rows, columns = STEPS[self.heading[me]]
        steps = {0: (rows, columns), 1: (-rows, -columns), 2: (-columns, rows), 3: (columns, -rows)}
        return next(k for k, step in STEPS.items() if step == steps[turn])

    def egocentric(self, me: int) -> NDArray[np.float32]:
        heads = [snake[0] for snake in self.snakes]
        mates = [p for p in self.order(me)[:3] if p != me]
        enemies = self.order(me)[3:]

        def frame(rows: int, columns: int) -> tuple[int, int]:
            """Ahead and right of a displacement."""
            ahead, right = STEPS[self.heading[me]], STEPS[self.turned(me, 3)]
            return tuple(rows * r + columns * c for r, c in (ahead, right))  # type: ignore[return-value]

        def offset(cell: Cell) -> tuple[int, int]:
            rows, columns = cell[0] - heads[me][0], cell[1] - heads[me][1]
            return frame(around(rows, ROWS), around(columns, COLUMNS))

        def apart(a: Cell, b: Cell) -> int:
            return abs(around(a[0] - b[0], ROWS)) + abs(around(a[1] - b[1], COLUMNS))

        window = np.zeros((5, 9, 9))
        stays: dict[Cell, int] = {}
        for snake in self.snakes:
            for i, cell in enumerate(snake):
                stays[cell] = max(stays.get(cell, 0), len(snake) - i)
        for cell in {*stays, *self.beans}:
            ahead, right = offset(cell)
            if max(abs(ahead), abs(right)) <= 4:
                window[:, 4 - ahead, 4 + right] = (
                    cell in stays,
                    min(stays.get(cell, 0), 20) / 20,
                    cell in self.beans,
                    any(heads[p] == cell for p in mates),
                    any(heads[p] == cell for p in enemies),
                )
        numbers = window.ravel().tolist()
        for bean in sorted(self.beans, key=lambda b: apart(heads[me], b)):
            own = apart(heads[me], bean)
            numbers += [x / 10 for x in offset(bean)] + [1 / (1 + own)]
            for others in (mates, enemies):
                numbers.append((min(apart(heads[p], bean) for p in others) - own) / 10)
        for p in mates + enemies:
            numbers += [x / 10 for x in offset(heads[p])] + [1 / (1 + apart(heads[p], heads[me]))]
            numbers += [len(self.snakes[p]) / 20, *frame(*STEPS[self.heading[p]])]
        for turn in (0, 2, 3):
            numbers += self._move(me, move(heads[me], self.turned(me, turn)), mates, enemies)
        lead = sum(self.score[p] for p in [me, *mates]) - sum(self.score[p] for p in enemies)
        numbers += [len(self.snakes[me]) / 20, float(self.heading[me] < 2), 1 - self.time / 200]
        numbers += [lead / 20, *(float(me % 3 == k) for k in range(3))]
        return np.array(numbers, np.float32)

    def _move(self, me: int, cell: Cell, mates: list[int], enemies: list[int]) -> list[float]:
        """What egocentric tells of a neighbouring cell."""
        bodies = {c for snake in self.snakes for c in snake}
        reached, queue = {cell: 0}, [cell]
        for c in queue:
            for near in (move(c, k) for k in range(4)):
                if near not in bodies and near not in reached:
                    reached[near] = reached[c] + 1
                    queue.append(near)
        near_bean = min((s for c, s in reached.items() if c in self.beans), default=None)
        room, share, bean = len(reached) / 200, len(reached) / len(self.snakes[me]), 0.0
        if near_bean is not None:
            bean = 1 / (1 + near_bean)
        beside = [
            sum(self.snakes[p][0] in [move(cell, k) for k in range(4)] for p in team) / len(team)
            for team in (mates, enemies)
        ]
        if any(cell in snake[:-1] for snake in self.snakes):
            return [0, 0, 0, *beside, 0, 1, 0]
        owners = [s for p, s in enumerate(self.snakes) if p != me and cell == s[-1]]
        may_stay = any(move(s[0], k) in self.beans for s in owners for k in range(4))
        territory = self.territory(me, cell)
        first = [1 / (1 + territory), min(1, territory / len(self.snakes[me]))]
        return [room, min(1, share), bean, *beside, float(may_stay), *first]

    def spread(self, starts: dict[Cell, int], rivals: dict[Cell, int]) -> dict[Cell, int]:
        """Cell -> the number of the move that enters it first, if before the rivals'."""
        gone = {c: len(s) - i for s in self.snakes for i, c in enumerate(s)}
        reached = dict(starts)
        for number in range(1, ROWS * COLUMNS):
            edge = [c for c, s in reached.items() if s == number - 1]
            for cell in (move(c, k) for c in edge for k in range(4)):
                if cell not in reached and gone.get(cell, 0) <= number < rivals.get(cell, 200):
                    reached[cell] = number
        return reached

    def territory(self, me: int, cell: Cell) -> int:
        """Cells that `me` is the first to reach if it moves to a cell now."""
        rivals = self.spread({s[0]: 0 for p, s in enumerate(self.snakes) if p != me}, {})
        return len(self.spread({cell: 1}, rivals)) if rivals.get(cell, 200) > 1 else 0

    def mask(self, me: int, kind: str) -> list[int]:
        back = [int(k != REVERSE[self.heading[me]]) for k in range(4)]
        blocked = {cell for snake in self.snakes for cell in snake[:-1]}
        legal = [int(move(self.snakes[me][0], k) not in blocked) for k in range(4)]
        return legal if kind == "legal" and any(legal) else back

    def paid(self, me: int, kind: str, extras: bool) -> float:
        order, r = self.order(me), self.reward
        ahead = sum(self.score[p] for p in order[:3]) - sum(self.score[p] for p in order[3:])
        result = (ahead > 0) - (ahead < 0)
        if kind == "game":
            return r[me]
        if kind == "zero-sum":
            team, enemy = (sum(r[p] for p in o) / 3 for o in (order[:3], order[3:]))
            own = 0.8 * (r[me] - enemy) + 0.2 * (team - enemy)
            return own + 10 * result * self.over
        total = {1: (10, 50), 0: (0, 0), -1: (-5, -25)}[result][self.over] + 0.0
        nearest = min(math.dist(self.snakes[me][0], bean) for bean in self.beans)
        total += 20 if r[me] > 0 else -nearest
        total -= 10 * (r[me] < 0)
        if extras:
            total += 0.05 if r[me] > 0 else 0.1 / (nearest + 1)
            total += 0.1 * (r[me] >= 0)
        return total


def drawn(channels: list[list[Cell]]) -> NDArray[np.uint8]:
    images = np.zeros((len(channels), ROWS, COLUMNS), np.uint8)
    for image, cells in zip(images, channels, strict=True):
        for cell in cells:
            image[cell] = 255
    return images


def snapshot(games: Any, n: int) -> dict[str, Any]:
    """A compiled game in a plain game's terms."""

    def cells(numbers: NDArray[np.int16]) -> list[Cell]:
        return [divmod(int(x), COLUMNS) for x in numbers]

    return {
        "snakes": [cells(games.body[n, p, : games.length[n, p]]) for p in range(6)],
        "heading": games.heading[n].tolist(),
        "beans": cells(games.bean[n]),
        "reward": games.reward[n].tolist(),
        "score": games.score[n].tolist(),
        "deaths": games.deaths[n].tolist(),
        "eaten": games.eaten[n].tolist(),
        "over": bool(games.over[n]),
        "time": int(games.time[n]),
    }
