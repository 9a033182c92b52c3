"""From a configuration to scorers that can be called, and to the caches before them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.rpc import Security
from protos.scrubbing import scrubbed
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
from reward_server.endpoints.endpoint import Endpoint
from reward_server.endpoints.grpc_dialect import GrpcDialect
from reward_server.endpoints.hedging import HedgeRule
from reward_server.endpoints.http_dialect import HttpClient, HttpDialect
from reward_server.endpoints.judge_dialect import JudgeDialect
from reward_server.endpoints.limiter import Limits
from reward_server.endpoints.policy import Policy
from reward_server.endpoints.retrying import RetryRule
from reward_server.group_config import GroupConfig, RankConfig
from reward_server.group_scorers import ProcessGroupScorer, RankScorer, TournamentScorer
from reward_server.judge import JudgeScorer
from reward_server.judge_config import JudgeConfig
from reward_server.plane import Caches
from reward_server.pool import Pool
from reward_server.pooled import ProcessScorer
from reward_server.scorer import Scorer
from reward_server.scorers import OWN_PROCESS
from reward_server.scorers_at_work import RemoteScorer, ScorersAtWork

_JUDGE = set(JudgeConfig.model_fields) - set(RemoteConfig.model_fields)
# What a score depends on: of two configurations that differ elsewhere the scores are the same.
_MODEL_LOADS = 5  # times load_limit_s: a model is read from a disk, functions are only imported
_DECIDES: dict[str, Any] = {"use": True, "args": True, "version": True, "http": {"urls", "format"}, "grpc": {"addresses", "scorer"}, "judge": _JUDGE}


def scorers(config: RewardConfig, folder: Path, *, before: ScorersAtWork | None = None) -> ScorersAtWork:
    """The scorers of a configuration; user modules are imported from `folder`, in processes. Raises ValueError for a secret that is not there.

    before: scorers that these will replace; remote ones whose configuration is the same stay, with their limits, breakers and connections.
    """
    local = [each for each in config.scorers if each.use]
    pool = _pool([each for each in local if each.use not in OWN_PROCESS], config, folder)
    own = {each.name: _own_pool(each, config, folder) for each in local if each.use in OWN_PROCESS}
    made: dict[str, Scorer] = {}
    if pool is not None:
        whole = {each.name for each in local if each.whole_group}
        for index, account in enumerate(pool.accounts):
            made[account.spec.name] = (ProcessGroupScorer if account.spec.name in whole else ProcessScorer)(pool=pool, index=index)
    made.update({name: ProcessScorer(pool=each, index=0) for name, each in own.items()})
    remotes = {each.name: _kept(each, before) or _remote(each) for each in config.scorers if each.http or each.grpc or each.judge}
    cached = {each.name: each.model_dump(mode="json", include=_DECIDES) for each in config.scorers if each.deterministic and not _asks_others(each)}
    at_work = ScorersAtWork({**made, **remotes}, pool=pool, own_pools=list(own.values()), endpoints=[each.endpoint for each in remotes.values()], cached=cached)
    at_work.sources = {each.name: each for each in config.scorers}
    combined = {each.name: each.combine for each in config.scorers if each.combine is not None}
    limits_s = {each.name: each.limit_s for each in config.scorers if each.combine is None}
    made.update({name: _combined(combine, at_work.ask, _limit_s(name, combined, limits_s)) for name, combine in combined.items()})
    grouped = {each.name: _grouped(each.group, at_work.ask, _limit_s(each.group.of, combined, limits_s)) for each in config.scorers if each.group}
    return at_work.with_combined({**{name: made[name] for name in combined}, **grouped})


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
    limits = PoolLimits(
        workers=config.workers,
        spares=config.spares,
        max_slow=config.max_slow,
        patience_s=config.patience_s,
        memory_bytes=config.memory_bytes,
        load_limit_s=config.load_limit_s,
    )
    return Pool([_spec(each) for each in local], limits, folder=folder, environment=environment_of(config))


def environment_of(config: RewardConfig) -> dict[str, str]:
    """What scorer processes see: nothing that holds credentials, called like one or named as one in the configuration."""
    remotes = [remote for each in config.scorers for remote in (each.http, each.grpc, each.judge) if remote is not None]
    named = (config.security.token_env, config.cache.password_env, *(remote.token_env for remote in remotes))
    return scrubbed(os.environ, named=named, keep=config.pass_env)


def _own_pool(scorer: ScorerConfig, config: RewardConfig, folder: Path) -> Pool:
    """One process that holds a model: no memory bound, no spare (it would load the model again), and no call of it is slow."""
    limits = PoolLimits(workers=1, spares=0, max_slow=1, patience_s=math.inf, memory_bytes=0, load_limit_s=_MODEL_LOADS * config.load_limit_s)
    return Pool([_spec(scorer)], limits, folder=folder, environment=environment_of(config))


def _spec(scorer: ScorerConfig) -> ScorerSpec:
    return ScorerSpec(name=scorer.name, use=scorer.use, args=scorer.args, limit_s=scorer.limit_s)


def _asks_others(scorer: ScorerConfig) -> bool:
    """Or compares a whole group: what is kept is kept of the single scores that it asks for."""
    return scorer.combine is not None or scorer.group is not None or scorer.whole_group


def _grouped(group: GroupConfig, ask: Ask, limit_s: float) -> RankScorer | TournamentScorer:
    if isinstance(group, RankConfig):
        return RankScorer(of=group.of, ask=ask, limit_s=limit_s)
    return TournamentScorer(of=group.of, ask=ask, limit_s=limit_s, opponents=group.opponents, both_orders=group.both_orders)


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


def _kept(config: ScorerConfig, before: ScorersAtWork | None) -> RemoteScorer | JudgeScorer | None:
    if before is None or before.sources.get(config.name) != config:
        return None
    scorer = before.scorers[config.name]
    assert isinstance(scorer, RemoteScorer | JudgeScorer), "the same configuration makes the same kind"
    return scorer


def _remote(config: ScorerConfig) -> RemoteScorer | JudgeScorer:
    if config.judge is not None:
        return _judge(config, config.judge)
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


def _judge(config: ScorerConfig, judge: JudgeConfig) -> JudgeScorer:
    client = HttpClient(token=secret(f"scorer {config.name!r}: judge", judge.token_env, judge.token_file), ca=judge.ca)
    try:
        dialect = JudgeDialect(client, judge)
    except ValueError as error:
        raise ValueError(f"scorer {config.name!r}: judge: {error}") from None
    endpoint = Endpoint(config.name, dialect, judge.urls, policy(judge, config.limit_s))
    description = f"asks {judge.model} at {', '.join(judge.urls)}" + (f", {judge.votes} votes by {judge.reduce}" if judge.votes > 1 else "")
    return JudgeScorer(endpoint=endpoint, description=description, votes=judge.votes, reduce=judge.reduce, quorum=judge.quorum or judge.votes // 2 + 1)


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
