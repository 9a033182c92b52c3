"""External HTTP endpoints, real ones: FastAPI under uvicorn, over loopback."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from reward_server.endpoints.failures import Failed
from reward_server.endpoints.schema import decode
from reward_server.outcome import Scored, Unscored
from tests.reward_server.endpoints.conftest import http_server, plane_of, score

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "http_scorer.py"


def example() -> Any:
    """The application of the documented example."""
    described = importlib.util.spec_from_file_location("http_scorer", EXAMPLE)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules["http_scorer"] = module  # as an import does; pydantic looks for annotations there
    described.loader.exec_module(module)
    return module.app


async def test_the_documented_example_is_plugged_in_by_four_lines_of_yaml() -> None:
    async with http_server(example()) as url, plane_of({"name": "brevity", "http": {"urls": [f"{url}/score"]}, "limit_s": 10}) as plane:
        outcomes = await asyncio.gather(*(score(plane, "x" * length, most=200) for length in (0, 50, 400)), score(plane, "x"), score(plane, "x", most=0), score(plane, "x", most="two"))
    assert outcomes[:3] == [Scored(value=value, parts={"characters": length}) for value, length in ((1.0, 0), (0.75, 50), (0.0, 400))]  # 1 - 50 / 200
    for outcome, most in zip(outcomes[3:], ("None", "0", "'two'"), strict=True):
        assert outcome == Unscored(f"the record does not say how long an answer may be: most={most}; give a number of characters", "refused")
    assert plane.tallies["brevity"].num_answered == 6 and plane.tallies["brevity"].unscored == {"refused": 3}


async def test_a_number_that_json_has_not_costs_its_own_item_only() -> None:
    async with http_server(example()) as url, plane_of({"name": "brevity", "http": {"urls": [f"{url}/score"], "batch_wait_s": 0.05}, "limit_s": 10}) as plane:
        plain, odd, also = await asyncio.gather(*(score(plane, "x" * 50, owner=number, most=most) for number, most in enumerate((200, float("nan"), 100))))
    assert (plain, also) == (Scored(value=0.75, parts={"characters": 50}), Scored(value=0.5, parts={"characters": 50}))
    assert odd == Unscored("a field of the record is NaN or infinite, which JSON cannot say; remove it, or set format: msgpack", "refused")


async def test_msgpack_travels_both_ways_with_the_token_and_the_time_left() -> None:
    app, seen = FastAPI(), []

    @app.post("/score")
    async def answer(request: Request) -> Response:
        seen.append((dict(request.headers), msgpack.unpackb(await request.body())))
        scores = [{"id": item["id"], "score": item["fields"]["gold"]} for item in seen[-1][1]["items"]]
        return Response(msgpack.packb({"scores": scores}), media_type="application/msgpack")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_TOKEN", "s3cret")
        section = {"name": "far", "http": {"urls": ["{url}"], "format": "msgpack", "token_env": "JUDGE_TOKEN", "attempt_s": 2.5}}
        async with http_server(app) as url:
            section["http"] = {**section["http"], "urls": [f"{url}/score"]}  # type: ignore[dict-item]
            async with plane_of(section) as plane:
                assert await score(plane, "c", prompt="p", gold=0.25, words=["a", 7]) == Scored(value=0.25)
    headers, body = seen[0]
    assert body == {"schema": 1, "items": [{"id": "0", "prompt": "p", "completion": "c", "fields": {"gold": 0.25, "words": ["a", 7]}}]}
    assert headers["authorization"] == "Bearer s3cret" and headers["headrace-timeout-ms"] == "2500"


async def test_a_judge_with_a_rate_limit_scores_everything_and_is_never_overrun() -> None:
    # faults.md 107, five times as fast: 50 requests in any second, else 429 with Retry-After
    app, arrived_s, refused = FastAPI(), [], []

    @app.post("/score")
    async def judge(request: Request) -> Response:
        now_s = time.monotonic()
        arrived_s.append(now_s)
        if sum(now_s - each < 1.0 for each in arrived_s) > 50:
            refused.append(now_s)
            return JSONResponse({}, status_code=429, headers={"Retry-After": "1"})
        return JSONResponse({"scores": [{"id": "0", "score": 1}]})

    section = {"name": "judge", "limit_s": 30, "http": {"batch_items": 1, "rate_per_s": 49, "concurrency": 16}}
    async with http_server(app) as url:
        section["http"] = {**section["http"], "urls": [f"{url}/score"]}  # type: ignore[dict-item]
        async with plane_of(section) as plane:
            outcomes = await asyncio.gather(*(score(plane, str(number)) for number in range(100)))
    assert outcomes == [Scored(value=1.0)] * 100
    assert len(refused) <= 2 and len(arrived_s) <= 102  # a busy machine may deliver two seconds' requests together


async def test_retry_after_is_respected_by_an_endpoint_without_a_rate_of_its_own() -> None:
    # faults.md 107: the judge takes 5 a burst and says how long to wait; nothing is lost, nothing asks before that time
    app = FastAPI()
    served: list[float] = []
    refusals: list[float] = []
    early: list[float] = []

    @app.post("/score")
    async def judge(request: Request) -> Response:
        now_s = time.monotonic()
        early.extend([now_s] if refusals and now_s < refusals[0] + 0.3 and now_s > refusals[-1] + 0.1 else [])
        if sum(now_s - each < 0.4 for each in served) >= 5:
            refusals.append(now_s)
            return JSONResponse({}, status_code=429, headers={"Retry-After": "0.4"})
        served.append(now_s)
        return JSONResponse({"scores": [{"id": "0", "score": 1}]})

    async with http_server(app) as url, plane_of({"name": "judge", "limit_s": 30, "http": {"urls": [f"{url}/score"], "batch_items": 1, "concurrency": 8}}) as plane:
        outcomes = await asyncio.gather(*(score(plane, str(number)) for number in range(20)))
        endpoint = plane.scorers["judge"].endpoint  # type: ignore[attr-defined]
        assert endpoint.limiter.num_refused == len(refusals) > 0 and endpoint.limiter.window < 8
    assert outcomes == [Scored(value=1.0)] * 20 and not early and len(refusals) < 40


async def test_a_trickling_endpoint_is_cut_at_the_wall_clock() -> None:
    # faults.md 127
    app, ended = FastAPI(), []

    @app.post("/score")
    async def trickle(request: Request) -> Response:
        async def forever() -> Any:
            try:
                while True:
                    yield b" "
                    await asyncio.sleep(0.05)
            finally:
                ended.append(time.monotonic())

        return StreamingResponse(forever())

    async with http_server(app) as url, plane_of({"name": "far", "limit_s": 0.6, "http": {"urls": [f"{url}/score"], "attempt_s": 0.6}}) as plane:
        began_s = time.monotonic()
        outcome = await score(plane, "a")
        took_s = time.monotonic() - began_s
        assert isinstance(outcome, Unscored) and outcome.reason == "timeout" and 0.55 < took_s < 20
        until_s = time.monotonic() + 20
        while not ended:  # the work on the other side stops, too: faults.md 126
            assert time.monotonic() < until_s
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("status", "body", "reason", "words"),
    [
        (400, "no such field", "refused", "HTTP 400: no such field"),
        (500, "", "error", "HTTP 500"),
        (302, "", "refused", "HTTP 302"),
        (200, "not json", "error", "the answer is no json"),
        (200, "[1]", "error", "the answer must be"),
        (200, '{"scores": []}', "error", "left this one out"),
        (200, '{"scores": [{"id": "0", "score": NaN}]}', "non_finite", "nan"),
        (200, '{"scores": [{"id": "0", "score": "1"}]}', "non_finite", "of type str"),
        (200, '{"scores": [{"id": "0", "score": 1, "parts": {"a": null}}]}', "non_finite", "part 'a'"),
        (200, '{"scores": [{"id": "0", "score": 1}, {"id": "0", "score": 2}]}', "error", "one id"),
        (200, '{"scores": [{"id": "0"}]}', "error", "neither"),
        (200, '{"scores": [{"id": "0", "unscored": "no gold", "reason": "nonsense"}]}', "error", "none of"),
    ],
)
async def test_what_is_no_score_is_a_typed_outcome_and_never_zero(status: int, body: str, reason: str, words: str) -> None:
    app = FastAPI()

    @app.post("/score")
    async def answer(request: Request) -> Response:
        return Response(body, status_code=status, headers={"Location": "/elsewhere"} if status == 302 else {})

    async with http_server(app) as url, plane_of({"name": "far", "http": {"urls": [f"{url}/score"], "retries": 0}}) as plane:
        outcome = await score(plane, "a")
    assert isinstance(outcome, Unscored) and outcome.reason == reason and words in outcome.detail


async def test_nobody_there_is_unavailable_and_another_upstream_takes_over() -> None:
    app = FastAPI()

    @app.post("/score")
    async def answer(request: Request) -> Any:
        return {"scores": [{"id": item["id"], "score": 1} for item in (await request.json())["items"]]}

    nowhere = "http://127.0.0.1:9/score"
    async with plane_of({"name": "far", "limit_s": 5, "http": {"urls": [nowhere], "retries": 1}}) as plane:
        outcome = await score(plane, "a")
        assert isinstance(outcome, Unscored) and outcome.reason == "unavailable" and nowhere in outcome.detail
    async with http_server(app) as url, plane_of({"name": "far", "http": {"urls": [nowhere, f"{url}/score"], "batch_items": 1}}) as plane:
        assert await asyncio.gather(*(score(plane, str(number)) for number in range(30))) == [Scored(value=1.0)] * 30
        dead, alive = plane.scorers["far"].endpoint.upstreams.all  # type: ignore[attr-defined]
        assert alive.num_attempts >= 30 and dead.num_failures == dead.num_attempts < 20


async def test_a_token_that_the_other_side_echoes_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.post("/score")
    async def echo(request: Request) -> Response:
        return Response(f"you sent {request.headers['authorization']}", status_code=403)

    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    async with http_server(app) as url, plane_of({"name": "far", "http": {"urls": [f"{url}/score"], "token_env": "JUDGE_TOKEN"}}) as plane:
        outcome = await score(plane, "a")
    assert outcome == Unscored("HTTP 403: you sent Bearer ***", "refused")


def test_deeply_nested_json_is_an_answer_that_cannot_be_read() -> None:
    with pytest.raises(Failed, match="is no json"):
        decode(b"[" * 100_000, 1, "json")
