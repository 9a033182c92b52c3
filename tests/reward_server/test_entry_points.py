"""Scorers that installed packages offer by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_server.outcome import Scored
from tests.reward_server.endpoints.conftest import plane_of, score

CODE = "def shout(prompt, completion, fields):\n    return float(completion.isupper())\nasync def whisper(prompt, completion, fields):\n    return float(completion.islower())\n"


def install(folder: Path, package: str, lines: str) -> None:
    """What pip leaves of a package, in a folder that is looked at."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[headrace.scorers]\n{lines}\n")


async def test_an_entry_point_is_used_by_its_name_sync_or_async(tmp_path: Path) -> None:
    (tmp_path / "loudness.py").write_text(CODE)
    install(tmp_path, "loudness", "shout = loudness:shout\nwhisper = loudness:whisper")
    async with plane_of({"name": "a", "use": "shout"}, {"name": "b", "use": "whisper"}, folder=tmp_path) as plane:
        assert await score(plane, "ABC") == Scored(value=1.0) and await score(plane, "ABC", name="b") == Scored(value=0.0)


async def test_two_packages_that_offer_one_name_are_told_apart_by_the_user(tmp_path: Path) -> None:
    (tmp_path / "loudness.py").write_text(CODE)
    install(tmp_path, "loudness", "shout = loudness:shout")
    install(tmp_path, "noise", "shout = noise:shout")
    with pytest.raises(ValueError, match="several installed packages offer a scorer 'shout': loudness:shout, noise:shout"):
        async with plane_of({"name": "a", "use": "shout"}, folder=tmp_path):
            pass


async def test_an_unknown_name_is_answered_with_what_is_offered(tmp_path: Path) -> None:
    install(tmp_path, "loudness", "shout = loudness:shout")
    with pytest.raises(ValueError, match="'shoot' is no built-in scorer.* shout; a function of yours"):
        async with plane_of({"name": "a", "use": "shoot"}, folder=tmp_path):
            pass
