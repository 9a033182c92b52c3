"""Configuration of one reward server."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

Count = Annotated[int, Field(ge=1)]


class ScorerConfig(BaseModel):
    """One scorer: a built-in by name or a function by path."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    name: str = Field(min_length=1, description="what callers ask for")
    use: str = Field(min_length=1, description='a built-in ("exact", "last_number", "reasoning_gym", ...) or "module:function"')
    args: dict[str, JsonValue] = Field(default_factory=dict, description="keyword arguments for every call")
    limit_s: float = Field(10.0, gt=0, description="wall-clock limit of one call; its process is killed then")


class RewardConfig(BaseModel):
    """The scorers, how many processes run them, and what bounds them (docs/rewards.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    address: str = Field("127.0.0.1:0", description="where RewardService listens; port 0 takes a free one")
    scorers: tuple[ScorerConfig, ...] = Field(description="at least one")
    default: str = Field("", description="scorer of requests that name none; empty: the first")
    workers: Count = Field(1, description="scorer processes that work at once")
    spares: int = Field(1, ge=0, description="further processes kept ready to take the place of one that is slow or dead")
    max_slow: Count = Field(8, description="calls of one scorer that may outlast patience_s at once; its next ones wait, other scorers' do not")
    patience_s: float = Field(0.25, gt=0, description="a call that takes longer no longer holds up those behind it")
    memory_bytes: int = Field(4 << 30, ge=256 << 20, description="private memory of one scorer process; an allocation above it fails")
    load_limit_s: float = Field(120.0, gt=0, description="limit for importing the scorers")
    max_pending: Count = Field(4096, description="items of one stream read but not answered; reading waits above")
    max_pending_bytes: int = Field(256 << 20, ge=1 << 20, description="their text together; reading waits above")
    grace_s: float = Field(10.0, ge=0, description="time for items already read when the server is told to stop")

    @model_validator(mode="after")
    def _contradictions(self) -> RewardConfig:
        if not self.scorers:  # not a bound of the field, which would be told beside each mistake in a scorer
            raise ValueError("scorers: the list is empty: a reward server without a scorer has nothing to do; give one, for instance {name: answer, use: exact}")
        names = [scorer.name for scorer in self.scorers]
        if len(set(names)) != len(names):
            raise ValueError(f"scorers: names must differ, got {names}")
        if self.default and self.default not in names:
            raise ValueError(f"default={self.default!r} is none of the scorers {names}; name one of them")
        return self
