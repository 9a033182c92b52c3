"""The real engine on a tiny model; one engine for the module, restarted in no test but the last ones."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from rollout_server import vllm_setup
from rollout_server.config import RolloutConfig
from rollout_server.engine import EngineUnavailableError, SamplingSpec
from rollout_server.vllm_drawing import by_objects
from rollout_server.vllm_engine import VllmEngine
from rollout_server.weights.driver import CommitError
from tests.rollout_server import reference
from tests.rollout_server.reference import Sample, largest_difference

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

PROMPT = [10 + i % 200 for i in range(70)]
WAYS = [(1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (1.0, 0.9)]  # temperature, top_p


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["columns", pytest.param("objects", marks=pytest.mark.slow)])
async def engine(tiny_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[VllmEngine]:
    """In each of the two ways in which tokens leave vLLM."""
    config = RolloutConfig(model=str(tiny_model), max_model_len=512, max_num_seqs=32, kv_cache_bytes=64 << 20, threads=1, fast_path=request.param == "columns", delta_interval_s=0.01)
    made = VllmEngine(config, tiny_model)
    await made.start()
    assert made.info.columns == (request.param == "columns")
    yield made
    await made.stop()


@pytest.fixture(scope="module")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.perturbed(tiny_model, tmp_path_factory.mktemp("other"), seed=1)


class Weights:
    """Alternates the module's engine between two sets of weights under ever new versions."""

    def __init__(self, engine: VllmEngine, base: Path, other: Path) -> None:
        self.engine, self.folders, self.at = engine, [base, other], 0

    async def stage(self) -> int:
        """Stages the other set; returns its version."""
        version = self.engine.loaded_version + 1
        await reference.stage(self.engine, self.folders[1 - self.at], version)
        return version

    async def commit(self, version: int) -> None:
        await self.engine.commit(version)
        self.at = 1 - self.at

    @property
    def served(self) -> Path:
        return self.folders[self.at]


@pytest.fixture(scope="module")
def weights(engine: VllmEngine, tiny_model: Path, other: Path) -> Weights:
    return Weights(engine, tiny_model, other)


async def drawn(engine: VllmEngine, prompt: list[int], seed: int, **more: object) -> Sample:
    sampling: dict[str, object] = {"temperature": 1.0, "max_new_tokens": 24, "seed": seed} | more
    return await Sample(engine, prompt, f"s{seed}", **sampling).task


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_fresh_forward_pass(engine: VllmEngine, weights: Weights, temperature: float) -> None:
    samples = await asyncio.gather(*[drawn(engine, PROMPT[: 3 + i], i, temperature=temperature) for i in range(8)])
    model = reference.load(weights.served)
    for i, sample in enumerate(samples):
        expected = reference.logprobs(model, PROMPT[: 3 + i], sample.ids, temperature)
        assert largest_difference(sample.logprobs, expected) < 1e-4


async def test_what_the_start_made_is_no_matter_of_garbage_collection(engine: VllmEngine) -> None:
    assert gc.get_freeze_count() > 100_000


async def test_the_seed_decides_the_tokens_in_any_company(engine: VllmEngine) -> None:
    alone = await drawn(engine, PROMPT, 5)
    among, *_ = await asyncio.gather(drawn(engine, PROMPT, 5), *[drawn(engine, PROMPT[:9], i) for i in range(6, 12)])
    assert among.ids == alone.ids


async def test_a_stop_token_ends_the_sample_and_stays_in_it_even_as_its_only_token(engine: VllmEngine) -> None:  # faults.md 57, 58
    free = await drawn(engine, PROMPT, 3)
    assert free.last is not None and free.last.finish == "length" and len(free.ids) == 24
    only = await drawn(engine, PROMPT, 3, stop_token_ids=(free.ids[0],))
    assert only.ids == free.ids[:1] and only.logprobs == pytest.approx(free.logprobs[:1], abs=1e-5)
    assert only.last is not None and only.last.finish == "stop" and [(s.start, s.end) for s in only.last.spans] == [(0, 1)]


