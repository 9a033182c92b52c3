"""Configuration of scorers that compare the samples of one prompt."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    of: str = Field(min_length=1, description="name of another scorer")


class RankConfig(_Group):
    """The rank of the score of `of` among the group, 0 to 1."""

    op: Literal["rank"]


class TournamentConfig(_Group):
    """The share of comparisons won; `of` compares: the completion with the record's field `other`, 1 where the completion is better, 0 where the other is."""

    op: Literal["tournament"]
    opponents: int = Field(0, ge=0, description="comparisons of each sample; 0: with all others. Fewer than all must be even")
    both_orders: bool = Field(True, description="ask each comparison both ways round, against a liking for the first place")

    @model_validator(mode="after")
    def _even(self) -> TournamentConfig:
        if self.opponents % 2:
            raise ValueError(f"opponents={self.opponents} must be even, half of them lie to each side; give {self.opponents + 1}, or 0 for all")
        return self


GroupConfig = RankConfig | TournamentConfig
