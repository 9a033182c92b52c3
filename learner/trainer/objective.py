"""The configured objective: which functions of learner/algorithms make a row's loss, and how they go together.

    row ─▶ log-probs ─▶ policy loss × correction weight + KL + entropy ─▶ aggregation ─▶ this row's share of the batch's loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.algorithm_config import (
    AlgorithmConfig,
    CispoLoss,
    ClipCovLoss,
    ClipLoss,
    CorrectionConfig,
    CustomLoss,
    DivergenceLoss,
    GeometricMeanLoss,
    GspoLoss,
    KlCovLoss,
    LossConfig,
    SapoLoss,
)  # fmt: skip
from learner.algorithms.aggregation import sequence_mean, sequence_sum, token_mean
from learner.algorithms.cispo import cispo_loss
from learner.algorithms.correction import bounded_weight, leveled_ratio, veto
from learner.algorithms.covariance import kl_cov_loss, without_gradient
from learner.algorithms.distillation import distillation_advantages
from learner.algorithms.divergence_loss import binary_kl, binary_total_variation, divergence_loss
from learner.algorithms.kl import ESTIMATORS, kl_loss, kl_penalty_to_go
from learner.algorithms.policy_loss import clipped_policy_loss
from learner.algorithms.proximal import log_linear_proximal
from learner.algorithms.reinforce import reinforce_loss
from learner.algorithms.sapo import sapo_loss
from learner.algorithms.sequence_ratio import geometric_mean_loss, gspo_loss
from learner.algorithms.tokens import Tokens
from learner.config import LearnerConfig
from learner.trainer.credit import AdvantageFunction, advantage_function, advantages_of
from learner.trainer.kl_control import KlControl
from learner.trainer.packing import Row
from learner.trainer.plug import load_function
from learner.trainer.table import Counts, Entry, Minibatch, SampleId, cut

LossFunction = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]  # loss of each token [n], and sums over tokens for metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Example: `make_objective(config.algorithm, max_new_tokens=256).minibatches(batch.table, num=2)`"""

    config: AlgorithmConfig
    advantage: AdvantageFunction
    loss: LossFunction
    max_new_tokens: int
    sets: Mapping[str, Objective] = field(default_factory=dict)  # by data set, where it has its own; they have none themselves
    control: KlControl = field(default_factory=KlControl)  # one for all data sets

    def of(self, data_set: str) -> Objective:
        """The objective of a sample's data set."""
        return self.sets.get(data_set, self)

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether a pass over the batch comes before the first update."""
        return any(one.config.needs_start_logprobs for one in (self, *self.sets.values()))

    @property
    def bounds_second_moment(self) -> bool:
        """Whether a choice over the whole batch needs that pass for every minibatch."""
        return any(one.config.correction is not None and one.config.correction.second_moment is not None for one in (self, *self.sets.values()))

    def masks(self, entry: Entry) -> bool:
        """Whether a sample trains nothing because it was cut off at the length limit."""
        return entry.truncated and self.of(entry.data_set).config.truncated == "mask"

    def minibatches(self, table: Sequence[Entry], *, num: int) -> list[Minibatch]:
        """The batch cut into `num` minibatches, each sample with its advantage; these are the whole batch's (of its data set), whatever `num`."""
        advantages: dict[SampleId, float] = {}
        for name in dict.fromkeys(entry.data_set for entry in table):
            one = self.of(name)
            advantages |= advantages_of([entry for entry in table if entry.data_set == name], one.advantage, overlong=one.config.overlong, max_new_tokens=one.max_new_tokens)
        return cut(table, advantages, num_minibatches=num, trains_all=lambda entry: self.of(entry.data_set).config.trains_all, masks=self.masks)

    def row_loss(self, row: Row, logprob: Tensor, entropy: Tensor | None, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """This row's share of the loss, a scalar, and sums over its tokens. Args: logprob [num_targets]; entropy alike, or None if not wanted."""
        tokens = self._tokens(row, logprob)
        losses, sums = self.loss(tokens)
        if losses.shape != logprob.shape:
            raise ValueError(f"the loss function answered {tuple(losses.shape)} for {tuple(logprob.shape)} tokens; it must give the loss of each token")
        if self.config.correction is not None:
            weight = _weight(self.config.correction, tokens, self._start(row, logprob), row)
            losses, sums = losses * weight, sums | {"correction_weight": weight.sum(), "corrected_away": (weight == 0).sum()}
        kl = self.config.kl
        if kl is not None and kl.where == "loss":
            value = kl_loss(logprob, _reference(row), estimator=kl.estimator, gradient=kl.gradient, log_ratio=logprob - row.behaviour)
            losses, sums = losses + self.control.coefficient(kl) * value, sums | _kl_sums(value)
        elif kl is not None:
            sums = sums | _kl_sums(ESTIMATORS[kl.estimator](row.behaviour - _reference(row)))
        if entropy is not None:
            losses, sums = losses - self.config.entropy_bonus * entropy, sums | {"entropy": entropy.detach().sum()}
        return self._aggregate(losses, row, counts), sums

    def _start(self, row: Row, logprob: Tensor) -> Tensor:
        """Log-probs of the policy at the step's start: of the pass before the first update, or, in the minibatch before it, the present ones."""
        return logprob.detach() if row.start is None else row.start

    def _tokens(self, row: Row, logprob: Tensor) -> Tokens:
        if self.config.old_policy == "recomputed":
            old = self._start(row, logprob)
        elif self.config.old_policy == "log_linear":
            old = log_linear_proximal(logprob, row.behaviour, row.staleness)
        else:
            old = row.behaviour
        return Tokens(
            logprob=logprob, old=old, behaviour=row.behaviour, advantage=self._advantage(row, logprob), sequence=row.sequence, num_sequences=row.num_sequences, selected=row.selected
        )  # fmt: skip

    def _advantage(self, row: Row, logprob: Tensor) -> Tensor:
        """The sample's advantage, and what a teacher or a KL in the reward says of each token."""
        advantage, kl = row.advantage, self.config.kl
        if row.teacher is not None and self.config.teacher is not None:
            advantage = advantage + distillation_advantages(logprob, row.teacher)
        if kl is not None and kl.where == "reward" and self.config.advantage.kind != "gae":  # there it is in the rewards that the critic sees
            advantage = advantage + kl_penalty_to_go(
                row.behaviour, _reference(row), row.sequence, num_sequences=row.num_sequences, coefficient=self.control.coefficient(kl), estimator=kl.estimator
            )  # fmt: skip
        return advantage

    def _aggregate(self, losses: Tensor, row: Row, counts: Counts) -> Tensor:
        if self.config.aggregation == "token_mean":
            return token_mean(losses, num_tokens=counts.num_tokens)
        if self.config.aggregation == "sequence_mean":
            return sequence_mean(losses, row.sequence_tokens, num_sequences=counts.num_sequences)
        return sequence_sum(losses, num_sequences=counts.num_sequences, norm_tokens=self.config.norm_tokens or self.max_new_tokens)


def _reference(row: Row) -> Tensor:
    return row.behaviour if row.reference is None else row.reference


def _kl_sums(value: Tensor) -> dict[str, Tensor]:
    return {"kl": value.detach().sum(), "kl_tokens": torch.tensor(value.numel())}


def make_objective(config: AlgorithmConfig, *, max_new_tokens: int, sets: Mapping[str, Objective] = {}, control: KlControl | None = None) -> Objective:
    """control: that of the run's other objectives; None: its own. Raises ValueError for a user's function that cannot be loaded."""
    return Objective(
        config=config, advantage=advantage_function(config.advantage), loss=loss_function(config.loss), max_new_tokens=max_new_tokens, sets=sets, control=control or KlControl(config.kl)
    )  # fmt: skip


def objective_of_run(config: LearnerConfig) -> Objective:
    """With those of the data sets. A constant that sequence sums are divided by is the run's. Raises ValueError for a user's function that cannot be loaded."""
    length, control = config.sampling.max_new_tokens, KlControl(config.algorithm.kl)
    sets = {}
    for name, one in config.data.sets.items():
        own = config.algorithm_of(name)
        if own.aggregation == "sequence_sum":
            own = own.model_copy(update={"norm_tokens": config.algorithm.norm_tokens or length})
        sets[name] = make_objective(own, max_new_tokens=one.max_new_tokens or length, control=control)
    return make_objective(config.algorithm, max_new_tokens=length, sets=sets, control=control)


def loss_function(config: LossConfig) -> LossFunction:
    """The policy loss that a configuration names. Raises ValueError for a user's function that cannot be loaded."""
    match config:
        case ClipLoss():
            return lambda t: clipped_policy_loss(t.logprob, t.old, t.advantage, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip)
        case GspoLoss():
            return lambda t: gspo_loss(t.logprob, t.old, t.advantage, t.sequence, num_sequences=t.num_sequences, clip_low=config.clip_low, clip_high=config.clip_high)
        case CispoLoss():
            return lambda t: cispo_loss(t.logprob, t.old, t.advantage, clip_low=config.clip_low, clip_high=config.clip_high)
        case SapoLoss():
            return lambda t: sapo_loss(t.logprob, t.old, t.advantage, tau_positive=config.tau_positive, tau_negative=config.tau_negative)
        case GeometricMeanLoss():
            return lambda t: geometric_mean_loss(t.logprob, t.old, t.advantage, t.sequence, num_sequences=t.num_sequences, clip_log=config.clip_log)
        case DivergenceLoss():
            distance = binary_total_variation if config.kind == "dppo_tv" else binary_kl
            return lambda t: divergence_loss(t.logprob, t.old, t.advantage, distance(t.logprob, t.old), threshold=config.threshold)
        case ClipCovLoss():
            return lambda t: _clip_cov(t, config)
        case KlCovLoss():
            return lambda t: kl_cov_loss(t.logprob, t.old, t.advantage, t.selected, coefficient=config.coefficient)
        case CustomLoss():
            function = load_function(config.function, key="algorithm.loss.function")
            return lambda t: function(t, **config.options)
        case _:
            return lambda t: reinforce_loss(t.logprob, t.old, t.advantage)


def _clip_cov(tokens: Tokens, config: ClipCovLoss) -> tuple[Tensor, dict[str, Tensor]]:
    loss, sums = clipped_policy_loss(tokens.logprob, tokens.old, tokens.advantage, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=None)
    return without_gradient(loss, tokens.selected), sums | {"held": tokens.selected.sum()}


def _weight(config: CorrectionConfig, tokens: Tokens, start: Tensor, row: Row) -> Tensor:
    """The correction's weight of each token, [n], detached: of start (the proximal policy where the ratio starts from it) against the sampler."""
    target = start if tokens.old is tokens.behaviour else tokens.old
    log_ratio = target - tokens.behaviour
    ratio = leveled_ratio(log_ratio, tokens.sequence, num_sequences=tokens.num_sequences, level=config.level)
    weight = bounded_weight(ratio, mode=config.mode, low=config.low or 0.0, high=config.high)
    if config.veto is not None:
        weight = weight * veto(log_ratio, tokens.sequence, num_sequences=tokens.num_sequences, lowest=config.veto)
    return torch.where(row.kept, weight, torch.zeros_like(weight))
