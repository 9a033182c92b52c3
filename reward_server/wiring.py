"""From a configuration to scorers that can be called, and to the caches before them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.rpc import Security
from protos.security import secret
from reward_server.accounts import Limits as PoolLimits
from reward_server.accounts import ScorerSpec
from reward_server.cache.memory import MemoryCache
from reward_server.cache.shared import SharedCache
from reward_server.combine_config import (
    ClipConfig,
    CombineConfig,
    GateConfig,
    NormaliseConfig,
    ProductConfig,
    SumConfig,
    names_in,
)
from reward_server.combined import Ask, CombinedScorer
from reward_server.combining import Clip, Gate, Normalise, Product, Route, Rule, Sum
from reward_server.config import CacheConfig, RewardConfig, ScorerConfig
from reward_server.endpoint_config import GrpcConfig, HttpConfig, RemoteConfig
from reward_server.endpoints.batching import BatchRule
from reward_server.endpoints.breaker import BreakerRule
from reward_server.endpoints.endpoint import Endpoint, Policy
from reward_server.endpoints.grpc_dialect import GrpcDialect
from reward_server.endpoints.hedging import HedgeRule
from reward_server.endpoints.http_dialect import HttpClient, HttpDialect
from reward_server.endpoints.limiter import Limits
from reward_server.endpoints.retrying import RetryRule
from reward_server.plane import Caches
from reward_server.pool import Pool
from reward_server.scorer import Scorer
from reward_server.scorers_at_work import ProcessScorer, RemoteScorer, ScorersAtWork

# What a score depends on: of two configurations that differ elsewhere the scores are the same.
_DECIDES: dict[str, Any] = {"use": True, "args": True, "version": True, "http": {"urls", "format"}, "grpc": {"addresses", "scorer"}}


def scorers(config: RewardConfig, folder: Path) -> ScorersAtWork:
    """The scorers of a configuration; user modules are imported from `folder`, in processes. Raises ValueError for a secret that is not there."""
    pool = _pool([each for each in config.scorers if each.use], config, folder)
    made: dict[str, Scorer] = {}
    if pool is not None:
        made.update({account.spec.name: ProcessScorer(pool=pool, index=index) for index, account in enumerate(pool.accounts)})
    remotes = {each.name: _remote(each) for each in config.scorers if each.http or each.grpc}
    cached = {each.name: each.model_dump(mode="json", include=_DECIDES) for each in config.scorers if each.deterministic and each.combine is None}
    at_work = ScorersAtWork({**made, **remotes}, pool=pool, endpoints=[each.endpoint for each in remotes.values()], cached=cached)
    combined = {each.name: each.combine for each in config.scorers if each.combine is not None}
    limits_s = {each.name: each.limit_s for each in config.scorers if each.combine is None}
    return at_work.with_combined({name: _combined(combine, at_work.ask, _limit_s(name, combined, limits_s)) for name, combine in combined.items()})


def caches(config: CacheConfig) -> Caches:
    """Where scores are kept. Raises ValueError for a secret that is not there."""
    if config.backend == "none":
        return Caches()
    shared = None
    if config.backend == "redis":
        shared = SharedCache(config.url, password=secret("cache", config.password_env, config.password_file), ttl_s=config.ttl_s)
    return Caches(memory=MemoryCache(max_bytes=config.max_bytes), shared=shared)


def _pool(local: list[ScorerConfig], config: RewardConfig, folder: Path) -> Pool | None:
    if not local:
        return None
    specs = [ScorerSpec(name=each.name, use=each.use, args=each.args, limit_s=each.limit_s) for each in local]
    limits = PoolLimits(
        workers=config.workers,
        spares=config.spares,
        max_slow=config.max_slow,
        patience_s=config.patience_s,
        memory_bytes=config.memory_bytes,
        load_limit_s=config.load_limit_s,
    )
    return Pool(specs, limits, folder=folder)


def _combined(combine: CombineConfig, ask: Ask, limit_s: float) -> CombinedScorer:
    return CombinedScorer(rule=_rule(combine), ask=ask, description=f"{combine.op} of {', '.join(dict.fromkeys(names_in(combine)))}", limit_s=limit_s)


def _rule(combine: CombineConfig) -> Rule:
    if isinstance(combine, SumConfig):
        return Sum(weights=combine.of)
    if isinstance(combine, ProductConfig):
        return Product(of=combine.of)
    if isinstance(combine, GateConfig):
        return Gate(of=combine.of, by=combine.by, at_least=combine.at_least, otherwise=combine.otherwise)
    if isinstance(combine, ClipConfig):
        return Clip(of=combine.of, low=-math.inf if combine.low is None else combine.low, high=math.inf if combine.high is None else combine.high)
    if isinstance(combine, NormaliseConfig):
        return Normalise(of=combine.of, halflife=combine.halflife, warm_up=combine.warm_up)
    return Route(by=combine.field, to=combine.to, otherwise=combine.otherwise)


def _limit_s(name: str, combined: Mapping[str, CombineConfig], limits_s: Mapping[str, float]) -> float:
    """Of a scorer's parts in the longest case: a gate asks one after the other, the others ask at once."""
    if name in limits_s:
        return limits_s[name]
    parts_s = [_limit_s(part, combined, limits_s) for part in names_in(combined[name])]
    return sum(parts_s) if isinstance(combined[name], GateConfig) else max(parts_s)


def _remote(config: ScorerConfig) -> RemoteScorer:
    if config.http is not None:
        return _http(config, config.http)
    assert config.grpc is not None, "one kind, checked by ScorerConfig"
    return _grpc(config, config.grpc)


def _http(config: ScorerConfig, http: HttpConfig) -> RemoteScorer:
    client = HttpClient(token=secret(f"scorer {config.name!r}: http", http.token_env, http.token_file), ca=http.ca)
    endpoint = Endpoint(config.name, HttpDialect(client, http.format), http.urls, policy(http, config.limit_s))
    return RemoteScorer(endpoint=endpoint, kind="http", description=f"POSTs {http.format} to {', '.join(http.urls)}")


def _grpc(config: ScorerConfig, grpc: GrpcConfig) -> RemoteScorer:
    security = Security(token=secret(f"scorer {config.name!r}: grpc", grpc.token_env, grpc.token_file), ca=grpc.ca)
    endpoint = Endpoint(config.name, GrpcDialect(scorer=grpc.scorer, security=security), grpc.addresses, policy(grpc, config.limit_s))
    return RemoteScorer(endpoint=endpoint, kind="grpc", description=f"asks {grpc.scorer or 'the default scorer'} of {', '.join(grpc.addresses)}")


def policy(config: RemoteConfig, limit_s: float) -> Policy:
    """The rules of one endpoint, whatever it speaks."""
    attempt_s = config.attempt_s or limit_s / 2
    return Policy(
        limit_s=limit_s,
        attempt_s=attempt_s,
        limits=Limits(concurrency=config.concurrency, rate_per_s=config.rate_per_s, burst=config.burst),
        retry=RetryRule(retries=config.retries),
        hedge=HedgeRule(share=config.hedge_share),
        breaker=BreakerRule(failures=config.breaker_failures, open_s=config.breaker_open_s),
        batch=BatchRule(most=config.batch_items, wait_s=config.batch_wait_s, target_s=attempt_s / 2),
        queue_items=config.queue_items,
        queue_bytes=config.queue_bytes,
    )
