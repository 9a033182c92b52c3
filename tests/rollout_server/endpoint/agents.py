"""An agent as anybody would write one for OpenAI's API: it knows nothing of training."""

from __future__ import annotations

import time
from typing import Any

from openai import OpenAI


def work(task: Any, base_url: str, api_key: str) -> float | None:
    """Three calls: two turns, and a third with the history shortened to its last question."""
    how = task.fields.get("how")
    if how == "mute":
        return 1.0
    if how == "sleeps":
        time.sleep(1.0)
        return 1.0
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    while how == "endless":  # until it is refused
        said = client.chat.completions.create(model="any", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    for follow_up in ("and then?", "so?"):
        said = client.chat.completions.create(model="any", messages=messages, max_tokens=6, temperature=0.0).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": follow_up}]
    client.chat.completions.create(model="any", messages=messages[-1:], max_tokens=6, temperature=0.0)
    if how == "raise":
        raise RuntimeError("no more")
    return 0.5 if how == "earned" else None
