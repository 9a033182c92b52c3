"""The endpoint of a rollout server on the small engine, asked by the `openai` client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.tokens import Tokens
from tests.rollout_server import reference
from tests.rollout_server.conftest import Running, Start
from tests.rollout_server.fakes import FakeLearner, FakeReward
from tests.rollout_server.test_actor import at
from tests.rollout_server.test_episodes import lease, words

HERE = "tests.rollout_server.endpoint.agents"


def client(running: Running, session: str = "", **values: Any) -> openai.AsyncOpenAI:
    assert running.service.endpoint is not None
    return openai.AsyncOpenAI(base_url=running.service.endpoint.url(session), api_key="none", max_retries=0, timeout=60, **values)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def held(running: Running, session: str) -> dict[str, Any]:
    assert running.service.endpoint is not None
    async with aiohttp.ClientSession() as http, http.get(f"{running.service.endpoint.url()}/sessions/{session}") as response:
        return dict(await response.json(), status=response.status)


@pytest.fixture(autouse=True)
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn where no seed is asked for is the same each time: of random tokens one in a few runs ends an answer early."""
    monkeypatch.setattr("rollout_server.endpoint.answering.time.time_ns", lambda: 1 << 20)


async def test_two_turns_of_a_session_are_one_strand_whose_log_probs_are_those_of_a_fresh_forward_pass(start: Start, tiny_model: Path) -> None:
    running = await start(openai={"address": "127.0.0.1:0"})
    async with client(running, default_headers={"X-Headrace-Session": "s1"}) as c:
        first = await c.chat.completions.create(model="m", messages=[user("hi")], max_tokens=6, logprobs=True)
        said = first.choices[0].message.content or ""
        second = await c.chat.completions.create(model="m", messages=[user("hi"), {"role": "assistant", "content": said}, user("and?")], max_tokens=5)
    assert first.usage is not None and first.usage.completion_tokens == 6 and first.choices[0].finish_reason == "length"
    session = await held(running, "s1")
    (strand,) = session["strands"]  # the second prompt goes on from the first answer's own ids
    tokens = Tokens(tiny_model)
    ids, mask = strand["completion_ids"], strand["loss_mask"]
    assert mask[:6] == [1] * 6 and sum(mask) == 11 and [(t["start"], t["end"]) for t in session["turns"]] == [(0, 6), (len(ids) - 5, len(ids))]
    between = "".join(tokens.piece(token) for token, m in zip(ids, mask, strict=True) if not m)
    assert between == "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    evaluated = reference.logprobs(reference.load(tiny_model), strand["prompt_ids"], ids)
    assert max(abs(a - b) for a, b, m in zip(strand["logprobs"], evaluated, mask, strict=True) if m) < 1e-4
    assert [entry.logprob for entry in first.choices[0].logprobs.content] == strand["logprobs"][:6]  # type: ignore[union-attr]
    assert second.model_extra is not None and second.model_extra["headrace"] == {"session": "s1", "turn": 1, "goes_on": True}
    assert strand["spans"] == [{"version": 0, "start": 0, "end": len(ids)}]


async def test_a_rewritten_context_is_a_branch_of_the_same_session(start: Start) -> None:
    running = await start(openai={"address": "127.0.0.1:0"})
    async with client(running, "s2") as c:
        await c.chat.completions.create(model="m", messages=[user("hi")], max_tokens=4)
        await c.chat.completions.create(model="m", messages=[user("HI")], max_tokens=4)
    session = await held(running, "s2")
    assert len(session["strands"]) == 2 and [t["strand"] for t in session["turns"]] == [0, 1]
    assert (await held(running, "elsewhere"))["status"] == 404


async def test_a_streamed_answer_is_the_whole_one_in_parts(start: Start) -> None:
    running = await start(openai={"address": "127.0.0.1:0"})
    async with client(running) as c:
        whole = await c.chat.completions.create(model="m", messages=[user("hi")], max_tokens=12, temperature=0)
        parts, finish, counted = "", None, None
        async for chunk in await c.chat.completions.create(model="m", messages=[user("hi")], max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}):
            if chunk.choices:
                parts += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            counted = chunk.usage or counted
        assert parts == whole.choices[0].message.content and finish == "length" and counted is not None and counted.completion_tokens == 12
        text = await c.completions.create(model="m", prompt="count: ", max_tokens=5, temperature=0)
        ids = await c.completions.create(model="m", prompt=running.service._tokens.more_ids("count: "), max_tokens=5, temperature=0, logprobs=1)
        assert text.choices[0].text == ids.choices[0].text and len(ids.choices[0].logprobs.token_logprobs) == 5  # type: ignore[union-attr, arg-type]
        assert [m.id async for m in await c.models.list()] == [running.service._config.model]


