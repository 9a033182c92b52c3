"""All logs in one stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deploy.log_lines import prefixed


async def test_lines_of_all_services_come_with_their_names_and_old_ones_do_not(tmp_path: Path) -> None:
    (tmp_path / "learner.log").write_text("of an earlier life\n")
    stream = prefixed([tmp_path, tmp_path])
    waiting = asyncio.ensure_future(anext(stream))
    with (tmp_path / "learner.log").open("a") as file:
        file.write("up\nhalf a li")
    (tmp_path / "rollout-1.log").write_text("a service that came later\n")
    async with asyncio.timeout(60):
        said = [await waiting, await anext(stream)]
        with (tmp_path / "learner.log").open("a") as file:
            file.write("ne\n")
        said.append(await anext(stream))
    assert said == ["[learner] up", "[rollout-1] a service that came later", "[learner] half a line"]


async def test_what_was_written_to_the_end_is_told_though_its_line_has_none(tmp_path: Path) -> None:
    ended = asyncio.Event()
    stream = prefixed([tmp_path], ended=ended)
    (tmp_path / "learner.log").write_text("cut\nleft")
    ended.set()
    async with asyncio.timeout(60):
        assert [line async for line in stream] == ["[learner] cut", "[learner] left"]
