"""Configuration of one rollout server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protos.security import SecurityConfig
from rollout_server.endpoint.config import OpenAIConfig
from rollout_server.environment_config import EnvironmentConfig, check_names

Count = Annotated[int, Field(ge=1)]


class RolloutConfig(BaseModel):
    """One replica: its engine, whom it serves, where it has things scored."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    model: str = Field(description="Hugging Face folder or hub id")
    address: str = Field("127.0.0.1:0", description="where RolloutService listens; port 0 takes a free one")
    metrics_address: str = Field("", description="host:port where Prometheus finds this server's figures; port 0 takes a free one; empty: nowhere")
    learner: str = Field("", description="host:port of a learner; empty: a plain generation service")
    rewards: tuple[str, ...] = Field((), description="host:port of reward servers; needed with a learner")
    replica_id: str = Field("", description="empty: host name and process id")
    run_id: str = Field("", description="run that the learner must be; empty: any")
    engine: Literal["vllm", "small"] = Field("vllm", description="small: a plain engine for tests, never chosen by itself")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    head_dtype: Literal["compute", "float32"] = Field("compute", description="of the logits: rounded to dtype, or not; as the learner's trainer.head_dtype. vllm only")
    max_model_len: Count = 2048
    max_num_seqs: Count = Field(64, description="samples drawn at once")
    concurrency: Literal["adaptive", "fixed"] = Field("adaptive", description="how many samples of a learner's are drawn at once: by the KV cache, preemptions and queue that the engine tells of, up to max_num_seqs; or always max_num_seqs")
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 20, description="KV cache on CPU; on a GPU gpu_memory_fraction decides")
    gpu_memory_fraction: float = Field(0.9, gt=0, le=1)
    block_size: int = Field(32, ge=1, description="KV block in tokens; small prompts reuse prefixes only with small blocks")
    tensor_parallel: Count = 1
    pipeline_parallel: Count = Field(1, description="parts of the layers, one after the other; tensor_parallel x pipeline_parallel workers an engine")
    engines: Count = Field(1, description="engines of this server, each with its own scheduler process and GPUs; requests are spread by load, an update reaches all")
    quantization: str = Field("", description="the engine's own online quantization of weights, by vLLM's name (fp8, fp8_per_channel, ...): updates are quantized as they are loaded; empty: served in dtype")
    kv_cache_dtype: str = Field("auto", description="of the KV cache, by vLLM's name (fp8, ...); auto: dtype")
    enforce_eager: bool = True
    fast_path: bool = Field(True, description="take tokens and log-probs out of vLLM a step at a time for all requests (docs/rollout.md); versions on which that is not tested go vLLM's own way, with a warning. False: always vLLM's own way")
    delta_interval_s: float = Field(0.05, ge=0, le=10, description="least time between two messages of one stream, first and last excepted; 0: a message a token. With the fast path only")
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0: the engine decides")
    seed: int = Field(0, ge=0, lt=2**31)
    in_flight: Literal["recompute", "keep"] = Field("recompute", description="KV of running requests at an update: recomputed under the new weights, or kept")
    apply_updates: bool = Field(True, description="False is a control: versions count as loaded but the weights stay the base's")
    apply: Literal["auto", "loader"] = Field("auto", description="how an update gets into the engine: auto copies straight into its parameters where that is proved right at the start; loader: always by the engine's own")
    weights_folder: str = Field("", description="shared path or URL on which the learner publishes versions (push.folder); empty: none. With a learner versions are read there instead of being fetched; without one the newest is served")
    mirror_dir: str = Field("/dev/shm", description="where fetched weights lie: as much room as the model in its served dtype")
    deltas: bool = Field(True, description="fetch only what has changed since the version that lies in mirror_dir")
    peers: bool = Field(False, description="fetch from replicas that the learner names, and serve others: what was fetched is kept")
    stall_s: float = Field(300.0, gt=0, description="seconds without a token while requests run, after which the engine counts as wedged and is restarted; longer than its longest prefill")
    exit_when_finished: bool = Field(True, description="leave with 0 when the learner says the run is over")
    security: SecurityConfig = SecurityConfig()
    score_timeout_s: float = Field(60.0, gt=0, description="wall-clock limit of one sample's scoring; then it is unscored")
    score_groups: bool = Field(False, description="score the samples of a prompt together, once all are drawn: for scorers that compare them")

    openai: OpenAIConfig = Field(OpenAIConfig(), description="an endpoint for agents that speak OpenAI's API (docs/agents.md)")
    environments: tuple[EnvironmentConfig, ...] = Field((), description="what samples of several turns are played in (docs/environments.md); none: every sample is one answer")

    @model_validator(mode="after")
    def _contradictions(self) -> RolloutConfig:
        check_names(self.environments)
        agents = [each.name for each in self.environments if each.agent]
        if agents and not self.openai.address:
            raise ValueError(f"environment {agents[0]} is an agent, and openai.address is empty: it has no endpoint to call; set openai.address, for instance 127.0.0.1:0")
        if self.environments and self.score_groups:
            raise ValueError("score_groups=true with environments: samples that an environment rewards one by one cannot be compared; remove one of them")
        if self.engine == "small" and self.head_dtype == "float32" and self.dtype != "float32":
            raise ValueError(f"head_dtype=float32 with engine=small and dtype={self.dtype}: the small engine rounds its logits to dtype; use dtype=float32, or engine=vllm")
        if self.learner and not self.rewards and not self.environments:
            raise ValueError(f"learner={self.learner} without rewards: samples for a learner must be scored; give the address of at least one reward server")
        if self.engine == "small":
            self._check_small()
        return self

    @property
    def num_workers(self) -> int:
        """Workers of all engines, each with a part of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.engines

    def _check_small(self) -> None:
        neutral = {"tensor_parallel": 1, "pipeline_parallel": 1, "quantization": "", "kv_cache_dtype": "auto"}
        if wrong := [f"{name}={getattr(self, name)}" for name, value in neutral.items() if getattr(self, name) != value]:
            raise ValueError(f"engine=small knows no {', '.join(wrong)}; take engine: vllm, or leave them out")
