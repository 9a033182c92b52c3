"""The scorers and their counts, as ListScorers tells them."""

from __future__ import annotations

import asyncio

from protos.reward.v1alpha1 import reward_pb2 as pb
from reward_server.endpoints.endpoint import Endpoint
from reward_server.group_scorers import GroupScorer
from reward_server.judge import JudgeScorer
from reward_server.plane import Plane
from reward_server.scorer import Scorer, Tally
from reward_server.scorers_at_work import RemoteScorer

Listed = pb.ListScorersResponse


def of(plane: Plane, *, num_refused: int) -> pb.ListScorersResponse:
    """Every scorer that new items may go to."""
    listed = [_scorer(name, scorer, plane.tallies[name]) for name, scorer in plane.scorers.items()]
    return Listed(scorers=listed, default_scorer=plane.default, num_refused=num_refused)


def _scorer(name: str, scorer: Scorer, tally: Tally) -> pb.ListScorersResponse.Scorer:
    return Listed.Scorer(
        name=name,
        description=scorer.description,
        limit_s=scorer.limit_s,
        num_answered=tally.num_answered,
        num_unscored=tally.unscored.total(),
        num_unscored_by_reason={str(reason): count for reason, count in tally.unscored.items()},
        kind=scorer.kind,
        num_cached=tally.num_cached,
        compares=isinstance(scorer, GroupScorer),
        endpoint=_endpoint(scorer.endpoint) if isinstance(scorer, (RemoteScorer, JudgeScorer)) else None,
    )


def _endpoint(endpoint: Endpoint) -> pb.ListScorersResponse.Endpoint:
    now_s = asyncio.get_running_loop().time()
    upstreams = [
        Listed.Upstream(
            address=each.address,
            breaker=each.breaker.state(now_s).value,
            num_opened=each.breaker.num_opened,
            health=each.health,
            latency_s=each.latency_s,
            num_attempts=each.num_attempts,
            num_failures=each.num_failures,
        )
        for each in endpoint.upstreams.all
    ]
    return Listed.Endpoint(
        num_attempts=sum(each.num_attempts for each in endpoint.upstreams.all),
        num_retries=endpoint.retrying.num_retries,
        num_hedges=endpoint.hedging.num_hedges,
        num_hedges_won=endpoint.hedging.num_won,
        num_overloaded=endpoint.limiter.num_refused,
        num_waiting=endpoint.waiting.num_items,
        num_running=endpoint.num_running,
        upstreams=upstreams,
    )
