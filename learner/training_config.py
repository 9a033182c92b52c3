"""Configuration of the trainer: updates, ranks, precision, cuts, and how weights reach the replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from learner.section import Count, Seconds, Section

Beta = Annotated[float, Field(ge=0, lt=1)]

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
