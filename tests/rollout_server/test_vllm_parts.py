"""Real vLLM engines of other shapes: layers in two parts, two engines behind one address, quantized ones. Each draws what transformers
would, as near as it can, and does so after an update."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.models import tiny
from rollout_server.config import RolloutConfig
from rollout_server.engine import Engine
from rollout_server.engines import Engines
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference
from tests.rollout_server.reference import Sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPT = [10 + i % 200 for i in range(70)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model of 3 M parameters, and the same with other weights."""
    folder = tmp_path_factory.mktemp("parts")
    base = tiny(folder / "base", hidden=256, layers=4, heads=8, kv_heads=2)
    return base, reference.perturbed(base, folder / "other", seed=1)


def config_of(model: Path, **settings: Any) -> RolloutConfig:
    return RolloutConfig(model=str(model), max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20, threads=1, **settings)


async def differences(engine: Engine, models: tuple[Path, Path], *, each: int = 1) -> list[tuple[float, float]]:
    """(mean, largest) difference in nats to float32 transformers, of 64 tokens of `each` samples, before and after an update."""
    found = []
    for version, model in enumerate(models):
        if version:
            await reference.update(engine, model, version)
        net = reference.load(model)
        samples = [Sample(engine, PROMPT[number:], f"v{version}-{number}", temperature=1.0, max_new_tokens=64, seed=3 + number) for number in range(each)]
        for sample in await asyncio.gather(*(sample.task for sample in samples)):
            assert sample.last is not None and [span.version for span in sample.last.spans] == [version]
        values = [
            abs(ours - theirs)
            for number, sample in enumerate(samples)
            for ours, theirs in zip(sample.logprobs, reference.logprobs(net, PROMPT[number:], sample.ids), strict=True)
        ]
        found.append((sum(values) / len(values), max(values)))
    return found


async def test_layers_in_two_parts(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine = VllmEngine(config_of(models[0], pipeline_parallel=2), models[0])
    await engine.start()
    try:
        assert engine.info.worker_device_uuids == ("", "")
        assert all(largest < 1e-4 for _, largest in await differences(engine, models))
    finally:
        await engine.stop()


async def test_two_engines_share_the_requests_and_both_get_the_update(models: tuple[Path, Path]) -> None:
    config = config_of(models[0], engines=2)
    engines = [VllmEngine(config, models[0], number=number) for number in range(2)]
    both = Engines(engines, num_seqs=8, num_workers=1)
    await both.start()
    try:
        assert all(largest < 1e-4 for _, largest in await differences(both, models, each=4))
        drawn = [engine.stats().num_drawn for engine in engines]
        assert drawn == [4 * 64, 4 * 64] and [engine.loaded_version for engine in engines] == [1, 1]  # two of four, twice
        assert len(await both.probe(PROMPT)) == 69  # they agree
        await reference.update(engines[1], models[0], 2)
        with pytest.raises(RuntimeError, match="engines 0 and 1 of 2 differ"):
            await both.probe(PROMPT)
    finally:
        await both.stop()


@pytest.mark.parametrize(
    ("settings", "mean", "largest"),
    [
        ({}, 0.04, 0.3),
        ({"kv_cache_dtype": "fp8"}, 0.4, 1.5),
        ({"quantization": "fp8_per_channel"}, 0.3, 1.5),
    ],
    ids=["bfloat16", "fp8 cache", "fp8 weights"],
)
async def test_quantized_engines_take_updates_and_lie_as_near_as_is_documented(models: tuple[Path, Path], settings: dict[str, str], mean: float, largest: float) -> None:
    engine = VllmEngine(config_of(models[0], dtype="bfloat16", **settings), models[0])
    await engine.start()
    try:
        found = await differences(engine, models)
        print(json.dumps({"settings": settings, "before": found[0], "after": found[1]}))
        assert all(m < mean and most < largest for m, most in found)
    finally:
        await engine.stop()


async def test_a_quantization_that_the_build_takes_and_does_not_make_is_refused(models: tuple[Path, Path]) -> None:
    # vLLM 0.32 on a CPU accepts this name and serves the same values as without it, to the last bit
    engine = VllmEngine(config_of(models[0], dtype="bfloat16", quantization="int8_per_channel_weight_only"), models[0])
    try:
        with pytest.raises(ValueError, match="leaves the weights as they are"):
            await engine.start()
    finally:
        await engine.stop()


async def test_weights_that_were_quantized_before_are_refused_where_updates_are_to_come(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gptq"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**json.loads((tiny_model / "config.json").read_text()), "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    config = RolloutConfig(model=str(folder), learner="127.0.0.1:1", rewards=("127.0.0.1:2",))
    with pytest.raises(ValueError, match="quantized by gptq, and updates bring full ones"):
        await VllmEngine(config, folder).start()


async def test_what_a_cpu_build_cannot_make_is_refused_before_it_is_tried(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"quantization=fp8_per_tensor on a CPU: .* use quantization: fp8_per_channel, or a GPU"):
        await VllmEngine(config_of(tiny_model, quantization="fp8_per_tensor"), tiny_model).start()
