"""Held-out prompts asked beside training: which, how often, how drawn (docs/evaluation.md)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from learner.section import Count, Seconds, Section

MIN_TEMPERATURE = 0.01  # engines clamp below it in silence (rollout_server/engine.py)


class EvaluationConfig(Section):
    """Evaluation beside training. The model's template, system message and suffix are those of `data`."""

    prompts: Path = Field(description="held-out prompts, read as `data` says (of several sets: as what stands beside them says)")
    split: str | None = Field(None, description="of saved and hub; None: data.split")
    every_steps: Count | None = Field(10, description="a policy step that is a multiple of it is evaluated; None: only at_start and at_end")
    at_start: bool = Field(True, description="evaluate policy step 0")
    at_end: bool = Field(True, description="evaluate the last policy before the run ends")
    greedy: bool = Field(True, description="one greedy answer to each prompt")
    samples: int = Field(0, ge=0, description="answers drawn at `temperature` to each prompt; 0: none")
    temperature: float | None = Field(None, ge=MIN_TEMPERATURE, description="of `samples`; None: sampling.temperature")
    k: tuple[Count, ...] = Field((), description="pass@k of `samples`, for each of these")
    threshold: float = Field(0.5, description="an answer with at least this score is correct, for pass@k")
    max_prompts: Count | None = Field(None, description="the first so many of the file; None: all")
    max_new_tokens: Count | None = Field(None, description="of each answer; None: sampling.max_new_tokens")
    share: float = Field(0.25, gt=0, le=1, description="of all replicas' places that evaluation may hold while training goes on; one prompt's answers always fit")
    deadline_s: Seconds = Field(600.0, description="an evaluation ends after it with what it has; the run's end waits no longer")

    @model_validator(mode="after")
    def _contradictions(self) -> EvaluationConfig:
        if not self.greedy and not self.samples:
            raise ValueError("evaluation.greedy=false with evaluation.samples=0: nothing would be asked; set greedy=true, or samples of 1 or more")
        if self.temperature is not None and not self.samples:
            raise ValueError(f"evaluation.temperature={self.temperature} with evaluation.samples=0: greedy answers have no temperature; set samples, or leave temperature out")
        if self.k and max(self.k) > self.samples:
            raise ValueError(f"evaluation.k={list(self.k)} with evaluation.samples={self.samples}: pass@k needs k samples or more of each prompt; set samples to {max(self.k)} or more, or use a smaller k")
        if len(set(self.k)) != len(self.k):
            raise ValueError(f"evaluation.k={list(self.k)} names a k twice; name each once")
        if self.every_steps is None and not self.at_start and not self.at_end:
            raise ValueError("evaluation.every_steps=null with at_start=false and at_end=false: nothing would ever be evaluated; set one of them, or leave `evaluation` out")
        return self

    @property
    def answers_a_prompt(self) -> int:
        """Samples of one prompt; the greedy one is the last."""
        return self.samples + self.greedy

    def is_due(self, policy_step: int) -> bool:
        """Whether a policy is to be evaluated when it is published."""
        return self.at_start if policy_step == 0 else self.every_steps is not None and policy_step % self.every_steps == 0
