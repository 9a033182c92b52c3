"""The processes that `rollout_tax` compares: our server, vLLM in a process of its own, vLLM's OpenAI server; and how each is asked."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from benchmarks._line import ROOT
from protos import rpc
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc

Requests = list[tuple[list[int], int]]  # prompt ids, new tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What all sides serve, and with which room. Example: Scene(model=Path("m"), dtype="float32", device="cpu", concurrent=64, kv_cache_bytes=1 << 28, folder=Path("/tmp/x"))"""

    model: Path
    dtype: str
    device: str  # "cpu" or "cuda"
    concurrent: int  # sequences at once at most
    kv_cache_bytes: int
    folder: Path  # of logs and orders
    max_model_len: int = 1024

    @property
    def environment(self) -> dict[str, str]:
        """Of every side: the same as a rollout server sets for its engine."""
        values = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "TOKENIZERS_PARALLELISM": "false", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.device == "cpu":
            values |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {**os.environ, **values, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}

    @property
    def arguments(self) -> dict[str, Any]:
        """Of AsyncEngineArgs, for vLLM's own sides."""
        values: dict[str, Any] = {
            "model": str(self.model), "dtype": self.dtype, "max_model_len": self.max_model_len, "max_num_seqs": self.concurrent, "kv_cache_memory_bytes": self.kv_cache_bytes,
            "enforce_eager": self.device == "cpu", "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "disable_log_stats": True,
        }  # fmt: skip
        if self.device == "cpu":  # as the rollout server does: a prompt that is cut ends vLLM's process there
            return {**values, "block_size": 32, "enable_chunked_prefill": False, "max_num_batched_tokens": max(2048, self.max_model_len)}
        return {**values, "gpu_memory_utilization": 0.1}


class Side:
    """One peer process: orders in, answers back."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process, self._folder = process, folder

    async def burst(self, way: str, requests: Requests, *, concurrent: int, seed: int, out: str = "") -> dict[str, float]:
        """Seconds, tokens and CPU seconds of the process that asked."""
        assert self._process.stdin is not None
        order = {"way": way, "requests": requests, "concurrent": concurrent, "seed": seed, "out": str(self._folder / out) if out else ""}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        answer = await self.answer(600)
        if "failed" in answer:
            raise RuntimeError(f"{way}: {answer['failed']}")
        if out:
            await self.answer(60)
        return answer

    async def answer(self, limit_s: float) -> dict[str, float]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
        if not line:
            raise RuntimeError(f"a peer ended with {await self._process.wait()}; its log is in {self._folder}")
        answer: dict[str, float] = json.loads(line)
        return answer


@asynccontextmanager
async def process(scene: Scene, name: str, *command: str, piped: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m COMMAND`, its log in the scene's folder; terminated at the end, killed where that does not help."""
    with (scene.folder / f"{name}.log").open("wb") as log:
        pipe = asyncio.subprocess.PIPE if piped else None
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stdin=pipe, stdout=pipe or log, stderr=log, cwd=ROOT, env=scene.environment, limit=1 << 28, start_new_session=True
        )  # fmt: skip
    try:
        yield made
    finally:
        if made.stdin is not None:
            made.stdin.close()  # the end of its orders: it leaves in order
        else:
            with suppress(ProcessLookupError):
                made.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(made.wait(), 20)
        with suppress(ProcessLookupError):
            os.killpg(made.pid, 9)  # what it left behind, or itself
        await made.wait()


@asynccontextmanager
async def side(scene: Scene, name: str, kind: str, spec: dict[str, Any]) -> AsyncIterator[Side]:
    path = scene.folder / f"{name}.json"
    path.write_text(json.dumps(spec))
    async with process(scene, name, "benchmarks._rollout_peer", kind, str(path), piped=True) as made:
        peer = Side(made, scene.folder)
        await peer.answer(400)
        yield peer


@asynccontextmanager
async def service(scene: Scene, **values: Any) -> AsyncIterator[str]:
    """Our server as `python -m rollout_server` starts it; its address once it serves."""
    config = {
        "model": str(scene.model), "dtype": scene.dtype, "max_model_len": scene.max_model_len, "max_num_seqs": scene.concurrent, "kv_cache_bytes": scene.kv_cache_bytes,
        "gpu_memory_fraction": 0.6, "enforce_eager": scene.device == "cpu", "mirror_dir": str(scene.folder), "threads": 1 if scene.device == "cpu" else 0, **values,
    }  # fmt: skip
    path, address_file = scene.folder / "service.yaml", scene.folder / "service.address"
    path.write_text(yaml.safe_dump(config))
    async with process(scene, "service", "rollout_server", "--config", str(path), "--address-file", str(address_file)) as made:
        await _until(made, address_file.exists, 300)
        address = address_file.read_text()
        async with rpc.channel(address) as channel:
            stub, end_s = rollout_pb2_grpc.RolloutServiceStub(channel), time.monotonic() + 400
            while time.monotonic() < end_s and made.returncode is None:
                status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=20)
                if status.state == rollout_pb2.REPLICA_STATE_SERVING:
                    break
                await asyncio.sleep(0.2)
            else:
                raise RuntimeError(f"our server did not come up; its log is in {scene.folder}")
        yield address


@asynccontextmanager
async def openai_server(scene: Scene) -> AsyncIterator[str]:
    """vLLM's own server without logs of requests; its address once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "error"]
    for name, value in scene.arguments.items():
        if isinstance(value, bool):
            options += [f"--{'' if value else 'no-'}{name.replace('_', '-')}"] if name != "disable_log_stats" else ["--disable-log-stats"]
        else:
            options += [f"--{name.replace('_', '-')}", str(value)]
    if metadata.version("vllm-cpu" if scene.device == "cpu" else "vllm") >= "0.32":
        options.append("--enable-scale-out")  # else /inference/v1/generate is refused
    async with process(scene, "http", "vllm.entrypoints.openai.api_server", *options) as made:
        await _until(made, lambda: _healthy(f"http://127.0.0.1:{port}/health"), 400)
        yield f"127.0.0.1:{port}"


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


async def _until(made: asyncio.subprocess.Process, true: Any, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not await asyncio.to_thread(true):
        if made.returncode is not None or time.monotonic() > end_s:
            raise RuntimeError(f"a server did not come up (exit {made.returncode}); see its log")
        await asyncio.sleep(0.2)
