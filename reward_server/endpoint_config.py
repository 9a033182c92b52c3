"""Configuration of scorers that are remote calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class RemoteConfig(BaseModel):
    """What bounds the calls of one remote scorer, whatever it speaks (docs/rewards.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    attempt_s: Seconds | None = Field(None, description="wall-clock limit of one attempt; None: half of the scorer's limit_s")
    retries: int = Field(3, ge=0, description="further attempts of one call after failures that may pass")
    concurrency: Count = Field(64, description="attempts under way at once, all upstreams together")
    rate_per_s: Seconds | None = Field(None, description="attempts that may begin in a second; None: as many as come")
    burst: Count = Field(1, description="of these, how many at once after a rest")
    hedge_share: float = Field(0.05, ge=0, le=1, description="share of attempts that may be made a second time when they are later than 95 % of the others; 0: none")
    breaker_failures: Count = Field(5, description="failures in a row after which an upstream is not called for a while")
    breaker_open_s: Seconds = Field(2.0, description="that while at first; doubled for each probe that fails, up to 60 s")
    batch_items: Count = Field(16, description="calls in one attempt at most; the size follows what the endpoint answers in time")
    batch_wait_s: float = Field(0.005, ge=0, description="how long a call waits for company while others are under way")
    queue_items: Count = Field(4096, description="calls that wait; above, the least urgent are unscored (overloaded)")
    queue_bytes: int = Field(256 << 20, ge=1 << 16, description="their text; as above")
    token_env: str = Field("", description="environment variable that holds the bearer token it is sent")
    token_file: Path | None = Field(None, description="file that holds the token")
    ca: Path | None = Field(None, description="certificates to check the endpoint's against, PEM; None: the system's for https, plain text for gRPC")


class HttpConfig(RemoteConfig):
    """An endpoint that is POSTed batches of items (docs/rewards.md has the schema)."""

    urls: tuple[str, ...] = Field(min_length=1, description="one or several that answer alike")
    format: Literal["json", "msgpack"] = "json"

    @field_validator("urls")
    @classmethod
    def _urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")) or len(url.split("/")) < 3 or not url.split("/")[2]:
                raise ValueError(f"{url!r} is no URL; give http://HOST:PORT/PATH or https://…")
            if "@" in url.split("/")[2]:
                raise ValueError("a URL here holds a user or password, which would end in logs; give token_env or token_file")
        return urls


class GrpcConfig(RemoteConfig):
    """A reward server, or anything else that serves protos.reward.v1alpha1."""

    addresses: tuple[str, ...] = Field(min_length=1, description="host:port of one or several that answer alike")
    scorer: str = Field("", description="name of the scorer there; empty: its default")

    @model_validator(mode="after")
    def _addresses(self) -> GrpcConfig:
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in address:
                raise ValueError(f"addresses: {address!r} must be host:port, for instance 127.0.0.1:7450")
        return self
