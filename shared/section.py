"""Base classes of the configuration's sections."""

from collections.abc import Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

_EXACT = 2**53  # floats from here on skip whole numbers
_MOST_S = 1e9  # 30 years; longer waits overflow the system's clocks

# A number that 0 leaves to murmur; `auto` says the same.
Auto = Annotated[int, BeforeValidator(lambda value: 0 if value == "auto" else value)]
# The same where 0 is a number like any other: null, or `auto`.
Open = Annotated[int | None, BeforeValidator(lambda value: None if value == "auto" else value)]


class Section(BaseModel):
    """Base of every part of the configuration: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other values, which are not checked again.

        Args:
            changes: values by dotted key: {"learner.port": 0}.
        """
        own: dict[str, Any] = {}
        for key, value in changes.items():
            name, _, below = key.partition(".")
            part = own.get(name, getattr(self, name))
            own[name] = part.changed({below: value}) if below else value
        return self.model_copy(update=own)

    @field_validator("*", mode="before")
    @classmethod
    def _is_exact(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a float as a whole number if it is too large to be exact."""
        if isinstance(value, float) and abs(value) >= _EXACT:
            kind = cls.model_fields[info.field_name or ""].annotation
            if int in (kind, *get_args(kind)) and float not in get_args(kind):
                raise ValueError(f"{value:g} is not exact as a whole number: write all its digits")
        return value

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: object, info: ValidationInfo) -> object:
        """Refuse numbers too large for a wait (s) or an array."""
        if isinstance(value, int | float) and abs(value) > _MOST_S:
            if (info.field_name or "").endswith("_s"):
                raise ValueError(f"{value:g} s is too long: at most {_MOST_S:g} s")
            if abs(value) >= 2**63:
                raise ValueError(f"{float(value):g} is too large")
        return value


class PluginConfig(BaseModel):
    """A plug-in by name, with its options inline."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Return all values but the name, as given."""
        return dict(self.model_extra or {})


NO_PLUGIN = PluginConfig(name="")
