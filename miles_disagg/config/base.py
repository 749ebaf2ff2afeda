"""What every configuration section shares: immutability, strict names, and numeric bounds as annotations.

Bounds are checked by `checks.ranges`, not at construction, so that all problems of a run are reported together.
The flags themselves are in the sections; parsing is `flags`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of flags. Unknown keys are errors; a field's docstring is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class Bounds:
    """Legal range of a number: `low` and `high` inclusive unless `open_low`; None is unbounded."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def allows(self, value: float | str) -> bool:
        """True if `value` lies inside, or is a word that stands for a number. NaN lies nowhere."""
        if isinstance(value, str):
            return True
        if value != value:
            return False
        if self.low is not None and (value <= self.low if self.open_low else value < self.low):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'above' if self.open_low else 'at least'} {self.low:g}")
        if self.high is not None:
            parts.append(f"at most {self.high:g}")
        return " and ".join(parts)


PositiveInt = Annotated[int, Bounds(low=1)]
NonNegativeInt = Annotated[int, Bounds(low=0)]
PositiveFloat = Annotated[float, Bounds(low=0, open_low=True)]
NonNegativeFloat = Annotated[float, Bounds(low=0)]
Fraction = Annotated[float, Bounds(low=0, high=1)]
Probability = Annotated[float, Bounds(low=0, high=1, open_low=True)]
Seconds = Annotated[float, Bounds(low=0, open_low=True)]
Port = Annotated[int, Bounds(low=0, high=65535)]


def bounds_of(annotation: Any, metadata: list[Any]) -> Bounds | None:
    """The Bounds of a field, also where it is optional (`PositiveInt | None`)."""
    for item in metadata:
        if isinstance(item, Bounds):
            return item
    for part in get_args(annotation):
        found = next((m for m in getattr(part, "__metadata__", ()) if isinstance(m, Bounds)), None)
        if found is not None:
            return found
    return None
