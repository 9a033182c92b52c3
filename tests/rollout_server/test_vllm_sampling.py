"""What real vLLM draws from, on a model that would mislead it: a generation_config of its own, a padded vocabulary, a row of NaN."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch

from protos import rpc
from protos.arrays import pack_ids, unpack
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.config import RolloutConfig
from rollout_server.engine import SamplingSpec
from rollout_server.service import Service
from rollout_server.tokens import Tokens
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference
from tests.rollout_server.reference import largest_difference

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = [65, 66, 67]
KNOWN, ROWS, POISON = 259, 288, 280  # ids with text, rows of the embedding, an id that is never drawn and whose embedding is NaN
MAX_MODEL_LEN = 64


def padded(tiny_model: Path, out: Path) -> Path:
    """The tiny model untied, with 29 rows more than its tokenizer has ids and these the likeliest, NaN for one id's embedding, and a generation_config."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.detach().clone()
    head = embedding.clone()
    model.config.tie_word_embeddings = False
    model.resize_token_embeddings(ROWS)
    more = torch.zeros(ROWS - KNOWN, embedding.shape[1])
    rows = torch.cat([embedding, more])
    rows[POISON] = torch.nan
    with torch.no_grad():
        model.get_input_embeddings().weight = torch.nn.Parameter(rows)
        model.lm_head.weight = torch.nn.Parameter(torch.cat([head, more]))
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, out / name)
    (out / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "temperature": 0.1, "do_sample": True, "eos_token_id": list(range(100, 200))}))
    return out


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(tiny_model, tmp_path_factory.mktemp("padded") / "model")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stub(model: Path) -> AsyncIterator[Any]:
    """A served vLLM, spoken to over gRPC."""
    config = RolloutConfig(model=str(model), max_model_len=MAX_MODEL_LEN, max_num_seqs=16, kv_cache_bytes=32 << 20, threads=1, delta_interval_s=0)
    service = Service(config, model, VllmEngine(config, model))
    serving = asyncio.create_task(service.serve())
    while not service.replica.life and not serving.done():
        await asyncio.sleep(0.02)
    async with rpc.channel(service.address) as channel:
        made: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        made.engine = service.replica.engine
        yield made
    service.stop()
    await serving


def a_request(prompt: list[int] | None = None, *, whole: bool = True, **sampling: Any) -> pb.GenerateRequest:
    values = {"temperature": 1.0, "max_new_tokens": 40, "seed": 3} | sampling
    return pb.GenerateRequest(prompt_ids=pack_ids(PROMPT if prompt is None else prompt), sampling=trajectory_pb2.SamplingParams(**values), whole=whole)


async def answers(stub: Any, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=60)]


def drawn(responses: list[pb.GenerateResponse]) -> tuple[list[int], list[float]]:
    return [int(t) for r in responses for t in unpack(r.token_ids)], [float(x) for r in responses for x in unpack(r.logprobs)]


def expected(model: Path, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    """Of transformers, over the ids that have text."""
    with torch.inference_mode():
        logits = reference.load(model)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1, :KNOWN].float()
    return [row[token].item() for row, token in zip(torch.log_softmax(logits / temperature, -1), ids, strict=True)]


async def test_unset_fields_are_neutral_whatever_the_model_s_generation_config_says_and_all_are_told(stub: Any, model: Path) -> None:
    # faults.md 42: repetition_penalty 1.1, top_k 20, top_p 0.8 and a hundred end tokens stand in the model's folder
    responses = await answers(stub, a_request(temperature=0.7))
    ids, logprobs = drawn(responses)
    assert responses[0].effective_sampling == trajectory_pb2.SamplingParams(temperature=0.7, top_p=1, top_k=0, max_new_tokens=40, seed=3)
    assert len(ids) == 40 and responses[-1].finish_reason == trajectory_pb2.FINISH_REASON_LENGTH and any(100 <= token < 200 for token in ids)
    # faults.md 40: log_softmax of logits / 0.7, not of logits, and not that divided by 0.7
    assert largest_difference(logprobs, expected(model, PROMPT, ids, 0.7)) < 1e-4


async def test_rows_beyond_the_tokenizer_are_never_drawn_and_a_prompt_of_one_does_no_harm(stub: Any, model: Path) -> None:
    # faults.md 56: 259 ids with text, 288 rows, all with like chances; of 640 tokens a tenth would be padding
    samples = await asyncio.gather(*[answers(stub, a_request(seed=100 + i)) for i in range(16)])
    for sample in samples:
        ids, logprobs = drawn(sample)
        assert len(ids) == 40 and max(ids) < KNOWN and sample[-1].unusable_reason == ""
        assert largest_difference(logprobs, expected(model, PROMPT, ids)) < 1e-4
    assert len(drawn(await answers(stub, a_request([65, ROWS - 1])))[0]) == 40


async def test_the_probe_goes_over_all_rows(stub: Any, model: Path) -> None:
    values = await stub.engine.probe([65, 270, 66])
    assert largest_difference(values, reference.logprobs(reference.load(model), [65], [270, 66])) < 1e-4


async def test_a_log_prob_that_is_no_number_is_flagged_and_harms_nobody_else(stub: Any, model: Path) -> None:
    # faults.md 47: one of eight samples has NaN
    prompts = [[POISON, 65] if i == 3 else [65 + i, 66] for i in range(8)]
    samples = await asyncio.gather(*[answers(stub, a_request(prompt, seed=50 + i, max_new_tokens=8)) for i, prompt in enumerate(prompts)])
    assert [sample[-1].unusable_reason for sample in samples] == ["non_finite_logprob" if i == 3 else "" for i in range(8)]
    for prompt, sample in zip(prompts, samples, strict=True):
        ids, logprobs = drawn(sample)
        assert len(ids) == len(logprobs) == 8
        if POISON not in prompt:
            assert largest_difference(logprobs, expected(model, prompt, ids)) < 1e-4


