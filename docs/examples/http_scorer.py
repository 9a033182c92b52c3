"""A scorer behind HTTP, whole: `pip install fastapi uvicorn`, then `uvicorn http_scorer:app --port 9000`.

It becomes a scorer of a reward server by four lines of YAML:

    scorers:
      - name: brevity
        http: {urls: ["http://127.0.0.1:9000/score"]}
        limit_s: 10

A prompt's record says in its field `most` how many characters an answer may have: `{"prompt": "Name a river.", "most": 200}`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()


class Item(BaseModel):
    """One completion to be scored."""

    id: str
    prompt: str
    completion: str
    fields: dict[str, Any]  # the prompt's record: the gold answer, metadata


class Batch(BaseModel):
    """What a reward server POSTs."""

    items: list[Item]


@app.post("/score")
async def score(batch: Batch) -> dict[str, Any]:
    """A score for each item, with its id; `parts` are for people and may be left out."""
    return {"scores": [_one(item) for item in batch.items]}


def _one(item: Item) -> dict[str, Any]:
    most = item.fields.get("most")
    if not isinstance(most, int | float) or most < 1:
        return {"id": item.id, "unscored": f"the record does not say how long an answer may be: most={most!r}; give a number of characters"}
    brevity = max(0.0, 1.0 - len(item.completion) / most)
    return {"id": item.id, "score": brevity, "parts": {"characters": len(item.completion)}}
