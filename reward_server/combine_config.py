"""Configuration of scorers that are made of other scorers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Name = Annotated[str, Field(min_length=1)]


class _Combine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class SumConfig(_Combine):
    """Σ weight · score."""

    op: Literal["sum"]
    of: dict[Name, float] = Field(min_length=1, description="weight of each scorer by name")


class ProductConfig(_Combine):
    """Π score."""

    op: Literal["product"]
    of: tuple[Name, ...] = Field(min_length=1)


class GateConfig(_Combine):
    """The score of `of` where that of `by` reaches `at_least`, else `otherwise`; then `of` is not asked at all."""

    op: Literal["gate"]
    of: Name
    by: Name
    at_least: float = 1.0
    otherwise: float = 0.0


class ClipConfig(_Combine):
    """The score of `of`, not below `low` and not above `high`."""

    op: Literal["clip"]
    of: Name
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _bounds(self) -> ClipConfig:
        if self.low is None and self.high is None:
            raise ValueError("clip with neither low nor high changes nothing; give one of them")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"clip with low={self.low:g} above high={self.high:g}; exchange them")
        return self


class NormaliseConfig(_Combine):
    """(score − mean) ÷ standard deviation of the scores of `of` so far in this server."""

    op: Literal["normalise"]
    of: Name
    halflife: float = Field(1000.0, ge=1, description="scores after which one counts half")
    warm_up: int = Field(32, ge=2, description="scores until which the deviation is taken as 1")


class RouteConfig(_Combine):
    """The score of one scorer, chosen by a field of the prompt's record."""

    op: Literal["route"]
    field: Name = Field(description="for instance the data set's name")
    to: dict[str, Name] = Field(min_length=1, description="scorer for each value of the field")
    otherwise: str = Field("", description="scorer for other values and records without the field; empty: these are unscored (refused)")

    @field_validator("to", mode="before")
    @classmethod
    def _plain_keys(cls, to: Any) -> Any:
        """YAML reads 7 and true as themselves; the record's field is compared as Python writes it."""
        return {str(key) if isinstance(key, int) else key: name for key, name in to.items()} if isinstance(to, dict) else to


CombineConfig = Annotated[SumConfig | ProductConfig | GateConfig | ClipConfig | NormaliseConfig | RouteConfig, Field(discriminator="op")]


def names_in(combine: CombineConfig) -> list[str]:
    """The scorers that it may ask."""
    if isinstance(combine, SumConfig | ProductConfig):
        return list(combine.of)
    if isinstance(combine, GateConfig):
        return [combine.of, combine.by]
    if isinstance(combine, RouteConfig):
        return [*combine.to.values(), *([combine.otherwise] if combine.otherwise else [])]
    return [combine.of]


def check_names(combines: dict[str, CombineConfig], known: list[str]) -> None:
    """Raises ValueError for a name that is no scorer, and for one that is made of itself."""
    for name, combine in combines.items():
        unknown = [part for part in names_in(combine) if part not in known]
        if unknown:
            raise ValueError(f"scorer {name!r} combines {unknown}, none of the scorers {known}; correct the name or add the scorer")
    settled = [name for name in known if name not in combines]
    left = dict(combines)
    while ready := [name for name, combine in left.items() if all(part in settled for part in names_in(combine))]:
        settled += ready
        left = {name: combine for name, combine in left.items() if name not in ready}
    if left:
        raise ValueError(f"scorers {sorted(left)} are made of each other in a circle; break it")
