"""What is optimised, composed by configuration: advantage, loss, aggregation, correction, KL (docs/algorithms.md).

Each `kind` has exactly the options that it reads, so an option without effect fails at load. What contradicts itself fails
here too, with the way out in the message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from learner.presets import with_preset
from learner.section import Count, Section

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function, importable where the trainer starts")]


class GroupAdvantage(Section):
    """GRPO; Dr. GRPO with normalize off."""

    kind: Literal["group"] = "group"
    normalize: bool = Field(True, description="divide by the group's standard deviation")
    deviation: Literal["population", "sample"] = Field("population", description="divided by n, or by n - 1")


class PlainAdvantage(Section):
    """Advantages without options: RLOO, REINFORCE++ without and with baseline, OPO, GPG, best of the group."""

    kind: Literal["leave_one_out", "batch", "group_then_batch", "length_weighted", "gpg", "best_of_group"]


class PassAtKAdvantage(Section):
    kind: Literal["pass_at_k"]
    k: Count
    threshold: float = Field(0.5, description="a sample with at least this reward is correct")


class SeveralRewardsAdvantage(Section):
    """GDPO."""

    kind: Literal["several_rewards"]
    weights: dict[str, float] = Field(min_length=1, description="weight of each named reward part")


class CriticAdvantage(Section):
    """GAE, with the critic of section `critic`."""

    kind: Literal["gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    whiten: bool = Field(True, description="advantages to mean 0 and deviation 1 over the tokens of the batch")


class GreedyAdvantage(Section):
    """ReMax: each group has one sample more, drawn greedily, whose reward is the baseline."""

    kind: Literal["greedy_baseline"]


class TeacherAdvantage(Section):
    kind: Literal["teacher"]


class CustomAdvantage(Section):
    kind: Literal["custom"]
    function: FunctionName
    options: dict[str, Any] = Field({}, description="keyword arguments of the function")


AdvantageConfig = Annotated[
    GroupAdvantage | PlainAdvantage | PassAtKAdvantage | SeveralRewardsAdvantage | CriticAdvantage | GreedyAdvantage | TeacherAdvantage | CustomAdvantage, Field(discriminator="kind")
]
GROUP_RELATIVE = ("group", "leave_one_out", "group_then_batch", "length_weighted", "gpg", "best_of_group", "pass_at_k", "several_rewards")


class ClipLoss(Section):
    """PPO's."""

    kind: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(3.0, gt=1, description="bound of the ratio for negative advantages; None: none")


class GspoLoss(Section):
    kind: Literal["gspo"]
    clip_low: float = Field(3e-4, gt=0, lt=1)
    clip_high: float = Field(4e-4, gt=0)


class CispoLoss(Section):
    kind: Literal["cispo"]
    clip_low: float = Field(1.0, gt=0, le=1, description="1: no lower bound")
    clip_high: float = Field(2.0, gt=0)


class SapoLoss(Section):
    kind: Literal["sapo"]
    tau_positive: float = Field(1.0, gt=0)
    tau_negative: float = Field(1.05, gt=0)


class GeometricMeanLoss(Section):
    kind: Literal["geometric_mean"]
    clip_log: float = Field(0.4, gt=0, description="bound of a token's log-ratio")


class DivergenceLoss(Section):
    """DPPO."""

    kind: Literal["dppo_tv", "dppo_kl"]
    threshold: float = Field(gt=0, description="divergence above which a token that moves away is masked; around 0.2 for tv, 0.05 for kl")


class ClipCovLoss(Section):
    kind: Literal["clip_cov"]
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    share: float = Field(2e-4, gt=0, le=1, description="of all tokens, held back at random")
    covariance_low: float = 1.0
    covariance_high: float = 5.0


class KlCovLoss(Section):
    kind: Literal["kl_cov"]
    share: float = Field(2e-3, gt=0, le=1, description="of all tokens, those of the largest covariance")
    coefficient: float = Field(1.0, gt=0)


