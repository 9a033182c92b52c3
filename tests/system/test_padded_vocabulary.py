"""Engine and learner normalise over the same ids, on a model whose padding rows and holes would take most of the probability."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from learner.trainer.engine import Engine
from learner.trainer.model import Policy, load_policy, output_head
from learner.trainer.packing import WeightedSample, pack
from learner.trainer.samples import Sample
from protos import rpc
from protos.arrays import pack_ids, unpack
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1.trajectory_pb2 import SamplingParams
from rollout_server.config import RolloutConfig
from rollout_server.service import Service
from rollout_server.small_engine import SmallEngine
from rollout_server.vllm_engine import VllmEngine
from tests.learner.trainer import rig
from tests.rollout_server import reference

KNOWN, ROWS, HOLES = 259, 420, (7, 201)  # ids of the tokenizer, rows of the head, ids that the tokenizer does not have
PROMPTS = ([65, 66, 67], [70, 71])
TEMPERATURE = 0.7


def padded(tiny_model: Path, out: Path, *, tied: bool) -> Path:
    """The tiny model with 161 rows more, two of its tokens taken away, and logits at all these ids that are 8 times those of a token with text."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows = model.get_input_embeddings().weight.detach().clone()
    large = 8 * rows[torch.arange(ROWS - KNOWN) % KNOWN]
    embedding, head = (torch.cat([rows, large]) for _ in range(2))
    for place in (embedding, head):
        place[list(HOLES)] = large[: len(HOLES)]
    model.config.tie_word_embeddings = tied
    model.resize_token_embeddings(ROWS)
    with torch.no_grad():
        model.get_input_embeddings().weight = torch.nn.Parameter(embedding)
        model.lm_head.weight = model.get_input_embeddings().weight if tied else torch.nn.Parameter(head)
    model.save_pretrained(out)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, out / name)
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}  # else these move up into the holes
    tokenizer["model"]["vocab"] = {text: number for text, number in vocabulary.items() if number not in HOLES}
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    return out


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path / "store") as made:
        yield made


async def drawn(model: Path, engine: Callable[[RolloutConfig, Path], Any], *, name: str) -> list[Sample]:
    """Two groups of three samples of 24 tokens from a served engine, over gRPC."""
    config = RolloutConfig(model=str(model), engine=name, max_model_len=64, max_num_seqs=6, kv_cache_bytes=32 << 20, threads=1, delta_interval_s=0)  # type: ignore[arg-type]
    service = Service(config, model, engine(config, model))
    serving = asyncio.create_task(service.serve())
    while not service.replica.life and not serving.done():
        await asyncio.sleep(0.02)
    try:
        async with rpc.channel(service.address) as channel:
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
            return await asyncio.gather(*[one(stub, group, index) for group in range(len(PROMPTS)) for index in range(3)])
    finally:
        service.stop()
        await serving


async def one(stub: Any, group: int, index: int) -> Sample:
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=24, seed=1 + 10 * group + index)
    (answer,) = [a async for a in stub.Generate(pb.GenerateRequest(prompt_ids=pack_ids(PROMPTS[group]), sampling=sampling, whole=True), timeout=60)]
    ids = torch.tensor([int(token) for token in unpack(answer.token_ids)])
    assert answer.unusable_reason == "" and ids.numel() == 24
    logprobs = torch.tensor([float(value) for value in unpack(answer.logprobs)])
    return Sample(group_id=f"g{group}", sample_index=index, prompt_ids=torch.tensor(PROMPTS[group]), completion_ids=ids, behaviour=logprobs, loss_mask=torch.ones(24, dtype=torch.bool))


def share_without_text(model: Path, sample: Sample) -> float:
    """Of the probability over all rows, the mean over the sample's tokens."""
    ids = torch.cat([sample.prompt_ids, sample.completion_ids])
    with torch.inference_mode():
        logits = reference.load(model)(ids[None]).logits[0, sample.prompt_ids.numel() - 1 : -1]
    return float(torch.softmax(logits / TEMPERATURE, -1)[:, [*HOLES, *range(KNOWN, ROWS)]].sum(1).mean())


def check(model: Path, samples: list[Sample], mesh: DeviceMesh) -> None:
    """The trainer's log-probs are the engine's; ids that are never drawn get no gradient, and others do."""
    assert max(share_without_text(model, sample) for sample in samples) > 0.5  # else nothing is seen here
    assert not any(int(token) in HOLES or int(token) >= KNOWN for sample in samples for token in sample.completion_ids)
    plain = load_policy(model, mesh=mesh, compute_dtype=torch.float32, temperature=TEMPERATURE)
    tiles = Policy(plain.causal_lm, temperature=TEMPERATURE, tile=96, without_text=plain._head.without_text).eval()  # one class of many tokens at a time
    wide = load_policy(model, mesh=mesh, compute_dtype=torch.float32, temperature=TEMPERATURE, engine=Engine(float32_head=True))
    weighted = [WeightedSample(sample=sample, advantage=1.0) for sample in samples]
    for policy in (plain, tiles, wide):
        for rows in (pack(weighted, row_tokens=256, share_prefix=True), [row for each in weighted for row in pack([each], row_tokens=27, share_prefix=False)]):
            weight: Any = output_head(policy.causal_lm).weight
            weight.grad = None
            for row in rows:
                found = policy(row, with_entropy=True)
                torch.testing.assert_close(found[0], row.behaviour, atol=1e-5, rtol=0)
                found.sum().backward()
            assert not bool(weight.grad[KNOWN:].any()) and not bool(weight.grad[list(HOLES)].any()) and bool(weight.grad[65].any())


@pytest.mark.parametrize("tied", [True, False])
async def test_the_small_engine_and_the_learner_leave_out_the_same_ids(tied: bool, tiny_model: Path, tmp_path: Path, mesh: DeviceMesh) -> None:
    # faults.md 56
    model = padded(tiny_model, tmp_path / "padded", tied=tied)
    check(model, await drawn(model, SmallEngine, name="small"), mesh)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [True, False])
async def test_vllm_and_the_learner_leave_out_the_same_ids(tied: bool, tiny_model: Path, tmp_path: Path, mesh: DeviceMesh) -> None:
    model = padded(tiny_model, tmp_path / "padded", tied=tied)
    check(model, await drawn(model, VllmEngine, name="vllm"), mesh)
