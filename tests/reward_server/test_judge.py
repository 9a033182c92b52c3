"""A language model as a judge: what it is asked, how its answers are read, and what becomes of those that are none."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from reward_server.config import RewardConfig, ScorerConfig
from reward_server.judging.verdict import VerdictRule
from reward_server.judging.votes import reduced
from reward_server.outcome import Outcome, Scored, Unscored
from reward_server.wiring import scorers
from tests.reward_server.endpoints.conftest import http_server, plane_of, score

NUMBER = VerdictRule(tag="verdict", low=0, high=10)
CHOICE = VerdictRule(tag="", low=0, high=1, choices={"A": 1.0, "B": 0.0, "tie": 0.5})


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        (NUMBER, "so <verdict>7</verdict>", 7.0),
        (NUMBER, "<verdict>1</verdict> no: <verdict> 2.5\n</verdict>.", 2.5),
        (NUMBER, "<verdict>0</verdict>", 0.0),
        (CHOICE, " a\n", 1.0),
        (CHOICE, "Tie", 0.5),
    ],
)
def test_the_last_verdict_counts(rule: VerdictRule, text: str, value: float) -> None:
    assert rule.read(text) == value


@pytest.mark.parametrize(
    ("rule", "text"),
    [(NUMBER, "7"), (NUMBER, "<verdict>11</verdict>"), (NUMBER, "<verdict>-1</verdict>"), (NUMBER, "<verdict>nan</verdict>"), (NUMBER, "<verdict>7/10</verdict>"),
     (NUMBER, "<verdict>7"), (NUMBER, ""), (NUMBER, "<verdict>" * 1_000_000), (NUMBER, "<verdict>" + "9" * 1_000_000 + "</verdict>"), (CHOICE, "A or B"), (CHOICE, "")],
)  # fmt: skip
def test_what_is_no_verdict_is_refused_and_never_zero(rule: VerdictRule, text: str) -> None:
    with pytest.raises(ValueError, match="verdict"):
        rule.read(text)


FAILED = Unscored("broken", "error")


@pytest.mark.parametrize(
    ("values", "how", "quorum", "expected"),
    [
        ([7, 8, 3], "median", 2, Scored(value=7.0, parts={"num_votes": 3.0, "spread": 5.0})),
        ([7, 8, 3], "mean", 2, Scored(value=6.0, parts={"num_votes": 3.0, "spread": 5.0})),
        ([1, 0, 1], "majority", 2, Scored(value=1.0, parts={"num_votes": 3.0, "spread": 1.0})),
        ([1, 0, None], "majority", 2, Scored(value=0.5, parts={"num_votes": 2.0, "spread": 1.0})),
        ([4, None, None], "median", 2, Unscored("1 of 3 votes, fewer than quorum=2; the first that failed: broken", "error")),
        ([4], "median", 1, Scored(value=4.0)),
        ([None], "median", 1, FAILED),
    ],
)
def test_votes_become_one_number_or_none(values: list[float | None], how: Any, quorum: int, expected: Outcome) -> None:
    assert reduced([FAILED if value is None else Scored(value=float(value)) for value in values], how=how, quorum=quorum) == expected


def chat(content: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop", **choice}]}


def section(url: str, limit_s: float = 20.0, **judge: Any) -> dict[str, Any]:
    return {"name": "judge", "limit_s": limit_s, "judge": {"urls": [f"{url}/v1"], "model": "m", **judge}}


async def test_it_is_asked_by_template_with_a_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app, seen = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> JSONResponse:
        seen.append((request.headers.get("authorization"), await request.json()))
        return JSONResponse(chat("good. <verdict>7</verdict>"))

    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    (tmp_path / "key").write_text("filed\n")
    async with http_server(app) as url:
        async with plane_of(section(url, token_env="JUDGE_KEY", system="Be strict.", template="{{ fields.gold }}|{{ prompt }}|{{ completion }}", extra={"seed": 3})) as plane:
            assert await score(plane, "c <b>", prompt="p", gold=5) == Scored(value=0.7)  # (7 - 0) / (10 - 0)
            assert (await score(plane, "c", prompt="p")) == Unscored("template: UndefinedError: 'dict object' has no attribute 'gold'", "refused")
            assert (await score(plane, "c" * 200_001, gold=5)).reason == "refused"  # type: ignore[union-attr]
        async with plane_of(section(url, token_file=str(tmp_path / "key"), scale=False)) as plane:
            assert await score(plane, "c", prompt="p") == Scored(value=7.0)
    assert seen[0] == ("Bearer s3cret", {"seed": 3, "model": "m", "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "5|p|c <b>"}], "temperature": 0.0, "max_tokens": 1024})
    asked = seen[1][1]["messages"][0]["content"]
    assert len(seen) == 2 and seen[1][0] == "Bearer filed" and "ANSWER\nc\n" in asked and asked.split(" QUESTION")[0].split()[-1] != "END"


async def test_a_malformed_verdict_is_asked_for_again_and_in_the_end_unscored() -> None:
    app = FastAPI()
    answers = [chat("no verdict"), chat("<verdict>12</verdict>"), {"choices": []}, chat(None), chat("<verdict>5</verdict>", finish_reason="length"), chat("<verdict>5</verdict>")]
    asked: dict[str, int] = {}

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> JSONResponse:
        item = (await request.json())["messages"][0]["content"]
        asked[item] = asked.get(item, 0) + 1
        return JSONResponse(answers[asked[item] - 1] if item == "mends" else chat("never a verdict"))

    async with http_server(app) as url, plane_of(section(url, retries=5, template="{{ completion }}")) as plane:
        mended, broken = await asyncio.gather(score(plane, "mends"), score(plane, "stays broken"))
    assert mended == Scored(value=0.5) and asked == {"mends": 6, "stays broken": 6}
    assert isinstance(broken, Unscored) and broken.reason == "error" and "malformed verdict: the answer has no <verdict>" in broken.detail


async def test_votes_are_calls_of_their_own_and_a_lost_one_is_no_zero() -> None:
    app, count = FastAPI(), iter(range(100))

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse([chat("<verdict>2</verdict>"), chat("?"), chat("<verdict>4</verdict>")][next(count) % 3])

    async with http_server(app) as url, plane_of(section(url, votes=3, temperature=1.0, retries=0, reduce="mean")) as plane:
        outcome = await score(plane, "x")
    assert isinstance(outcome, Scored) and outcome.value == pytest.approx(0.3)  # (0.2 + 0.4) / 2
    assert outcome.parts == {"num_votes": 2.0, "spread": pytest.approx(0.2)}


async def test_a_judge_that_answers_too_many_requests_is_waited_for_and_nothing_is_zero() -> None:
    app, arrived_s, refused = FastAPI(), [], []  # faults.md 107, 20 requests a second

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> JSONResponse:
        now_s = time.monotonic()
        arrived_s.append(now_s)
        if sum(now_s - each < 1.0 for each in arrived_s) > 20:
            refused.append(now_s)
            return JSONResponse({}, status_code=429, headers={"Retry-After": "1"})
        return JSONResponse(chat("<verdict>10</verdict>"))

    async with http_server(app) as url, plane_of(section(url, rate_per_s=19, limit_s=30)) as plane:
        outcomes = await asyncio.gather(*(score(plane, str(index)) for index in range(40)))
    assert outcomes == [Scored(value=1.0)] * 40 and not refused and len(arrived_s) == 40


REFUSED = [
    ({"low": 5, "high": 5}, "low=5 must be below high=5"),
    ({"votes": 3}, "votes=3 with temperature=0"),
    ({"votes": 2, "quorum": 3, "temperature": 1}, "quorum=3 is more than votes=2"),
    ({"tag": "<v>"}, "'<v>' is no tag's name"),
    ({"choices": {"a": 1, "A": 0}}, "differ in case only"),
    ({"urls": ["http://user:key@host/v1"]}, "holds a user or password"),
    ({"urls": ["host"]}, "'host' is no URL"),
    ({"token": "s3cret"}, "token"),
    ({"batch_items": 2}, "batch_items"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_a_bad_configuration_of_a_judge_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScorerConfig.model_validate({"name": "j", "judge": {"urls": ["http://h/v1"], "model": "m", **changes}})


@pytest.mark.parametrize(("template", "words"), [("{{ prompt", "template: unexpected end"), ("{{ reply }}", "it names reply, and there are completion, fence, fields, prompt")])
def test_a_template_that_cannot_be_filled_is_refused_at_start(template: str, words: str) -> None:
    config = RewardConfig.model_validate({"scorers": [{"name": "j", "judge": {"urls": ["http://h/v1"], "model": "m", "template": template}}]})
    with pytest.raises(ValueError, match=f"scorer 'j': judge: .*{words}"):
        scorers(config, Path.cwd())


async def test_a_template_cannot_reach_into_the_interpreter() -> None:
    app = FastAPI()
    async with http_server(app) as url, plane_of(section(url, template="{{ prompt.__class__.__mro__ }}")) as plane:
        outcome = await score(plane, "x")
    assert isinstance(outcome, Unscored) and outcome.reason == "refused" and "SecurityError" in outcome.detail
