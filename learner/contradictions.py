"""What cannot work together in a learner's configuration: each line names the keys, their values, the rule, and the way out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.algorithm_config import GROUP_RELATIVE, AlgorithmConfig
from learner.data_config import SetConfig
from learner.evaluation_config import MIN_TEMPERATURE

if TYPE_CHECKING:
    from learner.config import LearnerConfig


def check_set(config: LearnerConfig, name: str, one: SetConfig, algorithm: AlgorithmConfig) -> None:
    """One data set. Raises ValueError for a group, a length or a filter that its algorithm cannot do with."""
    key, kind = config.data.key_of(name), algorithm.advantage.kind
    size, size_key = one.group_size or config.sampling.group_size, f"{key}.group_size" if one.group_size else "sampling.group_size"
    length, length_key = one.max_new_tokens or config.sampling.max_new_tokens, f"{key}.max_new_tokens" if one.max_new_tokens else "sampling.max_new_tokens"
    zero_signal, zero_key = config.zero_signal_of(name), "filter.zero_signal" if one.zero_signal is None else f"{key}.zero_signal"
    if size == 1 and kind in GROUP_RELATIVE:
        raise ValueError(f"{size_key}=1 with algorithm {algorithm.name} (advantage.kind={kind}): a group of one has no spread and so no advantage; use group_size of 2 or more")
    if config.filter.min_usable > size:
        raise ValueError(f"filter.min_usable={config.filter.min_usable} is more than {size_key}={size}: every group would be dropped; use a smaller min_usable")
    if size == 1 and zero_signal:
        raise ValueError(f"{zero_key}=true with {size_key}=1: every group would be dropped, since one reward has no spread; set zero_signal=false")
    if algorithm.advantage.kind == "pass_at_k" and algorithm.advantage.k > size:
        raise ValueError(f"algorithm.advantage.k={algorithm.advantage.k} is more than {size_key}={size}: no subset of k exists; use a smaller k")
    if kind == "teacher" and zero_signal:
        raise ValueError(f"{zero_key}=true with advantage.kind=teacher: a teacher judges groups of equal rewards as well; set zero_signal=false")
    if kind == "greedy_baseline" and config.sampling.oversample:
        raise ValueError(f"sampling.oversample={config.sampling.oversample} with advantage.kind=greedy_baseline: a group could be complete without its greedy answer; set oversample=0")
    if kind == "greedy_baseline" and zero_signal:
        raise ValueError(f"{zero_key}=true with advantage.kind=greedy_baseline: samples of equal rewards still differ from the greedy answer's; set zero_signal=false")
    if kind == "greedy_baseline" and config.control == "shuffled_rewards":
        raise ValueError("control=shuffled_rewards with advantage.kind=greedy_baseline: only samples are shuffled, and their mean against the greedy answer would still teach; use another advantage for the control")
    if kind == "several_rewards" and zero_signal:
        raise ValueError(f"{zero_key}=true with advantage.kind=several_rewards: the filter looks at the total reward, whose parts may differ where it does not; set zero_signal=false")
    if kind == "several_rewards" and config.filter.unscored == "fallback":
        raise ValueError("filter.unscored=fallback with advantage.kind=several_rewards: unscored_value is one number, and this advantage needs every part; drop the sample or the group")
    if (kind == "gae") != (config.algorithm.advantage.kind == "gae"):
        raise ValueError(f"{key}.algorithm has advantage.kind={kind} and the run {config.algorithm.advantage.kind}: a critic sees every sample or none; use gae for all data sets, or for none")
    if kind == "gae" and zero_signal:
        raise ValueError(f"{zero_key}=true with advantage.kind=gae: a critic learns from groups of equal rewards as well; set zero_signal=false")
    if kind == "several_rewards" and config.control == "shuffled_rewards":
        raise ValueError("control=shuffled_rewards with advantage.kind=several_rewards: only the total is shuffled, the parts would still teach; use another advantage for the control")
    if algorithm.overlong is not None and algorithm.overlong.buffer_tokens > length:
        raise ValueError(f"algorithm.overlong.buffer_tokens={algorithm.overlong.buffer_tokens} is more than {length_key}={length}; use a smaller buffer")


def check_sections(config: LearnerConfig) -> None:
    """The whole. Raises ValueError for sections that cannot work together."""
    sampling, staleness = config.sampling, config.staleness
    if sampling.temperature == 0:
        raise ValueError(f"sampling.temperature=0 with group_size={sampling.group_size}: greedy samples of one prompt are all equal; use a temperature above 0")
    if sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(f"sampling.temperature={sampling.temperature} lies below {MIN_TEMPERATURE}, where engines clamp in silence and would sample another distribution than is trained on; use {MIN_TEMPERATURE} or more")
    if sampling.top_p != 1 or sampling.top_k != 0:
        raise ValueError(f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: the learner evaluates the whole vocabulary's distribution, so only top_p=1 and top_k=0 can be trained on; set them so")
    if not staleness.lowest <= staleness.max_staleness <= staleness.highest:
        raise ValueError(f"staleness.max_staleness={staleness.max_staleness} is outside adaptive.lowest={staleness.lowest} to highest={staleness.highest}: a run begins with it; use one inside")
    if staleness.window > staleness.lowest * config.groups_per_step + 1 and staleness.adaptive is not None:
        raise ValueError(f"staleness.window={staleness.window} is more than adaptive.lowest * groups_per_step + 1 = {staleness.lowest * config.groups_per_step + 1}: at the lowest bound fewer groups could be open than a batch needs (docs/staleness.md); use a smaller window, or a higher lowest")
    if staleness.max_staleness == 0 and staleness.window != 1:
        raise ValueError(f"staleness.window={staleness.window} with max_staleness=0: synchronous training takes groups in lease order; use window=1")
    if staleness.window > staleness.max_staleness * config.groups_per_step + 1:
        raise ValueError(f"staleness.window={staleness.window} is more than max_staleness * groups_per_step + 1 = {staleness.max_staleness * config.groups_per_step + 1}: fewer groups could be open than a batch needs (docs/staleness.md); use a smaller window")
    filters = config.filter
    if filters.max_flat_a_step is not None and not any(config.zero_signal_of(name) for name in config.data.sources):
        raise ValueError(f"filter.max_flat_a_step={filters.max_flat_a_step} without zero_signal: no group is dropped for that; set filter.zero_signal=true, or leave it out")
    if filters.max_flat_a_step is not None and filters.then == "train" and filters.max_flat_a_step >= filters.max_consecutive_drops:
        raise ValueError(f"filter.max_flat_a_step={filters.max_flat_a_step} is not under max_consecutive_drops={filters.max_consecutive_drops}: the run would end before a batch is filled; use a smaller one, or raise max_consecutive_drops")
    if config.optimizer.minibatches > config.groups_per_step:
        raise ValueError(f"optimizer.minibatches={config.optimizer.minibatches} is more than groups_per_step={config.groups_per_step}: a minibatch would be empty; use fewer")
    if config.journal.backend == "redis" and not config.journal.url:
        raise ValueError("journal.url is empty with journal.backend=redis; give redis://HOST:PORT/NUMBER")
    least = (staleness.highest + 2) * config.groups_per_step
    if config.journal.max_groups < least:
        raise ValueError(f"journal.max_groups={config.journal.max_groups} is less than (max_staleness (or adaptive.highest) + 2) * groups_per_step = {least}: the open groups and one batch must fit; use a larger one")
    if config.push.transport in ("nccl", "ipc") and config.trainer.device == "cpu":
        raise ValueError(f"push.transport={config.push.transport} with trainer.device=cpu: {config.push.transport} moves memory of GPUs only; use transport auto or gloo, or device: cuda")
    if config.push.transport == "folder" and not config.push.folder:
        raise ValueError("push.transport=folder with an empty push.folder: versions would be published nowhere; give the shared path, and the same as rollout.weights_folder")
    if config.lease.silence_s <= config.lease.heartbeat_s:
        raise ValueError(f"lease.silence_s={config.lease.silence_s} is not more than heartbeat_s={config.lease.heartbeat_s}: every replica would count as gone; use several heartbeats")
