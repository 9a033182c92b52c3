"""The section `openai`. Imports pydantic only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class OpenAIConfig(BaseModel):
    """Where agents find the model under OpenAI's API, and what a session may hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    address: str = Field("", description="host:port of the endpoint; port 0 takes a free one; empty: there is none")
    max_body_bytes: Count = Field(8 << 20, description="of one request; larger ones are refused")
    tool_parser: Literal["hermes", "none"] = Field("hermes", description="how calls of tools are found in an answer: hermes reads <tool_call>{...}</tool_call>")
    max_sessions: Count = Field(1024, description="sessions of callers' own that are remembered; the one idle for longest is forgotten first")
    idle_s: float = Field(3600.0, gt=0, description="a session of a caller's own that nobody asked for so long is forgotten")
