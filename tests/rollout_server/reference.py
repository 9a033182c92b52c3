"""What transformers says: log-probs of given completions, and models with other weights. Slow and plain on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollout_server.checkpoint import folder_update
from rollout_server.engine import Delta, Engine, SamplingSpec


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def perturbed(folder: Path, out: Path, *, seed: int, scale: float = 0.3) -> Path:
    """The same model with noise of `scale` standard deviations on every weight, saved beside its tokenizer."""
    model = load(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std().clamp_min(1e-3)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread * scale)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / name).write_bytes((folder / name).read_bytes())
    return out


def logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of each completion token by one fresh forward pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].float()
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return [rows[i, token].item() for i, token in enumerate(completion)]


def logprobs_on_kept_kv(old: Any, new: Any, prompt: Sequence[int], completion: Sequence[int], switch: int) -> list[float]:
    """Log-probs of completion[switch:] by the new weights on the KV that the old ones left for everything before."""
    with torch.inference_mode():
        cache = old(torch.tensor([[*prompt, *completion[: switch - 1]]]), use_cache=True).past_key_values
        logits = new(torch.tensor([completion[switch - 1 :]]), past_key_values=cache).logits[0].float()
    rows = torch.log_softmax(logits, -1)
    return [rows[i, token].item() for i, token in enumerate(completion[switch:])]


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


async def stage(engine: Engine, folder: Path, version: int) -> None:
    manifest, chunks = folder_update(folder, version)

    async def stream() -> AsyncIterator[tuple[int, int, bytes]]:
        for chunk in chunks:
            yield chunk

    await engine.stage_chunks(manifest.SerializeToString(), stream())


async def update(engine: Engine, folder: Path, version: int) -> None:
    await stage(engine, folder, version)
    await engine.commit(version)


class Sample:
    """One running completion: its tokens so far, and its end."""

    def __init__(self, engine: Engine, prompt: Sequence[int], request_id: str, **sampling: Any) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.last: Delta | None = None
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(engine, prompt, request_id, SamplingSpec(**sampling)))

    async def _run(self, engine: Engine, prompt: Sequence[int], request_id: str, sampling: SamplingSpec) -> Sample:
        async for delta in engine.generate(prompt, sampling, request_id):
            self.ids += delta.token_ids
            self.logprobs += delta.logprobs
            self.last = delta
            self._changed.set()
        return self

    async def drawn(self, count: int, limit_s: float = 60.0) -> None:
        """Waits until `count` tokens were drawn."""
        async with asyncio.timeout(limit_s):
            while len(self.ids) < count:
                self._changed.clear()
                await self._changed.wait()
