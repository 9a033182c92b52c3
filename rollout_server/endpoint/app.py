"""The HTTP side: routes, the token, limits, and errors in OpenAI's shape.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models       also below /session/ID, which then is the request's session
    GET  /v1/sessions/ID        what a session holds: ids, log-probs, masks, versions
    POST /v1/sessions/ID/reward {"reward": 1.0}: what the agent says that its sample earned
    DELETE /v1/sessions/ID      forgets a session of the caller's own
    GET  /health                no token is asked for
"""

from __future__ import annotations

import hmac
import itertools
import json
import logging
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from protos.mistakes import check_address
from protos.security import OPEN, Security
from rollout_server.endpoint import answers, requests
from rollout_server.endpoint.answering import Answering, plain_trajectory
from rollout_server.endpoint.answers import Said
from rollout_server.endpoint.requests import Wanted
from rollout_server.endpoint.sessions import AgentSession, Sessions
from rollout_server.engine import EngineUnavailableError
from rollout_server.environments.interface import checked_reward
from rollout_server.exchange import GivenUp, OutOfRoom

logger = logging.getLogger("headrace.rollout.endpoint")
HEADER = "X-Headrace-Session"
STOP_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Example: `endpoint = Endpoint("127.0.0.1:0", answering, sessions); await endpoint.start(); endpoint.url("run-x"); await endpoint.stop()`"""

    def __init__(self, address: str, answering: Answering, sessions: Sessions, *, security: Security = OPEN, max_body_bytes: int = 8 << 20) -> None:
        self.sessions = sessions
        self.answers: Counter[str] = Counter()  # by status: 200, 400, ...
        self._address, self._answering, self._security, self._max_body_bytes = address, answering, security, max_body_bytes
        self._serial = itertools.count()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def api_key(self) -> str:
        """What a client gives as its key."""
        return self._security.token or "none"

    def url(self, session_id: str = "") -> str:
        """base_url of a client: whatever it asks below it belongs to the session."""
        scheme = "https" if self._security.certificate is not None else "http"
        host = self._address.rpartition(":")[0]
        path = f"/session/{session_id}" if session_id else ""
        return f"{scheme}://{host}:{self.port}{path}/v1"

    async def start(self) -> None:
        """Binds and serves. Raises ValueError naming the address when it cannot be bound."""
        host, port = check_address("openai.address", self._address, may_be_free=True)
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._around])
        for base in ("/v1", "/session/{session}/v1"):
            app.router.add_post(f"{base}/chat/completions", self._chat)
            app.router.add_post(f"{base}/completions", self._completion)
            app.router.add_get(f"{base}/models", self._models)
            app.router.add_get(f"{base}/models/{{model:.*}}", self._models)
        app.router.add_post("/session/{session}/v1/reward", self._reward)
        app.router.add_get("/v1/sessions/{session}", self._session)
        app.router.add_post("/v1/sessions/{session}/reward", self._reward)
        app.router.add_delete("/v1/sessions/{session}", self._forget)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host.strip("[]"), port, ssl_context=self._tls())
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ValueError(f"openai.address={self._address} cannot be listened on: {error.strerror}; choose another port") from None
        self.port = int(self._runner.addresses[0][1])
        logger.info("OpenAI-compatible endpoint at %s", self.url())

    async def stop(self) -> None:
        """Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _tls(self) -> ssl.SSLContext | None:
        if self._security.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._security.certificate, self._security.key)
        return context

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The token, and every failure as an answer in OpenAI's shape."""
        response = self._refused(request) or await self._handled(request, handler)
        self.answers[str(response.status)] += 1
        return response

    def _refused(self, request: web.Request) -> web.Response | None:
        token = self._security.token
        if not token or request.path == "/health" or hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
            return None
        return _error(401, "this endpoint asks for a bearer token (api_key), and the request brought none or another", "authentication_error")

    async def _handled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except OutOfRoom as error:
            return _error(400, str(error), "invalid_request_error", "context_length_exceeded")
        except (ValueError, LookupError) as error:
            return _error(404 if isinstance(error, LookupError) else 400, str(error.args[0] if error.args else error), "invalid_request_error")
        except (GivenUp, EngineUnavailableError) as error:
            return _error(503, str(error) or "the replica drains; this sample is drawn elsewhere", "server_error")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than openai.max_body_bytes={self._max_body_bytes}", "invalid_request_error")
        except web.HTTPException as error:
            return _error(error.status, error.reason, "invalid_request_error")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, requests.chat(await _json(request)), is_chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, requests.completion(await _json(request)), is_chat=False)

    async def _answer(self, request: web.Request, wanted: Wanted, *, is_chat: bool) -> web.StreamResponse:
        session = self.sessions.of(request.match_info.get("session") or request.headers.get(HEADER) or wanted.session)
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{time.time_ns():x}-{next(self._serial)}"
        if not session.leased:
            wanted.spec(1, (), 0)  # so that a contradiction is refused before anything is drawn
        asked = self._answering.asked(session, wanted)
        if not wanted.stream:
            said = await self._answering.answer(session, wanted, asked, answer_id)
            return web.json_response(answers.chat(said) if is_chat else answers.completion(said))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await self._stream(response, session, wanted, asked, answer_id, is_chat)
        return response

    async def _stream(self, response: web.StreamResponse, session: AgentSession, wanted: Wanted, asked: Any, answer_id: str, is_chat: bool) -> None:
        created, model, first = int(time.time()), self._answering.model, True

        async def send(**parts: Any) -> None:
            nonlocal first
            await _send(response, answers.chunk(answer_id, created, model, is_chat=is_chat, first=first, **parts))
            first = False

        try:
            async with aclosing(self._answering.streamed(session, wanted, asked, answer_id)) as texts:
                async for text in texts:
                    if not isinstance(text, Said):
                        await send(text=text)
                        continue
                    await send(finish=text.finish, calls=answers.message("", text.calls, answer_id).get("tool_calls", ()))
                    if wanted.include_usage:
                        last = answers.chunk(answer_id, created, model, is_chat=is_chat)
                        await _send(response, {**last, "choices": [], "usage": answers.usage(text)})
        except (GivenUp, EngineUnavailableError, ValueError) as error:  # the status has been sent
            await _send(response, answers.error(str(error) or "the replica drains; this sample is drawn elsewhere", "server_error"))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    async def _models(self, request: web.Request) -> web.Response:
        listed = answers.models(self._answering.model)
        return web.json_response(listed["data"][0] if request.match_info.get("model") else listed)

    async def _session(self, request: web.Request) -> web.Response:
        return web.json_response(plain_trajectory(self._known(request)))

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._known(request), await _json(request)
        session.reward = checked_reward(body.get("reward") if isinstance(body, dict) else None)
        return web.json_response({"session": session.id, "reward": session.reward})

    async def _forget(self, request: web.Request) -> web.Response:
        session = self._known(request)
        if session.leased:
            raise ValueError("this session belongs to a sample of a run, which closes it by itself")
        self.sessions.close(session.id)
        return web.json_response({"session": session.id, "deleted": True})

    async def _health(self, request: web.Request) -> web.Response:
        detail = self._answering.replica.detail
        return web.json_response({"status": detail or "serving"}, status=503 if detail else 200)

    def _known(self, request: web.Request) -> AgentSession:
        session = self.sessions.find(request.match_info["session"])
        if session is None:
            raise LookupError(f"there is no session {request.match_info['session']!r}")
        return session


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None


async def _send(response: web.StreamResponse, value: Any) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def _error(status: int, text: str, kind: str, code: str | None = None) -> web.Response:
    return web.json_response(answers.error(text, kind, code), status=status)
