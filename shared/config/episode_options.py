"""Options of an environment that differ between episodes: a curriculum's, and random ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from murmur.shared.config.section import Model, PluginConfig, Section, validate
from murmur.shared.config.text import short
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.seeding import unit

MOST_OPTIONS = 64
MOST_CHARACTERS = 200  # of a name, or of a value that is a word
_EXACT = 2**53  # whole numbers up to which floats, and every language, are exact

Value = bool | int | float | str
Number = Annotated[float, Field(strict=True)]


class Threshold(Section):
    """Condition on recent training episodes under which a course goes to its next level."""

    metric: str = Field(
        min_length=1, description="result of training episodes: return, or a metric of theirs"
    )
    above: Number | None = Field(None, description="the mean must be more than this")
    below: Number | None = Field(None, description="the mean must be less than this")
    over_episodes: int = Field(
        100, ge=1, description="finished episodes, begun at the level, that the mean is taken over"
    )

    @model_validator(mode="after")
    def _has_one_bound(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("give one bound of the metric: above, or below where less is better")
        return self

    def met(self, mean: float) -> bool:
        """Return whether a mean of the metric meets the condition."""
        return mean > self.above if self.above is not None else mean < (self.below or 0.0)


class Course(Section):
    """Course of one option over a run: a line from one number to another, or levels."""

    from_: Number | None = Field(None, alias="from", description="first value of a line")
    to: Number | None = Field(None, description="last value of a line; may be less than `from`")
    whole: bool = Field(False, description="values of a line are rounded to whole numbers")
    levels: tuple[Value, ...] = Field(
        (), description="values in their order: numbers, words, true or false"
    )
    over_env_steps: int = Field(
        0, ge=0, description="environment steps until the last value is reached"
    )
    over_updates: int = Field(0, ge=0, description="updates until the last value is reached")
    when: Threshold | None = Field(
        None, description="levels: go to the next one when training episodes are so good"
    )

    @model_validator(mode="after")
    def _is_one_course(self) -> Self:
        line = self.from_ is not None or self.to is not None
        clocks = [self.over_env_steps > 0, self.over_updates > 0, self.when is not None]
        if line == bool(self.levels) or (line and None in (self.from_, self.to)):
            raise ValueError("give levels, or from and to")
        if sum(clocks) != 1:
            raise ValueError("give one of over_env_steps, over_updates and, with levels, when")
        if line and self.when is not None:
            raise ValueError("when chooses between levels: give levels in place of from and to")
        if self.levels and self.whole:
            raise ValueError("whole is for from and to: write levels as they are meant")
        if self.levels and len(self.levels) < 2:
            raise ValueError(f"levels={list(self.levels)}: a course has at least two")
        for level in self.levels:
            _check_value(level)
        for end in (self.from_, self.to):
            if self.whole and end is not None:
                _check_value(round(end))
        return self

    @property
    def last(self) -> Value:
        """Return the value that the course ends with, which evaluations use."""
        return self.at(1.0)

    def level_at(self, share: float) -> int:
        """Return the level after this share of a schedule, 0 to 1: all levels last equally long."""
        return min(int(share * len(self.levels)), len(self.levels) - 1)

    def at(self, share: float) -> Value:
        """Return the value after this share of a schedule, 0 to 1."""
        if self.levels:
            return self.levels[self.level_at(share)]
        assert self.from_ is not None
        assert self.to is not None
        value = self.to if share >= 1 else self.from_ + share * (self.to - self.from_)
        return round(value) if self.whole else value


class Range(Section):
    """Distribution that each episode draws an option from, by its seed."""

    low: Number | None = Field(None, description="least value")
    high: Number | None = Field(None, description="largest value")
    log: bool = Field(False, description="uniform in the logarithm")
    whole: bool = Field(False, description="whole numbers, both bounds included")
    choices: tuple[Value, ...] = Field((), description="values that are equally likely")

    @model_validator(mode="after")
    def _is_one_range(self) -> Self:
        low, high = self.low, self.high
        if bool(self.choices) == (low is not None or high is not None):
            raise ValueError("write [low, high], {low, high, log or whole}, or {choices: [...]}")
        for value in self.choices:
            _check_value(value)
        if self.choices and (self.log or self.whole):
            raise ValueError("log and whole are for low and high: leave them out beside choices")
        if self.choices:
            return self
        if low is None or high is None:
            raise ValueError("low and high belong together: write both")
        if low > high:
            raise ValueError(f"[{low:g}, {high:g}]: write the least value first")
        if self.log and low <= 0:
            raise ValueError(f"low={low:g}: with log it must be more than 0")
        if self.whole and (self.log or not low.is_integer() or not high.is_integer()):
            raise ValueError("whole takes whole bounds, and no log")
        if self.whole:
            _check_value(int(low))
            _check_value(int(high))
        return self

    def draw(self, chance: float) -> Value:
        """Return the value for a random number that is uniform over [0, 1)."""
        if self.choices:
            return self.choices[int(chance * len(self.choices))]
        assert self.low is not None
        assert self.high is not None
        if self.whole:
            return int(self.low) + int(chance * (self.high - self.low + 1))
        if self.log:
            # Twelve digits: libraries differ in the last ones of a logarithm.
            value = self.low * math.exp(chance * math.log(self.high / self.low))
            return min(max(float(f"{value:.12g}"), self.low), self.high)
        return self.low + chance * (self.high - self.low)


class EnvironmentConfig(PluginConfig):
    """An environment by name, with its options inline and those that differ between episodes."""

    curriculum: dict[str, dict[str, Any]] = Field(
        {},
        description="options of an episode that the learner changes during the run: "
        "{wind: {from: 0, to: 10, over_env_steps: 100000}} or {wind: {levels: [0, 5, 10], when: "
        "{metric: return, above: 9, over_episodes: 100}}}; evaluations use the last value",
    )
    randomize: dict[str, Any] = Field(
        {},
        description="options that each episode draws by its seed, in evaluations, too: "
        "{mass: [0.5, 2.0]}, {low, high, log: true or whole: true}, or {choices: [a, b]}",
    )

    @model_validator(mode="before")
    @classmethod
    def _takes_plugins(cls, data: object) -> object:
        """Accept a PluginConfig, as the Python API gives it."""
        return data.model_dump() if type(data) is PluginConfig else data

    @field_validator("curriculum", "randomize")
    @classmethod
    def _has_valid_options(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name, given in value.items():
            _check_name(name)
            _parsed(Course if info.field_name == "curriculum" else Range, given, name)
        return value

    @model_validator(mode="after")
    def _sets_each_option_once(self) -> Self:
        for name in self.curriculum:
            if name in self.randomize:
                raise ValueError(f"curriculum and randomize both set '{name}': keep one of them")
        arguments = (self.model_extra or {}).get("arguments")
        fixed = arguments if isinstance(arguments, Mapping) else {}
        for where, options in (("curriculum", self.curriculum), ("randomize", self.randomize)):
            for name in options:
                if name in fixed:
                    raise ValueError(
                        f"arguments.{name}={short(fixed[name])} and {where}.{name} both set "
                        f"'{name}': arguments are fixed, {where} changes it: keep one of them"
                    )
        if (count := len(self.curriculum) + len(self.randomize)) > MOST_OPTIONS:
            raise ValueError(f"{count} options differ between episodes; {MOST_OPTIONS} may")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {k: v for k, v in data.items() if v or k not in ("curriculum", "randomize")}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the options that differ between episodes."""
        return (*self.curriculum, *self.randomize)

    @cached_property
    def courses(self) -> dict[str, Course]:
        """Return the curriculum's courses by option."""
        return {name: _parsed(Course, course, name) for name, course in self.curriculum.items()}

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """Return the ranges that episodes draw from, by option."""
        return {name: _parsed(Range, spread, name) for name, spread in self.randomize.items()}

    def values_at(self, share: float) -> dict[str, Value]:
        """Return the curriculum's values after this share of each course, 0 to 1."""
        return {name: course.at(share) for name, course in self.courses.items()}

    def drawn(self, seed: int) -> dict[str, Value]:
        """Draw the options of an episode: a pure function of its seed and each option's name."""
        return {name: spread.draw(unit(seed, name)) for name, spread in self.ranges.items()}