class ReinforceLoss(Section):
    kind: Literal["reinforce"]


class CustomLoss(Section):
    kind: Literal["custom"]
    function: FunctionName
    options: dict[str, Any] = Field({}, description="keyword arguments of the function")


LossConfig = Annotated[
    ClipLoss | GspoLoss | CispoLoss | SapoLoss | GeometricMeanLoss | DivergenceLoss | ClipCovLoss | KlCovLoss | ReinforceLoss | CustomLoss, Field(discriminator="kind")
]


class CorrectionConfig(Section):
    """Weights for what the sampler drew and the policy at the step's start would not."""

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "clip", "mask", "reject"] = "truncate"
    low: float | None = Field(None, ge=0, description="lower bound of the ratio; None with truncate only")
    high: float = Field(2.0, gt=0, description="upper bound of the ratio")
    veto: float | None = Field(None, gt=0, lt=1, description="a sample with a token of a smaller ratio is left out; None: none is")
    second_moment: float | None = Field(None, gt=0, description="M2PO: bound of the mean squared log-ratio over the batch; None: none")

    @model_validator(mode="after")
    def _bounds(self) -> CorrectionConfig:
        if (self.low is None) != (self.mode == "truncate"):
            raise ValueError(f"algorithm.correction.low={self.low} with mode={self.mode}: truncate has no lower bound, and the other modes need one; {'leave low out' if self.mode == 'truncate' else 'set low, for instance 0.5'}")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"algorithm.correction.low={self.low} is not under high={self.high}: no ratio would be inside; use a smaller low")
        return self


class AdaptiveKl(Section):
    """The pull grows while the KL is over a target and shrinks while it is under (Ziegler et al. 2019)."""

    target: float = Field(gt=0, description="mean KL of a token, in nats, by `estimator`")
    horizon_steps: float = Field(100.0, gt=0, description="the factor changes by at most 0.2 / horizon_steps a step")


class KlConfig(Section):
    """A pull towards another policy."""

    coefficient: float = Field(gt=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    gradient: Literal["plain", "straight_through", "importance"] = "straight_through"
    where: Literal["loss", "reward"] = "loss"
    reference: Literal["behaviour", "frozen", "periodic", "ema"] = Field(
        "behaviour", description="behaviour: the policy that drew the token, which costs no second model; frozen: `model`; periodic: the policy of some steps ago; ema: its moving average"
    )
    model: str | None = Field(None, description="of frozen; None: the model that the run starts from")
    every_steps: Count | None = Field(None, description="of periodic: steps between two copies of the policy")
    decay: float | None = Field(None, gt=0, lt=1, description="of ema, a step")
    offload: bool = Field(True, description="the second model waits in CPU memory between its passes")
    adaptive: AdaptiveKl | None = Field(None, description="`coefficient` is what it starts from; None: it stays")

    @model_validator(mode="after")
    def _contradictions(self) -> KlConfig:
        if self.where == "loss" and self.estimator == "k1" and self.gradient == "plain":
            raise ValueError("algorithm.kl: estimator=k1 with gradient=plain in the loss has a gradient of mean 0 and pulls nowhere; use gradient=straight_through, or where=reward")
        for key, owner in (("model", "frozen"), ("every_steps", "periodic"), ("decay", "ema")):
            if getattr(self, key) is not None and self.reference != owner:
                raise ValueError(f"algorithm.kl.{key}={getattr(self, key)} with reference={self.reference}: only reference={owner} reads it; leave it out")
        if (self.reference == "periodic" and self.every_steps is None) or (self.reference == "ema" and self.decay is None):
            raise ValueError(f"algorithm.kl.reference={self.reference} needs {'every_steps' if self.reference == 'periodic' else 'decay'}; set it, for instance {'50' if self.reference == 'periodic' else '0.99'}")
        if self.where == "reward" and self.gradient != "straight_through":
            raise ValueError(f"algorithm.kl.gradient={self.gradient} with where=reward: a reward has no gradient; leave gradient out")
        if self.where == "reward" and self.reference == "behaviour":
            raise ValueError("algorithm.kl: where=reward with reference=behaviour is 0 for every token that was just drawn; use where=loss")
        return self


class TeacherConfig(Section):
    """The model that `advantage.kind: teacher` learns from."""

    model: str = Field(description="Hugging Face folder or hub id, of the policy's vocabulary")
    offload: bool = Field(True, description="the teacher waits in CPU memory between its passes")


class OverlongConfig(Section):
    """DAPO's soft punishment of answers near the length limit, added to the reward before advantages."""

    buffer_tokens: Count = Field(description="tokens before the limit over which the punishment grows")
    weight: float = Field(1.0, gt=0, description="punishment at the limit")


PresetName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "dapo", "gspo", "cispo", "sapo", "decoupled_ppo", "ppo", "opd"]