async def test_users_mistakes_are_value_errors_and_room_cuts_the_length(engine: VllmEngine) -> None:
    for prompt, rule in (([], "empty"), ([1] * 512, "max_model_len=512"), ([259], r"\[0, 259\)"), ([-1], r"\[0, 259\)")):
        with pytest.raises(ValueError, match=rule):
            await drawn(engine, prompt, 0)
    tight = await drawn(engine, [1] * 510, 0, max_new_tokens=50)
    assert len(tight.ids) == 2 and tight.last is not None and tight.last.finish == "length"


async def test_without_stream_one_delta_brings_all(engine: VllmEngine) -> None:
    sampling = SamplingSpec(temperature=1.0, max_new_tokens=24, seed=3)
    deltas = [delta async for delta in engine.generate(PROMPT, sampling, "whole", stream=False)]
    assert len(deltas) == 1 and list(deltas[0].token_ids) == (await drawn(engine, PROMPT, 3)).ids


async def test_more_prompt_tokens_than_fit_into_one_step_are_drawn_as_if_alone(engine: VllmEngine) -> None:
    """32 prompts of 100 tokens are 3200, a step takes 2048: a prompt that is cut would end vLLM's process on a CPU."""
    prompts = [[i, *[10 + (i * 7 + k) % 200 for k in range(99)]] for i in range(32)]
    samples = await asyncio.gather(*[drawn(engine, prompt, i, max_new_tokens=4) for i, prompt in enumerate(prompts)])
    assert [sample.ids for sample in samples[::8]] == [(await drawn(engine, prompts[i], i, max_new_tokens=4)).ids for i in range(0, 32, 8)]


async def test_columns_and_objects_give_the_same_tokens_and_the_same_log_probs_to_the_last_bit(engine: VllmEngine) -> None:
    """One request at a time, so that both ways have the same batches; the engine of the slow half is vLLM's own scheduler."""
    ours = [await drawn(engine, PROMPT[: 3 + i], i, temperature=temperature, top_p=top_p) for i, (temperature, top_p) in enumerate(WAYS)]
    for i, ((temperature, top_p), sample) in enumerate(zip(WAYS, ours, strict=True)):
        parameters = vllm_setup.request_parameters(SamplingSpec(temperature=temperature, top_p=top_p, max_new_tokens=24, seed=i), 100, stream=False)
        prompt = {"prompt_token_ids": PROMPT[: 3 + i], "cache_salt": "other"}
        async with aclosing(by_objects(engine._engine, prompt, parameters, f"object{i}")) as parts:
            ids, logprobs, finish = await anext(parts)
        assert (ids, logprobs, finish) == (sample.ids, sample.logprobs, "length")


async def test_closing_the_stream_aborts_the_request_in_the_engine(engine: VllmEngine) -> None:
    stream = engine.generate(PROMPT, SamplingSpec(temperature=1.0, max_new_tokens=400, seed=1), "gone")
    await anext(stream)
    await stream.aclose()
    assert engine.stats().num_running == 0 and engine._engine.output_processor.get_num_unfinished_requests() == 0
    assert engine._accounting is not None and engine._accounting.num_drawn() == {}


async def test_abort_ends_the_stream_with_the_tokens_so_far(engine: VllmEngine) -> None:
    sample = Sample(engine, PROMPT, "cut", temperature=1.0, max_new_tokens=400, seed=1)
    await sample.drawn(5)
    await engine.abort("cut")
    await sample.task
    assert sample.last is not None and sample.last.finish == "abort" and 5 <= len(sample.ids) < 400


