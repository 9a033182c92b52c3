"""Caching through a plane with real scorer processes, and with a real Redis that is killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from reward_server.cache import shared
from reward_server.outcome import Scored
from tests.redis_server import RedisServer
from tests.reward_server.endpoints.conftest import plane_of, score

SLOWLY: dict[str, Any] = {"name": "slowly", "use": "user_functions:slowly"}


def calls(folder: Path) -> int:
    """How often the scorer was really called."""
    file = folder / "calls"
    return len(file.read_text()) if file.exists() else 0


async def test_equal_requests_are_computed_once_at_once_and_later(tmp_path: Path) -> None:
    record = {"calls": str(tmp_path / "calls")}
    async with plane_of(SLOWLY) as plane:
        together = await asyncio.gather(*(score(plane, "0.2", owner=owner, **record) for owner in range(10)))
        later = await score(plane, "0.2", **record)
        assert [*together, later] == [Scored(value=1.0)] * 11 and calls(tmp_path) == 1
        tally = plane.tallies["slowly"]
        assert (tally.num_answered, tally.num_cached, plane.flights.num_joined) == (11, 1, 9)
        await score(plane, "0.1", **record)
        assert calls(tmp_path) == 2


@pytest.mark.parametrize(
    ("scorer", "settings"),
    [({**SLOWLY, "deterministic": False}, {}), (SLOWLY, {"cache": {"backend": "none"}}), ({"name": "a", "use": "user_functions:says_it_differs"}, {})],
)
async def test_a_scorer_that_opts_out_or_a_server_without_cache_computes_each(tmp_path: Path, scorer: dict[str, Any], settings: dict[str, Any]) -> None:
    async with plane_of(scorer, **settings) as plane:
        await asyncio.gather(*(score(plane, "0", owner=owner, calls=str(tmp_path / "calls")) for owner in range(3)))
    assert calls(tmp_path) == 3


async def test_what_was_not_scored_is_not_kept(tmp_path: Path) -> None:
    async with plane_of({"name": "behaves", "use": "user_functions:behaves"}) as plane:
        await score(plane, "raise")
        await score(plane, "raise")
        assert plane.tallies["behaves"].unscored == {"error": 2} and plane.tallies["behaves"].num_cached == 0


async def test_who_goes_leaves_the_work_to_those_who_wait_for_the_same(tmp_path: Path) -> None:
    record = {"calls": str(tmp_path / "calls")}
    async with plane_of(SLOWLY) as plane:
        first = asyncio.ensure_future(score(plane, "0.5", owner="goes", **record))
        await asyncio.sleep(0.1)
        second = asyncio.ensure_future(score(plane, "0.5", owner="stays", **record))
        await asyncio.sleep(0)
        plane.forget("goes")
        assert await asyncio.wait_for(second, 20) == Scored(value=1.0) and not first.done()
        first.cancel()


async def test_a_file_that_changes_under_a_running_server_is_said_and_its_scores_are_kept_no_longer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion, fields): return 1.0\n")
    async with plane_of({"name": "mine", "use": "mine:score"}, folder=tmp_path, spares=0) as plane:
        assert [await score(plane, "x"), await score(plane, "x")] == [Scored(value=1.0)] * 2 and plane.tallies["mine"].num_cached == 1
        (tmp_path / "mine.py").write_text("def score(prompt, completion, fields): return 2.0\n")
        pool = plane.at_work.pool
        assert pool is not None
        (before,) = pool._crew.idle
        os.kill(before.pid, signal.SIGKILL)  # and another one is started in its place
        async with asyncio.timeout(30):
            while not pool._crew.idle or pool._crew.idle == [before]:
                await asyncio.sleep(0.02)
        assert [await score(plane, "x"), await score(plane, "x")] == [Scored(value=2.0)] * 2 and plane.tallies["mine"].num_cached == 1
        assert caplog.text.count("its file has changed since it was loaded") == 1


async def test_two_servers_share_scores_through_redis_and_changed_code_shares_none(tmp_path: Path) -> None:
    record = {"calls": str(tmp_path / "calls")}
    code = "from pathlib import Path\ndef score(prompt, completion, fields):\n    with Path(fields['calls']).open('a') as file: file.write('.')\n    return 1.0\n"
    (tmp_path / "mine.py").write_text(code)
    with RedisServer(tmp_path / "redis") as server:
        section = {"cache": {"backend": "redis", "url": server.url}}
        for expected in (1, 1):
            async with plane_of({"name": "mine", "use": "mine:score"}, folder=tmp_path, **section) as plane:
                assert await score(plane, "0", **record) == Scored(value=1.0)
                assert calls(tmp_path) == expected
                await asyncio.sleep(0.1)  # the score is kept soon, not at once
        (tmp_path / "mine.py").write_text(code + "# changed\n")
        async with plane_of({"name": "mine", "use": "mine:score"}, folder=tmp_path, **section) as plane:
            await score(plane, "0", **record)
    assert calls(tmp_path) == 2


async def test_a_redis_killed_and_restarted_under_load_fails_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "REST_S", 0.1)
    with RedisServer(tmp_path / "redis", appendfsync="no") as server:
        async with plane_of({"name": "one", "use": "user_functions:one"}, cache={"backend": "redis", "url": server.url}) as plane:
            stop = asyncio.Event()
            outcomes: list[Any] = []

            async def load(owner: int) -> None:
                number = 0
                while not stop.is_set():
                    outcomes.extend(await asyncio.gather(*(score(plane, f"{owner} {number + each}", owner=owner) for each in range(20))))
                    number += 20

            loads = [asyncio.create_task(load(owner)) for owner in range(3)]
            await asyncio.sleep(0.4)
            server.kill()
            await asyncio.sleep(0.4)
            await asyncio.to_thread(server.start)
            cache = plane.caches.shared
            assert cache is not None and cache.num_failures >= 1
            await asyncio.sleep(0.4)
            before = cache.num_hits
            await score(plane, "kept again")
            stop.set()
            await asyncio.gather(*loads)
            plane.caches.memory._entries.clear()  # type: ignore[union-attr]  # as another server would: only Redis knows them
            until_s = asyncio.get_running_loop().time() + 10
            while cache.num_hits == before and asyncio.get_running_loop().time() < until_s:
                await asyncio.sleep(0.1)
                assert await score(plane, "kept again") == Scored(value=1.0)
                plane.caches.memory._entries.clear()  # type: ignore[union-attr]
            assert cache.num_hits > before
    assert len(outcomes) > 100 and outcomes == [Scored(value=1.0)] * len(outcomes)


async def test_a_redis_that_never_answers_costs_one_limit_and_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "REST_S", 600.0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with plane_of({"name": "one", "use": "user_functions:one"}, cache={"backend": "redis", "url": f"redis://127.0.0.1:{port}/0"}) as plane:
        outcomes = await asyncio.gather(*(score(plane, str(number)) for number in range(50)))
        assert outcomes == [Scored(value=1.0)] * 50
        assert plane.caches.shared is not None and 1 <= plane.caches.shared.num_failures <= 3
        before = plane.caches.shared.num_failures
        for number in range(3):  # while it rests, nobody waits for it again
            await score(plane, f"later {number}")
        assert plane.caches.shared.num_failures == before
    server.close()
