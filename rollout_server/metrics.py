"""The figures of a rollout server (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protos.exporting import Figure
from protos.gpus import Gpus
from protos.resources import resource_figures
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from rollout_server.engine import EngineStats
from rollout_server.latency import quantiles
from rollout_server.replica import Replica

STATES = ("starting", "waiting", "serving", "stale", "draining")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the figures are read of."""

    replica: Replica
    num_refused: Callable[[], int]
    gpus: Gpus
    sessions: Callable[[], Mapping[tuple[str, str], int]] = dict  # of environments, by name and how they ended; none are configured


def state_name(state: int) -> str:
    """"serving" and so on."""
    return pb.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower()


def _stats(seen: Seen) -> EngineStats:
    return seen.replica.engine.stats()


FIGURES: tuple[Figure[Seen], ...] = (
    Figure(name="headrace_rollout_state", kind="gauge", labels=("state",), text="1 for the state that the replica is in, 0 for the others.", read=lambda s: {name: float(name == state_name(s.replica.state)) for name in STATES}),
    Figure(name="headrace_rollout_requests_total", kind="counter", labels=("end",), text="Requests by how they ended: stop, length, abort, cancelled, failed, refused.", read=lambda s: s.replica.tally.ends),
    Figure(name="headrace_rollout_tokens_total", kind="counter", text="Tokens handed out.", read=lambda s: _stats(s).num_tokens),
    Figure(name="headrace_rollout_tokens_per_second", kind="gauge", text="Tokens drawn a second, over the last ten seconds.", read=lambda s: s.replica.rate.per_s),
    Figure(name="headrace_rollout_first_token_seconds", kind="gauge", labels=("quantile",), text="From a request's admission by the engine to its first token, of the last 512 requests.", read=lambda s: quantiles(s.replica.engine.latency.first_token_s)),
    Figure(name="headrace_rollout_first_token_seconds_total", kind="counter", text="The same time of all requests of the engine's present life.", read=lambda s: s.replica.engine.latency.total_first_token_s),
    Figure(name="headrace_rollout_first_tokens_total", kind="counter", text="Requests that it was taken of.", read=lambda s: s.replica.engine.latency.num_first_tokens),
    Figure(name="headrace_rollout_inter_token_seconds", kind="gauge", labels=("quantile",), text="Mean time between two tokens of a request as the engine drew them, of the last 512 requests.", read=lambda s: quantiles(s.replica.engine.latency.inter_token_s)),
    Figure(name="headrace_rollout_inter_token_seconds_total", kind="counter", text="The time between first and last token of all requests of the engine's present life.", read=lambda s: s.replica.engine.latency.total_gap_s),
    Figure(name="headrace_rollout_inter_tokens_total", kind="counter", text="Tokens drawn in it.", read=lambda s: s.replica.engine.latency.num_gaps),
    Figure(name="headrace_rollout_running_requests", kind="gauge", text="Requests that are drawn or wait to be.", read=lambda s: _stats(s).num_running),
    Figure(name="headrace_rollout_waiting_requests", kind="gauge", text="Of these, those that wait in the engine's queue; where the engine tells.", read=lambda s: _stats(s).num_waiting),
    Figure(name="headrace_rollout_slots_requests", kind="gauge", text="Requests drawn at once at most (max_num_seqs).", read=lambda s: s.replica.max_num_seqs),
    Figure(name="headrace_rollout_limit_requests", kind="gauge", text="Samples of a learner's that are drawn at once now, at most: follows KV cache, preemptions and queue.", read=lambda s: s.replica.limit),
    Figure(name="headrace_rollout_kv_use_ratio", kind="gauge", text="Share of the KV cache in use; where the engine tells.", read=lambda s: _stats(s).kv_use),
    Figure(name="headrace_rollout_preempted_requests_total", kind="counter", text="Requests that lost their KV cache and were computed again, also at an update with in_flight: recompute; where the engine tells.", read=lambda s: _stats(s).num_preempted),
    Figure(name="headrace_rollout_prefix_tokens_total", kind="counter", text="Prompt tokens looked up in the prefix cache; where the engine tells.", read=lambda s: _stats(s).num_prefix_tokens),
    Figure(name="headrace_rollout_prefix_hit_tokens_total", kind="counter", text="Of these, tokens whose KV was there already.", read=lambda s: _stats(s).num_prefix_hit_tokens),
    Figure(name="headrace_rollout_idle_seconds_total", kind="counter", text="Time without any request.", read=lambda s: _stats(s).idle_s),
    Figure(name="headrace_rollout_loaded_version", kind="gauge", text="Version that is sampled from; 0: the base weights.", read=lambda s: s.replica.engine.loaded_version),
    Figure(name="headrace_rollout_newest_version", kind="gauge", text="Newest version that the learner told of.", read=lambda s: s.replica.driver.newest_version if s.replica.driver else None),
    Figure(name="headrace_rollout_updates_total", kind="counter", text="Versions loaded.", read=lambda s: s.replica.tally.num_loaded),
    Figure(name="headrace_rollout_pause_seconds_total", kind="counter", labels=("piece",), text="Time in which an update let nothing be drawn, by its pieces.", read=lambda s: dict(s.replica.tally.pieces_s)),
    Figure(name="headrace_rollout_engine_starts_total", kind="counter", text="How often the engine has come up.", read=lambda s: s.replica.life),
    Figure(name="headrace_rollout_engine_ends_total", kind="counter", labels=("why",), text="Lives of the engine that ended unasked: died, or stalled (it lived and drew nothing).", read=lambda s: dict(s.replica.tally.engine_ends)),
    Figure(name="headrace_rollout_ready", kind="gauge", text="1 while a current version is served, as health checks say.", read=lambda s: float(s.replica.ready)),
    Figure(name="headrace_rollout_environment_sessions_total", kind="counter", labels=("environment", "end"), text="Samples played in an environment by how they ended: closed, or why it failed (docs/environments.md); leaked counts beside the end.", read=lambda s: s.sessions()),
    Figure(name="headrace_rollout_refused_calls_total", kind="counter", text="Calls and connections without this run's token or TLS.", read=lambda s: s.num_refused()),
    *resource_figures("rollout", lambda s: s.gpus),
)
