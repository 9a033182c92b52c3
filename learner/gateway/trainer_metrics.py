"""The figures of the trainer (docs/metrics.md), which the gateway tells for it: ranks train, they answer nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from learner.gateway.last_step import LastStep
from protos.exporting import Figure


def _at(*path: str) -> Callable[[LastStep], Any]:
    """A value of the newest line; None where there is none. A mapping gives a value for each of its keys."""

    def read(last: LastStep) -> Any:
        value: Any = last.read()
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return read


def _mapping(*path: str) -> Callable[[LastStep], dict[str, Any]]:
    return lambda last: dict(_at(*path)(last) or {})


def _several(**names: str) -> Callable[[LastStep], dict[str, Any]]:
    """Fields of the line under one name, each with a label value of its own."""
    return lambda last: {label: last.read().get(name) for label, name in names.items()}


def _gauge(name: str, text: str, read: Callable[[LastStep], Any], *labels: str) -> Figure[LastStep]:
    return Figure(name=f"headrace_trainer_{name}", kind="gauge", labels=labels, text=text, read=read)


def _counter(name: str, text: str, read: Callable[[LastStep], Any], *labels: str) -> Figure[LastStep]:
    return Figure(name=f"headrace_trainer_{name}", kind="counter", labels=labels, text=text, read=read)


FIGURES: tuple[Figure[LastStep], ...] = (
    _gauge("last_step", "Number of the newest step.", _at("step")),
    _counter("steps_total", "Steps since the gateway first looked (a part of those before it started).", lambda last: (last.read(), last.num_steps)[1]),
    _counter("step_seconds_total", "Time of steps by piece: total, and of it wait, train, snapshot, save; push runs beside the next step, startup was before the first batch of each start.", lambda last: (last.read(), dict(last.seconds))[1], "piece"),
    _gauge("step_seconds", "Time of the newest step by piece.", _mapping("seconds"), "piece"),
    _counter("tokens_total", "Tokens of steps: trained, and generated meanwhile.", lambda last: (last.read(), dict(last.num_tokens))[1], "side"),
    _gauge("tokens_per_second", "Rates of the newest step; of the first step of each start none for generated ones, which were drawn while things started.", _several(trained="trained_tokens_per_s", generated="generated_tokens_per_s"), "side"),
    _gauge("idle_ratio", "Share of the newest step in which the trainer waited for a batch, or replicas had no request.", _several(trainer="trainer_idle_share", replicas="replica_idle_share"), "side"),
    _gauge("staleness_max_steps", "Staleness of the oldest token of the newest step.", _at("staleness_max")),
    _gauge("staleness_tokens", "Tokens of the newest step by staleness.", _mapping("staleness"), "staleness"),
    _gauge("reward_mean", "Mean reward of the newest step.", _at("reward_mean")),
    _gauge("reward_deviation", "Standard deviation of its rewards.", _at("reward_std")),
    _gauge("reward_part_mean", "Mean of each named part of the reward.", _mapping("reward_parts"), "part"),
    _gauge("loss", "Loss of the newest step.", _at("loss")),
    _gauge("loss_term", "Terms of the loss beside the policy's, KL among them, each a mean over tokens.", _mapping("loss_terms"), "term"),
    _gauge("grad_norm", "Norm of the gradient before clipping.", _at("grad_norm")),
    _gauge("learning_rate", "Learning rate.", _at("lr")),
    _counter("skipped_updates_total", "Updates that all ranks skipped.", lambda last: (last.read(), last.num_skipped_updates)[1]),
    _gauge("clipped_ratio", "Share of tokens whose ratio was clipped.", _several(high="clip_fraction_high", low="clip_fraction_low", dual="clip_fraction_dual"), "side"),
    _gauge("entropy_nats", "Estimate of the policy's entropy.", _at("entropy_estimate")),
    _gauge("kl_nats", "KL from the engine's to the learner's distribution on trained tokens (k3 estimate).", _at("mismatch_kl")),
    _gauge("mismatch", "Further measures of that mismatch: k1, share beyond the clip, percentiles of the absolute log-ratio.", _mapping("mismatch"), "measure"),
    _gauge("completion_tokens", "Length of completions: mean and longest.", _several(mean="completion_tokens_mean", max="completion_tokens_max"), "measure"),
    _gauge("truncated_ratio", "Share of samples cut at max_new_tokens.", _at("truncated_share")),
    _gauge("zero_signal_ratio", "Share of groups whose rewards are all equal.", _at("zero_signal_share")),
    _gauge("unusable_samples", "Samples of the newest batch that could not be trained on, by reason.", _mapping("unusable"), "reason"),
)  # fmt: skip
