"""Configuration of one environment server. Imports pydantic only."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protos.security import SecurityConfig
from rollout_server.environment_config import EnvironmentConfig, check_names


class EnvironmentServerConfig(BaseModel):
    """`python -m rollout_server.environments`: environments beside no engine, for any number of rollout servers."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    address: str = Field("127.0.0.1:0", description="where EnvironmentService listens; port 0 takes a free one")
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    idle_s: float = Field(1800.0, gt=0, description="a session that nobody asked for so long is closed: its rollout server is gone")
    grace_s: float = Field(10.0, ge=0, description="for running calls, when the server is told to stop")
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _playable(self) -> EnvironmentServerConfig:
        check_names(self.environments)
        for each in self.environments:
            if each.is_remote or each.agent:
                raise ValueError(f"environment {each.name}: an environment server plays environments itself; {'use=' + each.use if each.is_remote else 'agent=true'} belongs into a rollout server's configuration")
        return self
