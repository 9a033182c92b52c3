"""Configuration of one learner. Unknown keys and contradictions fail here, with the way out in the message."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from learner.account_config import FilterConfig as FilterConfig
from learner.account_config import JournalConfig as JournalConfig
from learner.account_config import LeaseConfig, SamplingConfig, StalenessConfig
from learner.alarm_config import AlarmConfig
from learner.algorithm_config import AlgorithmConfig
from learner.contradictions import check_sections, check_set
from learner.data_config import DataConfig as DataConfig
from learner.evaluation_config import EvaluationConfig
from learner.presets import PRESETS, with_preset
from learner.section import Count
from learner.section import Section as Section
from learner.set_algorithms import algorithm_of_set
from learner.tracker_config import TrackersConfig
from learner.training_config import CheckpointConfig as CheckpointConfig
from learner.training_config import CriticConfig, PushConfig
from learner.training_config import KeepBest as KeepBest
from learner.training_config import LoraConfig as LoraConfig
from learner.training_config import OptimizerConfig as OptimizerConfig
from learner.training_config import TrainerConfig as TrainerConfig
from protos.security import SecurityConfig

Seed = Annotated[int, Field(ge=0, lt=2**31)]  # what every generator that is seeded with it takes


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
    trackers: TrackersConfig = TrackersConfig()
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
            check_set(self, name, one, self.algorithm_of(name))
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> LearnerConfig:
        check_sections(self)
        return self
