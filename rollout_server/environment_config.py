"""Which environments samples are played in. Imports pydantic only."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
BUILT_IN = ("calculator", "tower_of_hanoi")
REMOTE = "grpc://"
SHARED_SESSIONS = 64  # of what comes with Headrace, which neither blocks nor leaks, in one process
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class EnvironmentConfig(BaseModel):
    """One environment, and how far it is trusted."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    name: str = Field(min_length=1, description="what records name in their field `environment`; a record without that field goes to the only one")
    use: str = Field(description="calculator, tower_of_hanoi, module:Class of your own, or grpc://host:port of an environment server")
    agent: bool = Field(False, description="`use` is a program that calls the model through the OpenAI-compatible endpoint (section openai), and no environment")
    options: dict[str, Any] = Field({}, description="keyword arguments of the class; none for grpc")
    template: Literal["chat", "raw"] = Field("chat", description="chat: messages go through the model's chat template; raw: texts one after the other")
    max_turns: Count = Field(8, description="answers of the policy in one sample; then it is cut")
    max_turn_tokens: Count | None = Field(None, description="of one answer; None: what is left of sampling.max_new_tokens")
    unfinished_reward: float | None = Field(0.0, description="of a sample that was cut before its environment gave any reward; None: the reward server is asked")
    load_timeout_s: Seconds = Field(60.0, description="for a process to start and import it")
    reset_timeout_s: Seconds = 30.0
    step_timeout_s: Seconds = Field(10.0, description="wall-clock limit of one step; then its process is killed")
    run_timeout_s: Seconds = Field(300.0, description="with agent: wall-clock limit of one sample")
    max_sessions: Count = Field(256, description="samples that are played at once; others wait for a place")
    sessions_per_process: Count | None = Field(None, description="None: one for code of yours, so that one that hangs takes no other along; 64 for what comes with Headrace")
    sessions_before_restart: Count = Field(1000, description="of one process, which ends then")
    memory_mb: Count | None = Field(1024, description="data memory of a process; None: no limit")

    @property
    def is_remote(self) -> bool:
        return self.use.startswith(REMOTE)

    @property
    def sessions_in_process(self) -> int:
        """How many sessions share a process."""
        if self.sessions_per_process is not None:
            return self.sessions_per_process
        return SHARED_SESSIONS if self.use in BUILT_IN else 1

    @model_validator(mode="after")
    def _known(self) -> EnvironmentConfig:
        if not (self.use in BUILT_IN or self.is_remote or _CLASS.fullmatch(self.use)):
            raise ValueError(f"environment {self.name}: use={self.use!r} is none of {', '.join(BUILT_IN)}, module:Class, grpc://host:port; give one of them")
        if self.is_remote and (self.options or self.agent):
            raise ValueError(f"environment {self.name}: options and agent are matters of the server at {self.use}; remove them here, and configure them there")
        if self.agent and self.use in BUILT_IN:
            raise ValueError(f"environment {self.name}: use={self.use} is an environment and no agent; remove agent, or give module:function of your agent")
        return self


def check_names(environments: tuple[EnvironmentConfig, ...]) -> None:
    """Raises ValueError for a name given twice."""
    names = [each.name for each in environments]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"environments: the name {twice[0]!r} is given twice; records choose by name, so give each its own")
