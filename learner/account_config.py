"""Configuration of the account: what is sampled, how far ahead, how groups are lent, which are worth training on, where it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from learner.section import Count, Seconds, Section

TokenId = Annotated[int, Field(ge=0, lt=2**31)]

class SamplingConfig(Section):
    """The distribution sampled from and, exactly so, trained on."""

    group_size: Count = Field(8, description="samples of one prompt")
    oversample: int = Field(0, ge=0, description="samples drawn of each prompt beyond group_size: the first group_size to be finished and scored are trained on, the rest is stopped. Favours short samples")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_new_tokens: Count = 256
    stop_token_ids: tuple[TokenId, ...] = Field((), description="empty: every end-of-sequence id that the model's files name")


class AdaptiveStaleness(Section):
    """The admitted staleness follows the measured mismatch, one step at a time; max_staleness is what a run begins with."""

    lowest: int = Field(0, ge=0, description="never less")
    highest: int = Field(ge=1, description="never more")
    metric: Literal["kl_k1", "kl_k3", "beyond_clip_share", "abs_p50", "abs_p90", "abs_p99", "abs_max"] = Field("kl_k3", description="of `mismatch` in metrics.jsonl")
    low: float = Field(ge=0, description="under it one step more is admitted")
    high: float = Field(gt=0, description="over it one step less")

    @model_validator(mode="after")
    def _order(self) -> AdaptiveStaleness:
        if self.lowest >= self.highest:
            raise ValueError(f"staleness.adaptive.lowest={self.lowest} is not under highest={self.highest}: nothing could change; use a lower one, or leave adaptive out")
        if self.low >= self.high:
            raise ValueError(f"staleness.adaptive.low={self.low} is not under high={self.high}: the bound would never rest; use a lower one")
        return self


class StalenessConfig(Section):
    """How far generation may run ahead (docs/staleness.md)."""

    max_staleness: int = Field(1, ge=0, description="S, in steps")
    window: Count = Field(1, description="W, straggler window in groups; 1 is lease order")
    adaptive: AdaptiveStaleness | None = Field(None, description="None: max_staleness is admitted throughout")

    @property
    def lowest(self) -> int:
        """The least that may be admitted in the run."""
        return self.max_staleness if self.adaptive is None else self.adaptive.lowest

    @property
    def highest(self) -> int:
        """The most."""
        return self.max_staleness if self.adaptive is None else self.adaptive.highest


class LeaseConfig(Section):
    """Loans of groups to actors."""

    lapse_s: Seconds = Field(600.0, description="a lease not fulfilled by then is lent again")
    max_attempts: Count = Field(3, description="leases of one group before it is dropped")
    report_every_tokens: int = Field(1024, ge=0, description="a replica reports an unfinished sample whenever it has drawn so many more tokens of it, so that another goes on from there when it dies; 0: never")
    max_progress_bytes: Count = Field(256 << 20, description="tokens and log-probs kept of unfinished samples; what does not fit is drawn again after a death")
    heartbeat_s: Seconds = 1.0
    silence_s: Seconds = Field(10.0, description="a replica not heard of for so long is gone")
    alone_minutes: float | None = Field(60.0, gt=0, description="a batch that is waited for with no replica for so long ends the run with a message, after a cut; None: waits for ever")


class FilterConfig(Section):
    """Which complete groups are worth training on."""

    min_usable: int = Field(2, ge=1, description="usable samples below which a group is dropped")
    unscored: Literal["drop_sample", "drop_group", "fallback"] = Field("drop_sample", description="what becomes of a sample whose scorer had no answer; fallback: unscored_value is its reward")
    unscored_value: float | None = Field(None, description="with unscored: fallback only")
    max_unscored_share: float | None = Field(0.5, ge=0, le=1, description="of the last 512 samples, without a score or by an environment that failed; above, the run stops with a message; None: it never does")
    zero_signal: bool = Field(False, description="drop groups whose rewards are all equal, and sample others instead")
    max_flat_a_step: Count | None = Field(None, description="groups dropped for zero signal since the last batch, after which `then` happens; None: no such bound")
    then: Literal["train", "fail"] = Field("train", description="train: the batch is filled with groups without signal, counted; fail: the run ends")
    stop_flat_after: int | None = Field(None, ge=2, description="with zero_signal: a group whose first so many usable samples have equal rewards is dropped and its rest stopped; None: only whole groups are judged")
    max_consecutive_drops: Count = Field(256, description="groups dropped one after another before the run stops with a message")

    @model_validator(mode="after")
    def _early(self) -> FilterConfig:
        if self.stop_flat_after is not None and not self.zero_signal:
            raise ValueError(f"filter.stop_flat_after={self.stop_flat_after} with zero_signal=false: groups without signal are trained on then; set zero_signal: true, or leave stop_flat_after out")
        return self

    @model_validator(mode="after")
    def _fallback(self) -> FilterConfig:
        if (self.unscored == "fallback") != (self.unscored_value is not None):
            raise ValueError(f"filter.unscored={self.unscored} with unscored_value={self.unscored_value}: a fallback and its value belong together; give both, or neither")
        return self


class JournalConfig(Section):
    """The account's journal (docs/durability.md)."""

    backend: Literal["segments", "redis"] = "segments"
    url: str = Field("", description="redis only: redis://HOST:PORT/NUMBER")
    segment_bytes: int = Field(64 << 20, ge=4096, description="segments only: a new file after this many bytes")
    max_groups: Count = Field(100_000, description="groups that no cut covers; from there on a cut comes before the next batch")
    max_bytes: int = Field(16 << 30, ge=1 << 16, description="bytes that no cut covers; as max_groups")