async def test_any_of_several_stop_tokens_ends_a_sample_and_stays_in_it_with_its_log_prob(stub: Any) -> None:
    # faults.md 54 and 57
    free, _ = drawn(await answers(stub, a_request(seed=9)))
    for stop in (free[0], free[5]):
        first = free.index(stop)
        responses = await answers(stub, a_request(seed=9, stop_token_ids=[258, stop, 257]))
        ids, logprobs = drawn(responses)
        assert ids == free[: first + 1] and len(logprobs) == first + 1 and responses[-1].finish_reason == trajectory_pb2.FINISH_REASON_STOP


async def test_a_seed_left_to_the_server_is_another_one_each_time_and_is_told(stub: Any) -> None:
    responses = [await answers(stub, a_request(seed=0)) for _ in range(3)]
    seeds = [sample[0].effective_sampling.seed for sample in responses]
    assert len(set(seeds)) == 3 and 0 not in seeds and len({tuple(drawn(sample)[0]) for sample in responses}) == 3
    assert drawn(await answers(stub, a_request(seed=seeds[1]))) == drawn(responses[1])


async def test_bad_words_are_never_drawn_and_their_chance_goes_to_the_others(stub: Any, model: Path) -> None:
    free, _ = drawn(await answers(stub, a_request(seed=11, max_new_tokens=20)))
    tokens = Tokens(model)
    word = next(token for token in free if tokens.encode(tokens.text([token])) == [token])
    responses = await answers(stub, a_request(seed=11, max_new_tokens=20, bad_words=[tokens.text([word])]))
    ids, _ = drawn(responses)
    assert word not in ids and ids[: free.index(word)] == free[: free.index(word)]
    assert list(responses[0].effective_sampling.bad_words) == [tokens.text([word])]


async def test_a_regex_is_followed_to_its_end_token_and_cut_by_length(stub: Any, model: Path) -> None:
    tokens = Tokens(model)
    responses = await answers(stub, a_request(regex="[0-9]{3}-[a-c]+z"))
    ids, _ = drawn(responses)
    assert tokens.end_token in responses[0].effective_sampling.stop_token_ids
    if responses[-1].finish_reason == trajectory_pb2.FINISH_REASON_STOP:
        assert ids[-1] == tokens.end_token and re.fullmatch("[0-9]{3}-[a-c]+z", tokens.text(ids))
    else:
        assert re.fullmatch("[0-9]{3}-[a-c]{36}", tokens.text(ids))
    short = await answers(stub, a_request(regex="[0-9]{3}-z", max_new_tokens=2))
    assert re.fullmatch("[0-9]{2}", tokens.text(drawn(short)[0])) and short[-1].finish_reason == trajectory_pb2.FINISH_REASON_LENGTH


async def test_a_json_schema_is_followed(stub: Any, model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    responses = await answers(stub, a_request(json_schema=json.dumps(schema), temperature=1.0, max_new_tokens=60))
    text = Tokens(model).text(drawn(responses)[0])
    if responses[-1].finish_reason == trajectory_pb2.FINISH_REASON_STOP:
        assert set(json.loads(text)) == {"a"}
    else:
        assert text.strip().startswith("{")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (a_request([]), "the prompt is empty"),
        (a_request([65] * MAX_MODEL_LEN), f"the prompt has {MAX_MODEL_LEN} tokens, and max_model_len={MAX_MODEL_LEN}"),
        (a_request([65] * (MAX_MODEL_LEN + 1)), f"the prompt has {MAX_MODEL_LEN + 1} tokens"),
        (a_request([65, ROWS]), rf"\[0, {ROWS}\), got {ROWS}"),
        (a_request(regex="(", max_new_tokens=4), "regex"),
        (a_request(regex="a", json_schema="{}"), "regex and json_schema are both set"),
        (a_request(json_schema="{"), "json_schema is no JSON"),
        (a_request(json_schema="[1]"), "json_schema must be a JSON object, got list"),
        (a_request(bad_words=["a", ""]), "holds an empty word"),
    ],
)
async def test_what_cannot_be_drawn_is_refused_by_name_and_the_next_is_served(stub: Any, request_: pb.GenerateRequest, words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await answers(stub, request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(drawn(await answers(stub, a_request(max_new_tokens=2)))[0]) == 2


async def test_the_last_place_of_the_context_is_drawn_into(stub: Any) -> None:
    # faults.md 75: a prompt one shorter than the limit has room for one token
    responses = await answers(stub, a_request([65] * (MAX_MODEL_LEN - 1)))
    assert len(drawn(responses)[0]) == 1 and responses[-1].finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    assert responses[0].effective_sampling.max_new_tokens == 1


@pytest.mark.parametrize(("cut", "name"), [({"top_p": 0.9}, "top_p"), ({"top_k": 5}, "top_k"), ({"bad_words": ("a",)}, "bad_words"), ({"regex": "a"}, "regex"), ({"json_schema": "{}"}, "json_schema")])
async def test_a_cut_distribution_is_none_to_train_on(cut: dict[str, Any], name: str) -> None:
    SamplingSpec(temperature=0.7, max_new_tokens=1).check_trainable()
    with pytest.raises(ValueError, match=f"^{name} cut the distribution"):
        SamplingSpec(temperature=0.7, max_new_tokens=1, **cut).check_trainable()