async def test_an_update_mid_generation_draws_before_it_from_old_weights_and_after_it_from_new_ones_recomputed(
    engine: VllmEngine, weights: Weights
) -> None:
    old, old_version = reference.load(weights.served), engine.loaded_version
    samples = [Sample(engine, PROMPT, f"long{i}", temperature=1.0, max_new_tokens=400, seed=i) for i in range(16)]
    version = await weights.stage()
    await asyncio.gather(*[sample.drawn(40) for sample in samples])
    assert engine.loaded_version == old_version  # staging touches nothing
    await weights.commit(version)
    await asyncio.gather(*[sample.task for sample in samples])
    new = reference.load(weights.served)
    assert engine.last_commit == ("pause", "apply", "flush", "version", "resume")  # faults.md 30
    for sample in samples:
        assert sample.last is not None and sample.last.finish == "length" and len(sample.ids) == 400
        before, after = sample.last.spans
        assert (before.version, after.version, before.end, after.end) == (old_version, version, after.start, 400)
        k = after.start
        assert largest_difference(sample.logprobs[:k], reference.logprobs(old, PROMPT, sample.ids)[:k]) < 1e-4
        assert largest_difference(sample.logprobs[k:], reference.logprobs(new, PROMPT, sample.ids)[k:]) < 1e-4


async def test_no_cached_prefix_survives_an_update(engine: VllmEngine, weights: Weights) -> None:
    for round_ in range(5):
        await drawn(engine, PROMPT, 1)  # fills the prefix cache with KV of these weights
        await weights.commit(await weights.stage())
        sample = await drawn(engine, PROMPT, round_)
        expected = reference.logprobs(reference.load(weights.served), PROMPT, sample.ids)
        assert largest_difference(sample.logprobs, expected) < 1e-4