class AlgorithmConfig(Section):
    """A preset by name, and whatever is set beside it on top."""

    name: PresetName = "grpo"
    advantage: AdvantageConfig = GroupAdvantage()
    loss: LossConfig = ClipLoss()
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    norm_tokens: Count | None = Field(None, description="of sequence_sum; None: sampling.max_new_tokens")
    old_policy: Literal["behaviour", "recomputed", "log_linear"] = Field(
        "behaviour", description="whose log-probs the ratio starts from: the sampler's, the policy's at the step's start, or the latter estimated from staleness"
    )
    correction: CorrectionConfig | None = None
    kl: KlConfig | None = None
    entropy_bonus: float = Field(0.0, ge=0, description="coefficient of the mean entropy of trained tokens; above 0 costs time and memory")
    teacher: TeacherConfig | None = None
    truncated: Literal["train", "mask"] = Field("train", description="mask: a sample cut off at the length limit counts for its group's statistics and trains nothing")
    overlong: OverlongConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return with_preset(given, "algorithm", name=given.get("name", "grpo")) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _contradictions(self) -> AlgorithmConfig:
        if (self.advantage.kind == "teacher") != (self.teacher is not None):
            raise ValueError(f"algorithm.name={self.name}: advantage.kind={self.advantage.kind} with algorithm.teacher={'set' if self.teacher else 'not set'}; a teacher goes with advantage.kind=teacher (name=opd) and is needed there: teacher: {{model: FOLDER}}")
        if self.norm_tokens is not None and self.aggregation != "sequence_sum":
            raise ValueError(f"algorithm.norm_tokens={self.norm_tokens} with aggregation={self.aggregation}: only sequence_sum divides by a constant; leave it out")
        if self.loss.kind == "reinforce" and self.old_policy != "behaviour":
            raise ValueError(f"algorithm.old_policy={self.old_policy} with loss.kind=reinforce: that loss has no ratio, so nothing would start from there; use old_policy=behaviour")
        weighs = self.correction is not None and self.correction.mode != "reject"
        if weighs and self.old_policy == "behaviour" and self.loss.kind not in ("reinforce", "custom"):
            raise ValueError(f"algorithm.correction.mode={self.correction and self.correction.mode} with old_policy=behaviour and loss.kind={self.loss.kind}: the ratio holds the mismatch already and it would count twice; use old_policy=recomputed, or mode=reject")
        return self

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether a pass over the batch comes before the first update."""
        return self.old_policy == "recomputed" or (self.correction is not None and self.correction.second_moment is not None)

    @property
    def trains_all(self) -> bool:
        """Whether a sample of advantage 0 has a gradient too."""
        return self.advantage.kind == "gae" or self.kl is not None or self.teacher is not None or self.entropy_bonus > 0 or self.loss.kind == "custom"

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """(low, high) distances from 1 beyond which a token's ratio counts as outside, for metrics."""
        return (self.loss.clip_low, self.loss.clip_high) if isinstance(self.loss, ClipLoss | ClipCovLoss) else (0.2, 0.28)
