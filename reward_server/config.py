"""Configuration of one reward server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from protos.security import SecurityConfig
from reward_server.combine_config import CombineConfig, check_names, names_in
from reward_server.endpoint_config import GrpcConfig, HttpConfig
from reward_server.group_config import GroupConfig
from reward_server.judge_config import JudgeConfig

Count = Annotated[int, Field(ge=1)]
KINDS = ("use", "http", "grpc", "judge", "combine", "group")


class ScorerConfig(BaseModel):
    """One scorer: a function that runs here (`use`), a remote one (`http`, `grpc`), a language model (`judge`), or one made of others (`combine`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    name: str = Field(min_length=1, description="what callers ask for")
    use: str = Field("", description='a built-in ("exact", "last_number", "reasoning_gym", ...), an entry point, or "module:function"')
    args: dict[str, JsonValue] = Field(default_factory=dict, description="keyword arguments for every call")
    http: HttpConfig | None = Field(None, description="an endpoint that is POSTed JSON or msgpack")
    grpc: GrpcConfig | None = Field(None, description="another reward server")
    judge: JudgeConfig | None = Field(None, description="a language model that is asked about each completion")
    combine: CombineConfig | None = Field(None, description="a rule and the names of other scorers")
    group: GroupConfig | None = Field(None, description="compares the samples of a prompt, by another scorer", discriminator="op")
    whole_group: bool = Field(False, description="`use` only: the function takes all completions of a prompt, and returns a list")
    deterministic: bool = Field(True, description="false: the same item may score differently, so its scores are never cached")
    version: str = Field("", description="part of what cached scores are kept under; change it when the scorer changes in a way that its own file and configuration do not show")
    limit_s: float = Field(10.0, gt=0, description="wall-clock limit of one call; a process that runs it is killed then, a remote call is cancelled")

    @model_validator(mode="after")
    def _one_kind(self) -> ScorerConfig:
        if not self.name.isprintable():
            raise ValueError(f"scorer {self.name!r}: a name is one line of printable characters, since tables, logs and metrics show it; write another")
        given = [kind for kind in KINDS if getattr(self, kind)]
        if len(given) != 1:
            raise ValueError(f"scorer {self.name!r} has {' and '.join(given) or 'none'} of {', '.join(KINDS)}: exactly one says what scores; {'keep one' if given else 'add one, for instance use: exact'}")
        if self.args and not self.use:
            raise ValueError(f"scorer {self.name!r}: args belong to `use`; the others get none, remove them")
        if self.whole_group and ":" not in self.use:
            raise ValueError(f"scorer {self.name!r}: whole_group belongs to functions of yours (use: module:function); remove it")
        wall_s = self.args.get("wall_s", 9.0)
        if self.use == "code" and isinstance(wall_s, (int, float)) and self.limit_s < wall_s + 1:
            raise ValueError(f"scorer {self.name!r}: limit_s={self.limit_s:g} must be at least a second more than wall_s={wall_s:g}: the sandbox ends programs, limit_s the scorer's process")
        remote = self.http or self.grpc or self.judge
        if remote is not None and remote.attempt_s is not None and remote.attempt_s > self.limit_s:
            raise ValueError(f"scorer {self.name!r}: attempt_s={remote.attempt_s:g} is more than limit_s={self.limit_s:g}: no attempt could take so long; use a smaller one")
        return self


class CacheConfig(BaseModel):
    """Where scores that were computed before are kept (docs/rewards.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    backend: Literal["memory", "redis", "none"] = Field("memory", description="redis: shared by servers, beside memory")
    max_bytes: int = Field(256 << 20, ge=1 << 16, description="of memory; what was not asked for longest goes first")
    url: str = Field("", description="redis only: redis://HOST:PORT/NUMBER, without a password")
    password_env: str = Field("", description="redis only: environment variable that holds its password")
    password_file: Path | None = Field(None, description="redis only: file that holds its password")
    ttl_s: int = Field(7 * 86400, ge=1, description="redis only: how long a score is kept")

    @model_validator(mode="after")
    def _contradictions(self) -> CacheConfig:
        if self.backend == "redis" and not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"cache.url={self.url!r} with backend=redis must be redis://HOST:PORT/NUMBER")
        if "@" in self.url:
            raise ValueError("cache.url holds a user or password, which would end in logs; give password_env or password_file")
        if self.backend != "redis" and (self.url or self.password_env or self.password_file):
            raise ValueError(f"cache.backend={self.backend} with a url or a password of Redis; set backend: redis, or remove them")
        return self


class RewardConfig(BaseModel):
    """The scorers, how many processes run them, and what bounds them (docs/rewards.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    address: str = Field("127.0.0.1:0", description="where RewardService listens; port 0 takes a free one")
    metrics_address: str = Field("", description="host:port where Prometheus finds this server's figures; port 0 takes a free one; empty: nowhere")
    scorers: tuple[ScorerConfig, ...] = Field(description="at least one")
    default: str = Field("", description="scorer of requests that name none; empty: the first")
    cache: CacheConfig = CacheConfig()
    security: SecurityConfig = SecurityConfig()
    pass_env: tuple[str, ...] = Field((), description="environment variables that scorer processes see although they are called like credentials")
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
        comparing = {each.name for each in self.scorers if each.group or each.whole_group}
        for each in self.scorers:
            asked = [each.group.of] if each.group else names_in(each.combine) if each.combine else []
            for name in asked:
                if each.group and name not in names:
                    raise ValueError(f"scorer {each.name!r} asks {name!r}, which is none of the scorers {names}")
                if name in comparing:
                    raise ValueError(f"scorer {each.name!r} asks {name!r}, which compares whole groups; name one that scores single samples")
        check_names({each.name: each.combine for each in self.scorers if each.combine is not None}, names)
        if self.default and self.default not in names:
            raise ValueError(f"default={self.default!r} is none of the scorers {names}; name one of them")
        return self