async def test_a_stop_ends_the_answer_and_its_tokens_there(start: Start) -> None:
    running = await start(openai={"address": "127.0.0.1:0"}, step_s=0.002)
    async with client(running, "s3") as c:
        whole = (await c.chat.completions.create(model="m", messages=[user("hi")], max_tokens=60, seed=5)).choices[0].message.content or ""
        place = next(i for i in range(1, len(whole)) if whole[i].isascii() and whole[i] not in whole[:i])
        stopped = await c.chat.completions.create(model="m", messages=[user("hi")], max_tokens=60, seed=5, stop=whole[place])
        parts = [chunk.choices[0].delta.content or "" async for chunk in await c.chat.completions.create(model="m", messages=[user("hi")], max_tokens=60, seed=5, stop=whole[place], stream=True)]
    assert stopped.choices[0].message.content == whole[:place] == "".join(parts) and stopped.choices[0].finish_reason == "stop"
    session = await held(running, "s3")
    tokens = running.service._tokens
    last = session["strands"][session["turns"][1]["strand"]]["completion_ids"]
    assert tokens.text(last) == whole[: place + 1]  # up to the token that brought the stop, and none after it


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, None), (b'{"messages": []}', 400, None), (b'{"messages": [{"role": "user", "content": "hi"}], "n": 2}', 400, None),
        (json.dumps({"messages": [{"role": "user", "content": "x" * 400}]}).encode(), 400, "context_length_exceeded"), (b'"' + b"x" * 3000 + b'"', 413, None),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.001}', 400, None),
        (b'{"messages": [{"role": "user", "content": "hi"}], "session": "run-gone"}', 400, None),
    ],
)  # fmt: skip
async def test_bad_requests_are_answered_in_openais_shape(start: Start, body: bytes, status: int, code: str | None) -> None:
    running = await start(openai={"address": "127.0.0.1:0", "max_body_bytes": 2048})
    assert running.service.endpoint is not None
    async with aiohttp.ClientSession() as http, http.post(f"{running.service.endpoint.url()}/chat/completions", data=body) as response:
        said = await response.json()
    assert response.status == status and said["error"]["message"] and said["error"]["code"] == code


async def test_the_token_is_asked_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST_TOKEN", "s3cret")
    running = await start(openai={"address": "127.0.0.1:0"}, security={"token_env": "HEADRACE_TEST_TOKEN"})
    assert running.service.endpoint is not None and running.service.endpoint.api_key == "s3cret"
    async with client(running) as c:
        with pytest.raises(openai.AuthenticationError, match="asks for a bearer token"):
            await c.models.list()
    async with client(running).with_options(api_key="s3cret") as c:
        assert (await c.models.list()).data


def test_an_address_that_others_reach_wants_tls_and_a_token() -> None:
    from protos.security import SecurityConfig, resolve

    with pytest.raises(ValueError, match="gives no tls and no token"):
        resolve(SecurityConfig(), address="0.0.0.0:80")


@pytest.mark.timeout(240)
async def test_an_agents_sample_is_leased_drawn_and_submitted(start: Start, learner: FakeLearner, reward: FakeReward, other_model: Path) -> None:
    """Two agents by the same client: one says what it earned, the other lets the reward server say. Their own temperature does not count."""
    learner.publish(1, other_model)
    await learner.lend(lease(0, group_size=2, fields={"how": "earned", "environment": "a"}), lease(1, group_size=1, fields={"how": "silent", "environment": "a"}), lease(2, group_size=1, fields={"how": "raise", "environment": "a"}), lease(3, group_size=1, fields={"how": "mute", "environment": "a"}), lease(4, group_size=1, fields={"how": "endless", "environment": "a"}))
    await start(openai={"address": "127.0.0.1:0"}, environments=[{"name": "a", "use": f"{HERE}:work", "agent": True, "max_sessions": 2}], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 6, 120)
    model = reference.load(other_model)
    by_group = {t.group_id: t for t in learner.submitted}
    for t in (t for t in learner.submitted if t.group_id in ("g0", "g1")):
        assert not t.unusable_reason and t.own_prompt and len(t.turns) == 3 and len(t.more_strands) == 1  # two turns, then with a shortened history
        for prompt, ids, logprobs, mask in words(t):
            evaluated = reference.logprobs(model, prompt, ids)
            assert max(abs(a - b) for a, b, m in zip(logprobs, evaluated, mask, strict=True) if m) < 1e-4
        assert {s.version for s in t.spans} == {1}
    assert [t.reward.score.value for t in learner.submitted if t.group_id == "g0"] == [0.5, 0.5] and by_group["g1"].reward.scorer == "s"
    assert by_group["g2"].unusable_reason == "environment_error" and "no more" in by_group["g2"].reward.unscored.detail
    assert by_group["g3"].unusable_reason == "environment_no_turn" and not by_group["g3"].completion_ids.data
    cut = by_group["g4"]  # ended by the refusal of what outgrew its room
    assert (cut.unusable_reason, cut.finish_reason, cut.reward.score.value) == ("", trajectory_pb2.FINISH_REASON_LENGTH, 0.0) and cut.turns
    assert len({bytes(t.completion_ids.data) for t in learner.submitted if t.group_id == "g0"}) == 2


async def test_told_to_stop_no_further_agent_is_begun(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await learner.lend(lease(0, group_size=16, fields={"how": "sleeps", "environment": "a"}))  # a second each, one after another
    running = await start(openai={"address": "127.0.0.1:0"}, environments=[{"name": "a", "use": f"{HERE}:work", "agent": True, "max_sessions": 1}], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) >= 1, 60)
    running.service.stop()
    await asyncio.wait_for(running.serving, 60)
    assert 1 <= len(learner.submitted) < 8


def test_an_agent_needs_an_endpoint() -> None:
    from pydantic import ValidationError

    from rollout_server.config import RolloutConfig

    with pytest.raises(ValidationError, match="environment a is an agent, and openai.address is empty"):
        RolloutConfig.model_validate({"model": "m", "environments": [{"name": "a", "use": "m:f", "agent": True}]})

