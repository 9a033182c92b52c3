"""What a step's numbers are called and how they are made from its batch and its updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.algorithms.mismatch import mismatch_summary
from learner.trainer.decode import Batch
from learner.trainer.table import Entry, groups_of, zero_signal_share
from learner.trainer.tally import StepResult

_OF_CRITIC = {"value_targets", "value_loss", "clipped_value", "returns", "returns_squared", "value_error", "value_error_squared"}


def summary_of_batch(batch: Batch) -> dict[str, Any]:
    """Rewards of usable samples, lengths of all (masked or not), staleness, drops and balance."""
    usable = [entry for entry in batch.table if entry.usable]
    rewards = np.array([entry.reward for entry in usable])
    lengths = np.array([entry.num_drawn_tokens for entry in batch.table])
    stats = batch.stats
    return {
        "reward_mean": _mean(rewards),
        "reward_std": float(rewards.std()) if rewards.size else 0.0,
        "reward_parts": _part_means(usable),
        **_baselines(batch.table),
        "groups": list(groups_of(batch.table)),
        "num_samples": len(batch.table),
        "num_usable": len(usable),
        "unusable": dict(Counter(entry.unusable_reason for entry in batch.table if not entry.usable)),
        "fallbacks": dict(Counter(name for entry in usable for name in entry.reward_parts if name.startswith("unscored_"))),
        "completion_tokens_mean": _mean(lengths),
        "completion_tokens_min": int(lengths.min()) if lengths.size else 0,
        "completion_tokens_max": int(lengths.max()) if lengths.size else 0,
        "environment_tokens_mean": _mean(np.array([entry.num_completion_tokens - entry.num_drawn_tokens for entry in batch.table])),
        "turns_mean": _mean(np.array([entry.num_turns for entry in batch.table])),
        "strands_mean": _mean(np.array([entry.num_strands for entry in batch.table])),
        "prompt_tokens_mean": _mean(np.array([entry.num_prompt_tokens for entry in batch.table])),
        "truncated_share": _mean(np.array([entry.truncated for entry in batch.table], dtype=float)),
        "trained_tokens": sum(entry.num_trained_tokens for entry in usable),
        "generated_tokens": stats.num_generated_tokens,
        "zero_signal_share": zero_signal_share(batch.table),
        **({"data_sets": sets} if (sets := _by_data_set(batch.table)) else {}),
        "staleness": {str(steps): tokens for steps, tokens in sorted(stats.tokens_by_staleness.items())},
        "staleness_bound": stats.staleness_bound,
        "staleness_max": max((entry.staleness for entry in batch.table), default=0),
        "mixed_version_samples": sum(entry.num_versions > 1 for entry in batch.table),
        "dropped": stats.num_dropped,
        "leased_groups": stats.num_leased,
        "trained_groups": stats.num_trained,
        "open_groups": stats.num_open,
        "waiting_groups": stats.num_waiting,
        "oldest_open_s": stats.oldest_open_s,
        "num_replicas": stats.num_replicas,
        "replica_idle_share": stats.replica_idle_share,
        "gateway_wait_s": stats.trainer_wait_s,
    }


def summary_of_result(result: StepResult, *, clip_low: float, clip_high: float) -> dict[str, Any]:
    """Loss, norm, clipping, ratio, mismatch and entropy. Only tokens that were computed count: those of samples with an advantage."""
    num_targets = result.sums.get("targets", 0.0)
    more = sorted(result.sums.keys() - {"targets", "input_tokens", "neg_logprob", "ratio", "kl_tokens", "clipped_high", "clipped_low", "clipped_dual"} - _OF_CRITIC)
    share = {name: result.sums.get(name, 0.0) / num_targets if num_targets else 0.0 for name in ("clipped_high", "clipped_low", "clipped_dual", "ratio", "neg_logprob")}
    mismatch = mismatch_summary(result.log_ratio, clip_low=clip_low, clip_high=clip_high)
    return {
        "loss": result.loss,
        "grad_norm": max((update.grad_norm for update in result.updates), default=0.0),
        "lr": result.updates[-1].lr if result.updates else 0.0,
        "num_updates": sum(not update.skipped for update in result.updates),
        "skipped_updates": sum(update.skipped for update in result.updates),
        "no_signal": not result.updates and not result.critic_updates,
        "clip_fraction": share["clipped_high"] + share["clipped_low"] + share["clipped_dual"],
        "clip_fraction_high": share["clipped_high"],
        "clip_fraction_low": share["clipped_low"],
        "clip_fraction_dual": share["clipped_dual"],
        "ratio_mean": share["ratio"],
        "entropy_estimate": share["neg_logprob"],
        "computed_tokens": int(num_targets),
        "input_tokens": int(result.sums.get("input_tokens", 0.0)),
        "loss_terms": {name: result.sums[name] / num_targets for name in more if num_targets},
        "mismatch": {name: float(value) for name, value in mismatch.items()},
        "mismatch_kl": float(mismatch["kl_k3"]) if mismatch else 0.0,
        **({"critic": _critic(result)} if result.critic_updates else {}),
    }


def mismatch_of(result: StepResult, metric: str, *, clip_low: float, clip_high: float) -> float | None:
    """One value of `mismatch_summary`; None where no token was computed."""
    summary = mismatch_summary(result.log_ratio, clip_low=clip_low, clip_high=clip_high)
    return float(summary[metric]) if summary else None


def _critic(result: StepResult) -> dict[str, Any]:
    """Of a critic's updates. explained_variance: 1 - var(return - value) / var(return), before the value moved; null where returns do not vary."""
    sums, num_tokens = result.sums, max(result.sums.get("value_targets", 0.0), 1.0)
    spread = {name: sums[f"{name}_squared"] / num_tokens - (sums[name] / num_tokens) ** 2 for name in ("returns", "value_error")}
    return {
        "loss": sums["value_loss"] / num_tokens,
        "clip_fraction": sums["clipped_value"] / num_tokens,
        "return_mean": sums["returns"] / num_tokens,
        "explained_variance": 1.0 - spread["value_error"] / spread["returns"] if spread["returns"] > 1e-12 else None,
        "grad_norm": max(update.grad_norm for update in result.critic_updates),
        "lr": result.critic_updates[-1].lr,
        "num_updates": sum(not update.skipped for update in result.critic_updates),
        "skipped_updates": sum(update.skipped for update in result.critic_updates),
    }


