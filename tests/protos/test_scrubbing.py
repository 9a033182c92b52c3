"""Scorer processes hold no credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.scrubbing import scrubbed
from reward_server.outcome import Scored
from tests.reward_server.endpoints.conftest import plane_of, score


def test_credentials_go_and_everything_else_stays() -> None:
    stays = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us", "MONKEY": "1", "HF_HOME": "/models", "INDEX": "https://example.org/simple"}
    goes = {
        "HF_TOKEN": "x", "OPENAI_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "DB_PASSWORD": "x", "GOOGLE_APPLICATION_CREDENTIALS": "/x", "SSH_AUTH_SOCK": "/x",
        "my-token": "x", "INDEX_URL": "https://user:pw@example.org/simple",
    }  # fmt: skip
    assert scrubbed({**stays, **goes}) == stays
    assert scrubbed({"JUDGE": "x", "HF_TOKEN": "y"}, named=["JUDGE"], keep=["HF_TOKEN"]) == {"HF_TOKEN": "y"}


CODE = "import os\ndef score(prompt, completion, fields):\n    return float(completion in os.environ)\n"


async def test_a_scorer_sees_neither_the_services_secrets_nor_those_of_other_scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    for name in ("HF_TOKEN", "JUDGE", "OTHER_TOKEN", "PLAIN"):
        monkeypatch.setenv(name, "s3cret")
    judge: dict[str, Any] = {"name": "judge", "http": {"urls": ["http://127.0.0.1:9/"], "token_env": "JUDGE"}}
    async with plane_of({"name": "mine", "use": "mine:score"}, judge, folder=tmp_path, pass_env=["OTHER_TOKEN"]) as plane:
        seen = {name: await score(plane, name) for name in ("HF_TOKEN", "JUDGE", "OTHER_TOKEN", "PLAIN")}
    assert seen == {"HF_TOKEN": Scored(value=0.0), "JUDGE": Scored(value=0.0), "OTHER_TOKEN": Scored(value=1.0), "PLAIN": Scored(value=1.0)}
