"""Configuration of one learner. Unknown keys and contradictions fail here, with the way out in the message."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from learner.alarm_config import AlarmConfig
from learner.algorithm_config import GROUP_RELATIVE, AlgorithmConfig
from learner.data_config import DataConfig as DataConfig
from learner.data_config import SetConfig
from learner.evaluation_config import MIN_TEMPERATURE, EvaluationConfig
from learner.presets import PRESETS, with_preset
from learner.section import Count, Seconds
from learner.section import Section as Section
from learner.set_algorithms import algorithm_of_set
from protos.security import SecurityConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]  # what every generator that is seeded with it takes


class SamplingConfig(Section):
    """The distribution sampled from and, exactly so, trained on."""

    group_size: Count = Field(8, description="samples of one prompt")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_new_tokens: Count = 256
    stop_token_ids: tuple[TokenId, ...] = Field((), description="empty: every end-of-sequence id that the model's files name")


class AdaptiveStaleness(Section):
    """The admitted staleness follows the measured mismatch, one step at a time; max_staleness is what a run begins with."""

    lowest: int = Field(0, ge=0, description="never less")
    highest: int = Field(ge=1, description="never more")
    metric: Literal["kl_k1", "kl_k3", "beyond_clip_share", "abs_p50", "abs_p90", "abs_p99", "abs_max"] = Field("kl_k3", description="of `mismatch` in metrics.jsonl")
    low: float = Field(ge=0, description="under it one step more is admitted")
    high: float = Field(gt=0, description="over it one step less")

    @model_validator(mode="after")
    def _order(self) -> AdaptiveStaleness:
        if self.lowest >= self.highest:
            raise ValueError(f"staleness.adaptive.lowest={self.lowest} is not under highest={self.highest}: nothing could change; use a lower one, or leave adaptive out")
        if self.low >= self.high:
            raise ValueError(f"staleness.adaptive.low={self.low} is not under high={self.high}: the bound would never rest; use a lower one")
        return self


class StalenessConfig(Section):
    """How far generation may run ahead (docs/staleness.md)."""

    max_staleness: int = Field(1, ge=0, description="S, in steps")
    window: Count = Field(1, description="W, straggler window in groups; 1 is lease order")
    adaptive: AdaptiveStaleness | None = Field(None, description="None: max_staleness is admitted throughout")

    @property
    def lowest(self) -> int:
        """The least that may be admitted in the run."""
        return self.max_staleness if self.adaptive is None else self.adaptive.lowest

    @property
    def highest(self) -> int:
        """The most."""
        return self.max_staleness if self.adaptive is None else self.adaptive.highest


class LeaseConfig(Section):
    """Loans of groups to actors."""

    lapse_s: Seconds = Field(600.0, description="a lease not fulfilled by then is lent again")
    max_attempts: Count = Field(3, description="leases of one group before it is dropped")
    report_every_tokens: int = Field(1024, ge=0, description="a replica reports an unfinished sample whenever it has drawn so many more tokens of it, so that another goes on from there when it dies; 0: never")
    max_progress_bytes: Count = Field(256 << 20, description="tokens and log-probs kept of unfinished samples; what does not fit is drawn again after a death")
    heartbeat_s: Seconds = 1.0
    silence_s: Seconds = Field(10.0, description="a replica not heard of for so long is gone")
    alone_minutes: float | None = Field(60.0, gt=0, description="a batch that is waited for with no replica for so long ends the run with a message, after a cut; None: waits for ever")


class FilterConfig(Section):
    """Which complete groups are worth training on."""

    min_usable: int = Field(2, ge=1, description="usable samples below which a group is dropped")
    unscored: Literal["drop_sample", "drop_group", "fallback"] = Field("drop_sample", description="what becomes of a sample whose scorer had no answer; fallback: unscored_value is its reward")
    unscored_value: float | None = Field(None, description="with unscored: fallback only")
    max_unscored_share: float | None = Field(0.5, ge=0, le=1, description="of the last 512 samples; above, the run stops with a message; None: it never does")
    zero_signal: bool = Field(False, description="drop groups whose rewards are all equal, and sample others instead")
    max_flat_a_step: Count | None = Field(None, description="groups dropped for zero signal since the last batch, after which `then` happens; None: no such bound")
    then: Literal["train", "fail"] = Field("train", description="train: the batch is filled with groups without signal, counted; fail: the run ends")
    max_consecutive_drops: Count = Field(256, description="groups dropped one after another before the run stops with a message")

    @model_validator(mode="after")
    def _fallback(self) -> FilterConfig:
        if (self.unscored == "fallback") != (self.unscored_value is not None):
            raise ValueError(f"filter.unscored={self.unscored} with unscored_value={self.unscored_value}: a fallback and its value belong together; give both, or neither")
        return self


class OptimizerConfig(Section):
    """One update a minibatch."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = Field("adamw", description="adamw_8bit: moments of a byte each (torchao); muon: for the matrices between hidden states, AdamW for everything else")
    lr: float = Field(1e-6, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_updates: int = Field(0, ge=0, description="linear warm-up, in optimizer updates")
    momentum: float = Field(0.95, ge=0, lt=1, description="of muon only")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up, in optimizer updates")
    decay_updates: Count | None = Field(None, description="update at which the decay ends; None: the run's last")
    min_lr_share: float = Field(0.0, ge=0, le=1, description="share of lr that the decay ends at")
    clip_norm: float = Field(1.0, gt=0)
    minibatches: Count = Field(1, description="optimizer updates an epoch")
    epochs: Count = Field(1, description="passes over the batch of a step")

    @model_validator(mode="after")
    def _without_effect(self) -> OptimizerConfig:
        if self.schedule == "constant" and (self.decay_updates is not None or self.min_lr_share):
            raise ValueError(f"optimizer.decay_updates={self.decay_updates}, min_lr_share={self.min_lr_share} with schedule=constant: nothing decays; use schedule=linear or cosine, or leave them out")
        if self.decay_updates is not None and self.decay_updates <= self.warmup_updates:
            raise ValueError(f"optimizer.decay_updates={self.decay_updates} is not more than warmup_updates={self.warmup_updates}: the decay would end before it begins; use a larger one")
        if self.kind != "muon" and self.momentum != 0.95:
            raise ValueError(f"optimizer.momentum={self.momentum} with kind={self.kind}: only kind=muon reads it; leave it out")
        return self


class CriticConfig(Section):
    """The critic of `algorithm.advantage.kind: gae` (docs/learner.md)."""

    model: str | None = Field(None, description="Hugging Face folder or hub id, with the policy's tokens; None: the model that the run starts from")
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    clip: float | None = Field(0.2, gt=0, description="how far a value may move in a step before its loss stops following; None: no bound")
    warmup_steps: int = Field(0, ge=0, description="steps in which the critic alone is trained and the actor stands still")

    @model_validator(mode="after")
    def _cut_like_the_actor(self) -> CriticConfig:
        for key in ("minibatches", "epochs"):
            if getattr(self.optimizer, key) != 1:
                raise ValueError(f"critic.optimizer.{key}={getattr(self.optimizer, key)}: the critic is updated with the actor, minibatch by minibatch; set optimizer.{key}")
        return self


class LoraConfig(Section):
    """Low-rank adapters (peft) in place of training the weights; replicas get the merged weights."""

    rank: Count = 16
    alpha: float = Field(32.0, gt=0, description="the product of the adapters is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1, description="names of linear modules")


class TrainerConfig(Section):
    """Ranks, precision and packing."""

    ranks: Count = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(0, ge=0, description="CPU threads a rank; 0: torch decides")
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="forward and backward; master weights are float32")
    served_dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of pushed weights")
    row_tokens: Count = Field(2048, description="token budget of one packed row")
    share_prefix: bool = Field(True, description="a prompt is computed once for the samples of its group in a row")
    attention: Literal["auto", "flex", "pieces"] = Field("auto", description="flex: one kernel that skips what the mask hides (CUDA); pieces: small dense attentions; auto: flex on CUDA")
    compile: bool | None = Field(None, description="each layer by itself, CUDA only; None: wherever flex attention is used")
    recompute: Literal["none", "selective", "full"] = Field("none", description="layers whose activations are thrown away and computed again in the backward pass")
    recompute_every: Count = Field(2, description="of selective: one layer in so many")
    head_dtype: Literal["compute", "float32"] = Field("compute", description="of the logits: rounded to compute_dtype, or not")
    freeze: tuple[str, ...] = Field((), description="patterns (regular expressions) of parameter names that are not trained")
    lora: LoraConfig | None = Field(None, description="None: the weights themselves are trained")
    reshard: bool | None = Field(None, description="a layer's gathered weights are freed after its forward pass and gathered again for backward; None: unless one rank holds all of them and recomputes nothing")
    offload: bool = Field(False, description="weights, gradients and optimizer state rest in CPU memory, CUDA only")

    @model_validator(mode="after")
    def _one_kind_of_freezing(self) -> TrainerConfig:
        if self.lora is not None and self.freeze:
            raise ValueError(f"trainer.freeze={list(self.freeze)} with trainer.lora: adapters alone are trained and every weight is frozen; leave freeze out, or name fewer lora.targets")
        return self


class KeepBest(Section):
    """A cut that is kept beside the newest ones: of those saved, the one whose step has the best value in metrics.jsonl."""

    metric: str = Field(min_length=1, description="field of a line of metrics.jsonl, dotted for one inside another")
    mode: Literal["max", "min"] = "max"


class CheckpointConfig(Section):
    """Cuts (docs/durability.md)."""

    every_steps: Count | None = Field(10, description="None: only at the end")
    keep: Count = Field(2, description="newest cuts that stay")
    keep_best: KeepBest | None = Field(None, description="one more that stays: the best by a metric; None: none")
    save_s: Seconds = Field(1800.0, description="each part of a save (copy, write, mark) has failed when it takes longer")
    leave_s: Seconds = Field(60.0, description="ranks told to stop get this long for the running step and their cut")


class JournalConfig(Section):
    """The account's journal (docs/durability.md)."""

    backend: Literal["segments", "redis"] = "segments"
    url: str = Field("", description="redis only: redis://HOST:PORT/NUMBER")
    segment_bytes: int = Field(64 << 20, ge=4096, description="segments only: a new file after this many bytes")
    max_groups: Count = Field(100_000, description="groups that no cut covers; from there on a cut comes before the next batch")
    max_bytes: int = Field(16 << 30, ge=1 << 16, description="bytes that no cut covers; as max_groups")


class PushConfig(Section):
    """Weight updates."""

    transport: Literal["auto", "gloo", "nccl", "ipc", "grpc", "folder"] = Field("auto", description="auto: nccl between GPUs, ipc on one GPU, gloo on CPUs; grpc: replicas fetch; folder: they read push.folder")
    bucket_bytes: int = Field(512 << 20, ge=1024)
    prepare_s: Seconds = Field(5.0, description="replicas that have not answered by then are left out of an epoch")
    collective_timeout_s: Seconds = Field(60.0, description="any one collective gives up after this")
    deadline_s: Seconds = Field(300.0, description="a whole epoch gives up after this")
    folder: str = Field("", description="shared path or URL on which every version is published for replicas that cannot be reached; empty: none")
    max_roots: Count = Field(8, description="trainer ranks that talk to the replicas; at least one on every machine")
    verify: Literal["off", "digest", "logprobs"] = Field("digest", description="off: coverage alone; digest: every slice; logprobs: also a probe prompt's log-probs after each update")
    probe_tolerance: float | None = Field(None, gt=0, description="verify=logprobs: largest mean absolute difference of log-probs; None: by dtype, 0.02 in float32, 0.3 where bfloat16 is involved")
    dtypes: dict[str, Literal["float32", "bfloat16", "float16"]] = Field({}, description="exceptions from trainer.served_dtype, by pattern of tensor names")
    generating_share: float = Field(0.0, ge=0, lt=1, description="share of the replicas that go on drawing while others apply; 0: all apply at once")


class LearnerConfig(Section):
    """Everything one learner needs."""

    run_dir: Path
    run_id: str = Field("", description="empty: made at the first start and kept in the run folder")
    model: str = Field(description="Hugging Face folder or hub id")
    address: str = Field("127.0.0.1:7430", description="where the gateway listens")
    metrics_address: str = Field("", description="host:port where Prometheus finds the learner's figures; port 0 takes a free one; empty: nowhere")
    steps: Count = Field(100, description="training steps of the whole run")
    max_minutes: float | None = Field(None, gt=0, description="end in good order after this time; None: no limit")
    seed: Seed = 0
    groups_per_step: Count = Field(8, description="P")
    scorer: str = Field("", description="name of the scorer; empty: the reward server's default")
    control: Literal["none", "shuffled_rewards"] = Field("none", description="shuffled_rewards: permute rewards inside each group; a control that must not learn")
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    lease: LeaseConfig = LeaseConfig()
    filter: FilterConfig = FilterConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig | None = Field(None, description="only with advantage.kind=gae, where None means the defaults")
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    push: PushConfig = PushConfig()
    alarms: AlarmConfig = AlarmConfig()
    security: SecurityConfig = SecurityConfig()
    evaluation: EvaluationConfig | None = Field(None, description="held-out prompts asked beside training; None: none are")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        """What the algorithm's preset says of other sections, under what the file says."""
        algorithm = given.get("algorithm") if isinstance(given, dict) else None
        if not isinstance(algorithm, dict | AlgorithmConfig):
            return given
        name = algorithm.get("name", "grpo") if isinstance(algorithm, dict) else algorithm.name
        filters = given.get("filter", {})
        return {**given, "filter": with_preset(filters, "filter", name=name)} if isinstance(filters, dict) else given

    def algorithm_of(self, name: str) -> AlgorithmConfig:
        """What the data set of this name trains with."""
        return algorithm_of_set(self.algorithm, self.data.sources[name].algorithm, key=f"{self.data.key_of(name)}.algorithm")

    def zero_signal_of(self, name: str) -> bool:
        """Whether groups of this data set are dropped whose rewards are all equal."""
        one = self.data.sources[name]
        preset = PRESETS.get(one.algorithm.get("name", ""), {}).get("filter", {})
        return bool(preset.get("zero_signal") or self.filter.zero_signal) if one.zero_signal is None else one.zero_signal

    def has_baseline(self, name: str) -> bool:
        """Whether each group of this data set has one sample more: the greedy answer, which the others are held against."""
        return self.algorithm_of(name).advantage.kind == "greedy_baseline"

    @model_validator(mode="after")
    def _critic_fits(self) -> LearnerConfig:
        if self.algorithm.advantage.kind != "gae" and self.critic is not None:
            raise ValueError(f"critic is set with algorithm {self.algorithm.name} (advantage.kind={self.algorithm.advantage.kind}): only advantage.kind=gae (name=ppo) has a critic; leave it out")
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(f"critic.warmup_steps={self.critic.warmup_steps} is not less than steps={self.steps}: the actor would never be trained; use fewer")
        return self

    @model_validator(mode="after")
    def _states_once_smaller(self) -> LearnerConfig:
        for key, optimizer in (("optimizer", self.optimizer), *((("critic.optimizer", self.critic.optimizer),) if self.critic else ())):
            if optimizer.kind == "adamw_8bit" and self.trainer.offload:
                raise ValueError(f"{key}.kind=adamw_8bit with trainer.offload=true: the moments rest in CPU memory, where the update would be computed without compiled kernels; use kind=adamw, or leave offload out")
        return self

    @property
    def total_updates(self) -> int:
        """Optimizer updates of a whole run in which every minibatch of every step makes one."""
        return self.steps * self.optimizer.epochs * self.optimizer.minibatches

    @property
    def critic_in_use(self) -> CriticConfig | None:
        """The critic's section, its defaults where the algorithm needs one and none is set."""
        return self.critic or CriticConfig() if self.algorithm.advantage.kind == "gae" else None

    @model_validator(mode="after")
    def _algorithms_fit(self) -> LearnerConfig:
        for name, one in self.data.sources.items():
            self._fits(name, one, self.algorithm_of(name))
        return self

    def _fits(self, name: str, one: SetConfig, algorithm: AlgorithmConfig) -> None:
        """One data set. Raises ValueError for a group, a length or a filter that its algorithm cannot do with."""
        key, kind = self.data.key_of(name), algorithm.advantage.kind
        size, size_key = one.group_size or self.sampling.group_size, f"{key}.group_size" if one.group_size else "sampling.group_size"
        length, length_key = one.max_new_tokens or self.sampling.max_new_tokens, f"{key}.max_new_tokens" if one.max_new_tokens else "sampling.max_new_tokens"
        zero_signal, zero_key = self.zero_signal_of(name), "filter.zero_signal" if one.zero_signal is None else f"{key}.zero_signal"
        if size == 1 and kind in GROUP_RELATIVE:
            raise ValueError(f"{size_key}=1 with algorithm {algorithm.name} (advantage.kind={kind}): a group of one has no spread and so no advantage; use group_size of 2 or more")
        if self.filter.min_usable > size:
            raise ValueError(f"filter.min_usable={self.filter.min_usable} is more than {size_key}={size}: every group would be dropped; use a smaller min_usable")
        if size == 1 and zero_signal:
            raise ValueError(f"{zero_key}=true with {size_key}=1: every group would be dropped, since one reward has no spread; set zero_signal=false")
        if algorithm.advantage.kind == "pass_at_k" and algorithm.advantage.k > size:
            raise ValueError(f"algorithm.advantage.k={algorithm.advantage.k} is more than {size_key}={size}: no subset of k exists; use a smaller k")
        if kind == "teacher" and zero_signal:
            raise ValueError(f"{zero_key}=true with advantage.kind=teacher: a teacher judges groups of equal rewards as well; set zero_signal=false")
        if kind == "greedy_baseline" and zero_signal:
            raise ValueError(f"{zero_key}=true with advantage.kind=greedy_baseline: samples of equal rewards still differ from the greedy answer's; set zero_signal=false")
        if kind == "greedy_baseline" and self.control == "shuffled_rewards":
            raise ValueError("control=shuffled_rewards with advantage.kind=greedy_baseline: only samples are shuffled, and their mean against the greedy answer would still teach; use another advantage for the control")
        if kind == "several_rewards" and zero_signal:
            raise ValueError(f"{zero_key}=true with advantage.kind=several_rewards: the filter looks at the total reward, whose parts may differ where it does not; set zero_signal=false")
        if kind == "several_rewards" and self.filter.unscored == "fallback":
            raise ValueError("filter.unscored=fallback with advantage.kind=several_rewards: unscored_value is one number, and this advantage needs every part; drop the sample or the group")
        if (kind == "gae") != (self.algorithm.advantage.kind == "gae"):
            raise ValueError(f"{key}.algorithm has advantage.kind={kind} and the run {self.algorithm.advantage.kind}: a critic sees every sample or none; use gae for all data sets, or for none")
        if kind == "gae" and zero_signal:
            raise ValueError(f"{zero_key}=true with advantage.kind=gae: a critic learns from groups of equal rewards as well; set zero_signal=false")
        if kind == "several_rewards" and self.control == "shuffled_rewards":
            raise ValueError("control=shuffled_rewards with advantage.kind=several_rewards: only the total is shuffled, the parts would still teach; use another advantage for the control")
        if algorithm.overlong is not None and algorithm.overlong.buffer_tokens > length:
            raise ValueError(f"algorithm.overlong.buffer_tokens={algorithm.overlong.buffer_tokens} is more than {length_key}={length}; use a smaller buffer")

    @model_validator(mode="after")
    def _contradictions(self) -> LearnerConfig:
        sampling, staleness = self.sampling, self.staleness
        if sampling.temperature == 0:
            raise ValueError(f"sampling.temperature=0 with group_size={sampling.group_size}: greedy samples of one prompt are all equal; use a temperature above 0")
        if sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"sampling.temperature={sampling.temperature} lies below {MIN_TEMPERATURE}, where engines clamp in silence and would sample another distribution than is trained on; use {MIN_TEMPERATURE} or more")
        if sampling.top_p != 1 or sampling.top_k != 0:
            raise ValueError(f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: the learner evaluates the whole vocabulary's distribution, so only top_p=1 and top_k=0 can be trained on; set them so")
        if not staleness.lowest <= staleness.max_staleness <= staleness.highest:
            raise ValueError(f"staleness.max_staleness={staleness.max_staleness} is outside adaptive.lowest={staleness.lowest} to highest={staleness.highest}: a run begins with it; use one inside")
        if staleness.window > staleness.lowest * self.groups_per_step + 1 and staleness.adaptive is not None:
            raise ValueError(f"staleness.window={staleness.window} is more than adaptive.lowest * groups_per_step + 1 = {staleness.lowest * self.groups_per_step + 1}: at the lowest bound fewer groups could be open than a batch needs (docs/staleness.md); use a smaller window, or a higher lowest")
        if staleness.max_staleness == 0 and staleness.window != 1:
            raise ValueError(f"staleness.window={staleness.window} with max_staleness=0: synchronous training takes groups in lease order; use window=1")
        if staleness.window > staleness.max_staleness * self.groups_per_step + 1:
            raise ValueError(f"staleness.window={staleness.window} is more than max_staleness * groups_per_step + 1 = {staleness.max_staleness * self.groups_per_step + 1}: fewer groups could be open than a batch needs (docs/staleness.md); use a smaller window")
        filters = self.filter
        if filters.max_flat_a_step is not None and not any(self.zero_signal_of(name) for name in self.data.sources):
            raise ValueError(f"filter.max_flat_a_step={filters.max_flat_a_step} without zero_signal: no group is dropped for that; set filter.zero_signal=true, or leave it out")
        if filters.max_flat_a_step is not None and filters.then == "train" and filters.max_flat_a_step >= filters.max_consecutive_drops:
            raise ValueError(f"filter.max_flat_a_step={filters.max_flat_a_step} is not under max_consecutive_drops={filters.max_consecutive_drops}: the run would end before a batch is filled; use a smaller one, or raise max_consecutive_drops")
        if self.optimizer.minibatches > self.groups_per_step:
            raise ValueError(f"optimizer.minibatches={self.optimizer.minibatches} is more than groups_per_step={self.groups_per_step}: a minibatch would be empty; use fewer")
        if self.journal.backend == "redis" and not self.journal.url:
            raise ValueError("journal.url is empty with journal.backend=redis; give redis://HOST:PORT/NUMBER")
        least = (staleness.highest + 2) * self.groups_per_step
        if self.journal.max_groups < least:
            raise ValueError(f"journal.max_groups={self.journal.max_groups} is less than (max_staleness (or adaptive.highest) + 2) * groups_per_step = {least}: the open groups and one batch must fit; use a larger one")
        if self.push.transport in ("nccl", "ipc") and self.trainer.device == "cpu":
            raise ValueError(f"push.transport={self.push.transport} with trainer.device=cpu: {self.push.transport} moves memory of GPUs only; use transport auto or gloo, or device: cuda")
        if self.push.transport == "folder" and not self.push.folder:
            raise ValueError("push.transport=folder with an empty push.folder: versions would be published nowhere; give the shared path, and the same as rollout.weights_folder")
        if self.lease.silence_s <= self.lease.heartbeat_s:
            raise ValueError(f"lease.silence_s={self.lease.silence_s} is not more than heartbeat_s={self.lease.heartbeat_s}: every replica would count as gone; use several heartbeats")
        return self
