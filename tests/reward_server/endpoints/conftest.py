"""A real uvicorn server on a free port, and a plane from a configuration as a user writes it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from reward_server import wiring
from reward_server.config import RewardConfig
from reward_server.outcome import Outcome
from reward_server.plane import Plane
from reward_server.scorer import Work
from tests.reward_server.conftest import FOLDER, struct


@asynccontextmanager
async def http_server(app: Any) -> AsyncIterator[str]:
    """The base URL of an ASGI application, served until the end."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await serving


@asynccontextmanager
async def plane_of(*scorers: dict[str, Any], folder: Path = FOLDER, **settings: Any) -> AsyncIterator[Plane]:
    """A started plane of these sections of YAML; the first scorer is the default."""
    config = RewardConfig.model_validate({"scorers": list(scorers), **settings})
    plane = Plane(wiring.scorers(config, folder), default=config.default or config.scorers[0].name, caches=wiring.caches(config.cache))
    await plane.start()
    try:
        yield plane
    finally:
        await plane.stop()


async def score(plane: Plane, completion: str, *, name: str = "", prompt: str = "p", owner: Any = "owner", **fields: Any) -> Outcome:
    """The outcome of one item."""
    answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    work = Work(owner=owner, prompt=prompt, completion=completion, fields=struct(fields))
    plane.submit(name or plane.default, work, answered.set_result)
    return await answered
