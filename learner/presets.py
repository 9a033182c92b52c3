"""Named algorithms as data: what each sets, of `algorithm` and of the sections it needs beside it.

A run file's own keys go on top: a section with the same (or no) `kind` is merged, one with another `kind` replaces the preset's.
docs/algorithms.md says for each where it departs from its paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLIP = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm": {"advantage": {"kind": "group"}, "loss": _CLIP}},
    "dr_grpo": {"algorithm": {"advantage": {"kind": "group", "normalize": False}, "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, "aggregation": "sequence_sum"}},
    "rloo": {"algorithm": {"advantage": {"kind": "leave_one_out"}, "loss": {"kind": "reinforce"}, "correction": {"level": "token", "mode": "truncate", "high": 2.0}}},
    "reinforce_pp": {"algorithm": {"advantage": {"kind": "batch"}, "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}}},
    "reinforce_pp_baseline": {"algorithm": {"advantage": {"kind": "group_then_batch"}, "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}}},
    "dapo": {"algorithm": {"advantage": {"kind": "group"}, "loss": _CLIP}, "filter": {"zero_signal": True}},
    "gspo": {"algorithm": {"advantage": {"kind": "group"}, "loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "aggregation": "sequence_mean", "old_policy": "recomputed"}},
    "cispo": {"algorithm": {"advantage": {"kind": "group"}, "loss": {"kind": "cispo", "clip_low": 1.0, "clip_high": 2.0}}},
    "sapo": {"algorithm": {"advantage": {"kind": "group"}, "loss": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}, "aggregation": "sequence_mean"}},
    "decoupled_ppo": {
        "algorithm": {
            "advantage": {"kind": "group_then_batch"},
            "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
            "old_policy": "recomputed",
            "correction": {"level": "token", "mode": "truncate", "high": 5.0},
        }
    },
    "ppo": {
        "algorithm": {
            "advantage": {"kind": "gae"},
            "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
            "kl": {"coefficient": 0.01, "estimator": "k1", "where": "reward", "reference": "frozen"},
        },
    },
    "remax": {
        "algorithm": {"advantage": {"kind": "greedy_baseline"}, "loss": {"kind": "reinforce"}, "correction": {"level": "token", "mode": "truncate", "high": 2.0}},
        "filter": {"min_usable": 1},
    },
    "opd": {"algorithm": {"advantage": {"kind": "teacher"}, "loss": {"kind": "reinforce"}, "correction": {"level": "token", "mode": "truncate", "high": 2.0}}},
}


def with_preset(given: Mapping[str, Any], part: str, *, name: str) -> dict[str, Any]:
    """`given` (a section of the configuration as written) on top of what preset `name` says of section `part`; unknown names change nothing."""
    return merged(PRESETS.get(name, {}).get(part, {}), given)


def merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, mappings merged key by key unless `top` names another `kind`."""
    result = dict(base)
    for key, value in top.items():
        below = result.get(key)
        same_kind = isinstance(value, Mapping) and isinstance(below, Mapping) and value.get("kind", below.get("kind")) == below.get("kind")
        result[key] = merged(below, value) if same_kind and isinstance(below, Mapping) else value
    return result
