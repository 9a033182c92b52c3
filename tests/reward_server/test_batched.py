"""Scorers that take many items in one call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from reward_server.outcome import Scored, Unscored
from tests.reward_server.endpoints.conftest import plane_of, score

CODE = """
import asyncio
import time
from reward_server import Unscored, batch

@batch
def sizes(prompts, completions, fields, *, bonus=0.0):
    '''How many came together.'''
    if "poison" in completions:
        raise KeyError("poison")
    if "sleep" in completions:
        time.sleep(60)
    time.sleep(0.1)
    return [Unscored("no") if each == "no" else (len(completions) + bonus, {"own": float(record["own"])}) for each, record in zip(completions, fields)]

@batch
async def later(prompts, completions, fields):
    await asyncio.sleep(0.05)
    return [float(each) for each in completions]

@batch
def short(prompts, completions, fields):
    return [1.0]
"""


def section(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "use": f"mine:{name}", **more}


async def test_items_that_are_there_together_go_together_and_each_gets_its_own_result(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    async with plane_of(section("sizes", args={"bonus": 0.5}), section("later"), folder=tmp_path, cache={"backend": "none"}) as plane:
        outcomes = await asyncio.gather(*(score(plane, "x", own=number) for number in range(20)))
        assert [outcome.parts["own"] for outcome in outcomes if isinstance(outcome, Scored)] == [float(number) for number in range(20)]
        assert max(outcome.value for outcome in outcomes if isinstance(outcome, Scored)) > 10  # most of the twenty in one call
        assert await asyncio.gather(*(score(plane, str(number), name="later") for number in range(5))) == [Scored(value=float(number)) for number in range(5)]
        assert plane.scorers["sizes"].description == "How many came together."


async def test_one_bad_item_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    async with plane_of(section("sizes"), section("short"), folder=tmp_path, cache={"backend": "none"}) as plane:
        outcomes = await asyncio.gather(*(score(plane, each, own=0) for each in ("x", "poison", "no", "y")))
        said = [outcome.parts["own"] if isinstance(outcome, Scored) else (outcome.reason, outcome.detail) for outcome in outcomes]
        assert said == [0.0, ("error", "KeyError: 'poison'"), ("refused", "no"), 0.0]
        both = await asyncio.gather(*(score(plane, each, name="short") for each in "ab"))
        assert both == [Scored(value=1.0)] * 2  # one result for two items is a mistake, for each alone it is right


async def test_a_call_that_hangs_is_a_timeout_and_its_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    async with plane_of(section("sizes", limit_s=1.0), folder=tmp_path, cache={"backend": "none"}) as plane:
        outcome = await score(plane, "sleep", own=0)
        assert isinstance(outcome, Unscored) and outcome.reason == "timeout"
        until_s = asyncio.get_running_loop().time() + 20
        while not isinstance(await score(plane, "x", own=0), Scored):
            assert asyncio.get_running_loop().time() < until_s