async def test_spans_agree_with_vllms_own_labels(engine: VllmEngine, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(engine._engine, "update_weight_version"):
        pytest.skip("vLLM labels its steps from 0.32 on")
    theirs: dict[str, list[str]] = {}  # vLLM's own label of the step that drew each token
    accounting = engine._accounting
    assert accounting is not None
    original = accounting.arrived

    def watched(outputs):  # type: ignore[no-untyped-def]
        before = accounting.num_drawn()
        result = original(outputs)
        after = accounting.num_drawn()
        for name in before.keys() & after.keys():
            theirs.setdefault(name.rpartition("#")[0], []).extend([outputs.weight_version] * (after[name] - before[name]))
        return result

    monkeypatch.setattr(accounting, "arrived", watched)
    samples = [Sample(engine, PROMPT, f"w{i}", temperature=1.0, max_new_tokens=200 + i, seed=i) for i in range(8)]
    for target in (20, 60):
        await asyncio.gather(*[sample.drawn(target) for sample in samples])
        await weights.commit(await weights.stage())
    await asyncio.gather(*[sample.task for sample in samples])
    for i, sample in enumerate(samples):
        assert sample.last is not None and len(sample.last.spans) == 3
        ours = [str(span.version) for span in sample.last.spans for _ in range(span.start, span.end)]
        assert ours[:-1] == theirs[f"w{i}"]  # a request that ended is not counted any more: the last token is not seen here


async def test_an_answer_read_only_after_an_update_is_labelled_with_what_drew_it(engine: VllmEngine, weights: Weights) -> None:
    # faults.md 34
    version = await weights.stage()
    stream = engine.generate(PROMPT, SamplingSpec(temperature=1.0, max_new_tokens=12, seed=1), "late")
    deltas = [await anext(stream)]
    assert engine._accounting is not None
    async with asyncio.timeout(60):
        while engine._accounting.num_drawn():
            await asyncio.sleep(0.01)
    await weights.commit(version)  # all twelve were drawn before, one has been read
    deltas += [delta async for delta in stream]
    assert [(s.version, s.start, s.end) for s in deltas[-1].spans] == [(version - 1, 0, 12)]


async def test_requests_made_around_an_update_lose_nothing(engine: VllmEngine, weights: Weights) -> None:
    # faults.md 33: 50 submissions race with the pause, and no token's log-prob is of other weights than its label says
    version = await weights.stage()
    samples = []

    async def submit() -> None:
        for i in range(50):
            samples.append(Sample(engine, PROMPT[: 5 + i % 9], f"race{i}", temperature=1.0, max_new_tokens=12, seed=i))
            await asyncio.sleep(0.002)

    await asyncio.gather(submit(), weights.commit(version))
    await asyncio.gather(*[sample.task for sample in samples])
    models = {version - 1: reference.load(weights.folders[1 - weights.at]), version: reference.load(weights.served)}
    for i, sample in enumerate(samples):
        assert sample.last is not None and sample.last.spans[-1].end == 12
        for span in sample.last.spans:
            expected = reference.logprobs(models[span.version], PROMPT[: 5 + i % 9], sample.ids)
            assert largest_difference(sample.logprobs[span.start : span.end], expected[span.start : span.end]) < 1e-4


async def test_an_update_with_the_same_bytes_changes_no_token_and_no_log_prob(engine: VllmEngine, weights: Weights) -> None:  # faults.md 10
    before = await drawn(engine, PROMPT, 8, temperature=0.0)
    for _ in range(2):
        await reference.update(engine, weights.served, engine.loaded_version + 1)
    after = await drawn(engine, PROMPT, 8, temperature=0.0)
    assert after.ids == before.ids and largest_difference(after.logprobs, before.logprobs) < 1e-5


@pytest.mark.slow
async def test_the_fifth_update_is_as_exact_as_the_first(engine: VllmEngine, weights: Weights) -> None:  # faults.md 28
    for update in range(5):
        await weights.commit(await weights.stage())
        sample = await drawn(engine, [*PROMPT[:48], update], update)
        assert largest_difference(sample.logprobs, reference.logprobs(reference.load(weights.served), [*PROMPT[:48], update], sample.ids)) < 1e-4


async def test_the_probe_is_a_forward_pass_under_the_loaded_weights(engine: VllmEngine, weights: Weights) -> None:
    for _ in range(2):  # the prompt's own cache is never used
        values = await engine.probe(PROMPT)
        assert largest_difference(values, reference.logprobs(reference.load(weights.served), PROMPT[:1], PROMPT[1:])) < 1e-4
        await weights.commit(await weights.stage())


async def test_a_prompt_s_log_probs_are_the_same_with_and_without_what_is_cached_of_it(engine: VllmEngine) -> None:
    # faults.md 44: one token more than two blocks of 32; scored twice, and after a longer prompt that begins alike: 64 finite values each time
    prompt = PROMPT[:65]
    first, again = await engine.probe(prompt), await engine.probe(prompt)
    await drawn(engine, PROMPT, 9)
    after = await engine.probe(prompt)
    assert len(first) == 64 and all(math.isfinite(value) for value in first) and first == again == after


async def test_an_update_of_another_model_is_refused_by_name_before_anything_is_touched(
    engine: VllmEngine, weights: Weights, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights.folders[1 - weights.at] / "model.safetensors")
    tensors["model.norm.wrong"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((weights.served / "config.json").read_bytes())
    version, before = engine.loaded_version, await drawn(engine, PROMPT, 4)
    with pytest.raises(Exception, match=r"model\.norm\.wrong"):
        await reference.stage(engine, tmp_path, version + 1)
    with pytest.raises(Exception, match="not ready to commit"):
        await engine.commit(version + 1)
    assert engine.loaded_version == version and (await drawn(engine, PROMPT, 4)).ids == before.ids


async def test_a_pause_that_fails_leaves_the_old_version_serving(engine: VllmEngine, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    version = await weights.stage()

    async def never(**_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(engine._engine.engine_core, "pause_scheduler_async", never)
    monkeypatch.setattr(engine, "_commit_timeout_s", 1.0)
    with pytest.raises(EngineUnavailableError, match="did not answer"):
        await engine.commit(version)
    assert engine.loaded_version == version - 1
    assert len((await drawn(engine, PROMPT, 2)).ids) == 24


async def test_a_cache_that_will_not_be_flushed_is_no_success(engine: VllmEngine, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:  # faults.md 29
    """Last: the engine stays paused, as a replica that serves nothing."""
    version = await weights.stage()

    async def refuses(**_: object) -> bool:
        return False

    monkeypatch.setattr(engine._engine, "reset_prefix_cache", refuses)
    with pytest.raises(CommitError, match="failed after apply: RuntimeError: vLLM refused to flush its prefix cache"):
        await engine.commit(version)
    assert engine.loaded_version == version - 1
