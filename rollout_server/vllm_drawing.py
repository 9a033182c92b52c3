"""The two ways in which a completion's tokens leave vLLM: columns of whole steps, or vLLM's own objects.

Both yield (ids, log-probs of exactly these, finish or None) with the same values; closing the generator aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rollout_server import vllm_setup
from rollout_server.engine import EngineUnavailableError, Finish
from rollout_server.vllm_intake import Intake

Part = tuple[list[int], list[float], Finish | None]


async def by_columns(intake: Intake, prompt: dict[str, Any], parameters: Any, name: str, *, streaming: bool) -> AsyncGenerator[Part, None]:
    """Raises ValueError for what vLLM refuses, EngineUnavailableError when it dies or gives the request up."""
    try:
        stream = await intake.open(name, prompt, parameters, streaming=streaming)
    except (asyncio.CancelledError, EngineUnavailableError):
        raise
    except Exception as error:  # vLLM's own types differ between versions; the two meanings do not
        raise vllm_setup.translated(error) from error
    try:
        finish = None
        while finish is None:
            ids, logprobs, finish = await stream.take()
            yield ids, logprobs, finish
    finally:
        await intake.close(stream)


async def by_objects(engine: Any, prompt: dict[str, Any], parameters: Any, name: str) -> AsyncGenerator[Part, None]:
    """As by_columns, through AsyncLLM.generate."""
    try:
        async with aclosing(engine.generate(prompt, parameters, name)) as outputs:
            async for output in outputs:
                yield part_of(output.outputs[0])
    except (GeneratorExit, asyncio.CancelledError, EngineUnavailableError):
        raise
    except Exception as error:
        raise vllm_setup.translated(error) from error


def part_of(completion: Any) -> Part:
    """Of vLLM's CompletionOutput. Raises EngineUnavailableError for an end that is none of a sample."""
    ids = list(completion.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs or (), ids, strict=True)]
    match completion.finish_reason:
        case None | "stop" | "length" | "abort" as finish:
            return ids, logprobs, finish
    raise EngineUnavailableError(f"vLLM ended the request with {completion.finish_reason!r}")