def _by_data_set(table: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """What a run with named data sets wants to know of each."""
    result = {}
    for name in sorted({entry.data_set for entry in table} - {""}):
        mine = [entry for entry in table if entry.data_set == name]
        usable = [entry for entry in mine if entry.usable]
        result[name] = {
            "num_groups": len(groups_of(mine)),
            "reward_mean": _mean(np.array([entry.reward for entry in usable])),
            "trained_tokens": sum(entry.num_trained_tokens for entry in usable),
            "truncated_share": _mean(np.array([entry.truncated for entry in mine], dtype=float)),
            "zero_signal_share": zero_signal_share(mine),
        }
    return result


def _mean(values: np.ndarray[Any, Any]) -> float:
    return float(values.mean()) if values.size else 0.0


def _part_means(usable: Sequence[Entry]) -> dict[str, float]:
    """Mean of each named part over the samples that have it."""
    names = sorted({name for entry in usable for name in entry.reward_parts})
    return {name: _mean(np.array([entry.reward_parts[name] for entry in usable if name in entry.reward_parts])) for name in names}


def _baselines(table: Sequence[Entry]) -> dict[str, float]:
    """Mean reward of the greedy answers, one a group; nothing where no group has one."""
    rewards = {entry.group_id: entry.baseline.reward for entry in table if entry.baseline is not None}
    return {"baseline_reward_mean": _mean(np.array(list(rewards.values())))} if rewards else {}
