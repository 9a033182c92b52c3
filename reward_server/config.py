"""Configuration of one reward server."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]


class ScorerConfig(BaseModel):
    """One scorer: a built-in by name or a function by path."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: str = Field(description="what callers ask for")
    use: str = Field(description='a built-in ("exact", "last_number", "reasoning_gym", ...) or "module:function"')
    args: dict[str, str | int | float | bool] = Field(default_factory=dict, description="keyword arguments for every call")
    limit_s: float = Field(10.0, gt=0, description="wall-clock limit of one call; its process is killed then")


class RewardConfig(BaseModel):
    """The scorers and how many processes run them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    address: str = Field("127.0.0.1:0", description="where RewardService listens; port 0 takes a free one")
    scorers: tuple[ScorerConfig, ...] = Field(min_length=1)
    default: str = Field("", description="scorer of requests that name none; empty: the first")
    workers: Count = Field(1, description="scorer processes")
    max_pending: Count = Field(4096, description="items read but not answered; reading waits above")

    @model_validator(mode="after")
    def _contradictions(self) -> RewardConfig:
        names = [scorer.name for scorer in self.scorers]
        if len(set(names)) != len(names):
            raise ValueError(f"scorers: names must differ, got {names}")
        if self.default and self.default not in names:
            raise ValueError(f"default={self.default!r} is none of the scorers {names}; name one of them")
        return self