@dataclass(frozen=True)
class Values:
    """Values of a curriculum that are in force together. Never changed: replaced.

    Attributes:
        options: value of each option.
        levels: level of each option that has levels, from 0.
    """

    options: Mapping[str, Value]
    levels: Mapping[str, int]


NO_ENVIRONMENT = EnvironmentConfig(name="")


def _parsed(model: type[Model], data: object, name: str) -> Model:
    """Build a model of one option; [low, high] stands for a range with these bounds.

    Raises:
        ValueError: if it is invalid, naming the key and the fix.
    """
    if model is Range and isinstance(data, list | tuple) and len(data) == 2:
        data = {"low": data[0], "high": data[1]}
    if not isinstance(data, Mapping):
        raise ValueError(f"'{name}' = {short(data)}: {_SHAPES[model]}")
    try:
        return validate(model, data, name)
    except ConfigError as error:
        raise ValueError(str(error)) from None


_SHAPES: dict[type[Any], str] = {
    Course: "write {from, to, over_env_steps or over_updates}, or {levels, when}",
    Range: "write [low, high], {low, high, log or whole}, or {choices: [...]}",
}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MOST_CHARACTERS:
        raise ValueError(f"{short(name)} is no name of an option: write a word")


def _check_value(value: Value) -> None:
    """Refuse a value that does not travel unchanged."""
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise ValueError(
            f"{short(value)} has {len(value)} characters; {MOST_CHARACTERS} may travel"
        )
    if isinstance(value, int) and abs(value) > _EXACT:
        raise ValueError(f"{value} is beyond {_EXACT}: not every language has it exactly")
