"""The endpoint of one rollout server, as its configuration says."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from protos.security import resolve
from rollout_server.config import RolloutConfig
from rollout_server.endpoint.answering import Answering
from rollout_server.endpoint.sessions import Sessions
from rollout_server.exchange import Exchange
from rollout_server.replica import Replica
from rollout_server.tokens import Tokens

if TYPE_CHECKING:
    from rollout_server.endpoint.app import Endpoint


def endpoint_of(config: RolloutConfig, replica: Replica, tokens: Tokens) -> Endpoint | None:
    """None where no address is configured. Raises ValueError without aiohttp, or for an address that others can reach without TLS and a token."""
    c = config.openai
    if not c.address:
        return None
    try:
        from rollout_server.endpoint.app import Endpoint
    except ImportError as error:
        raise ValueError(f"openai.address={c.address} needs the package {error.name}: pip install \".[openai]\" in the clone") from None

    async def nothing(*_: object, **__: object) -> None:
        raise AssertionError("an own session's requests say how they are drawn")

    def own() -> Exchange:
        return Exchange(tokens, draw=nothing, room_tokens=replica.engine.info.max_model_len, template=True)

    answering = Answering(replica=replica, tokens=tokens, model=config.model, tool_parser=c.tool_parser, stop_token_ids=tokens.stop_ids, serial=itertools.count())
    sessions = Sessions(max_own=c.max_sessions, idle_s=c.idle_s, make=own)
    return Endpoint(c.address, answering, sessions, security=resolve(config.security, address=c.address), max_body_bytes=c.max_body_bytes)
