"""Asking an HTTP endpoint: one POST a batch, its answer read up to a bound.

`HttpClient` is the seam for everything that is asked over HTTP: it speaks bytes and raises `Failed`, and knows no schema.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from reward_server.endpoints import schema
from reward_server.endpoints.failures import Failed, of_status
from reward_server.endpoints.waiting import Call
from reward_server.outcome import Outcome

MAX_ANSWER_BYTES = 16 << 20
_ERROR_BYTES = 300  # of an error's body that are shown
_CONTENT_TYPES = {"json": "application/json", "msgpack": "application/msgpack"}
TIMEOUT_HEADER = "Headrace-Timeout-Ms"  # how long the asker waits, so that the other side need not work longer


class HttpClient:
    """POSTs bodies. Connections are kept; how many there are is the endpoint's concurrency. Made outside a loop, used on one.

    Example: `body = await HttpClient(token="s3cret").post("http://127.0.0.1:9000/score", b"{}", content_type="application/json", limit_s=5.0)`
    """

    def __init__(self, *, token: str = "", headers: Mapping[str, str] | None = None, ca: Path | None = None) -> None:
        self._token = token
        self._headers = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        self._tls = ssl.create_default_context(cafile=str(ca)) if ca is not None else True
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, *, content_type: str, limit_s: float) -> bytes:
        """The body of a 200 answer. Raises Failed for everything else. The limit itself is the caller's: it only tells the other side."""
        headers = {"Content-Type": content_type, TIMEOUT_HEADER: str(max(1, int(1000 * limit_s)))}
        try:
            async with self._opened().post(url, data=body, headers=headers, allow_redirects=False, ssl=self._tls) as response:
                if response.status != 200:
                    text = (await response.content.read(_ERROR_BYTES)).decode(errors="replace")
                    raise of_status(response.status, self._without_token(" ".join(text.split())), response.headers.get("Retry-After"), time.time())
                return await _read(response)
        except aiohttp.ClientConnectorCertificateError as error:
            raise Failed("refused", f"{url} cannot be trusted: {error.certificate_error}", is_retryable=False) from None
        except aiohttp.InvalidURL:
            raise Failed("refused", f"{url} is no URL", is_retryable=False) from None
        except (aiohttp.ClientError, OSError) as error:
            words = self._without_token(str(error)) or type(error).__name__
            raise Failed("unavailable", f"{url}: {words}", is_retryable=True, is_ailing=True) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The endpoint bounds connections and time; aiohttp's own limits would be a second, hidden set.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
        return self._session

    def _without_token(self, text: str) -> str:
        """Other sides may echo what they were sent, and details go to logs."""
        return text.replace(self._token, "***") if self._token else text


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            raise Failed("error", f"the answer is larger than {MAX_ANSWER_BYTES} bytes", is_retryable=False)
    return bytes(data)


class HttpDialect:
    """The documented schema over HTTP."""

    def __init__(self, client: HttpClient, form: schema.Format) -> None:
        self._client = client
        self._form = form

    async def ask(self, address: str, calls: Sequence[Call], limit_s: float) -> list[Outcome]:
        """See Dialect."""
        body = await self._client.post(address, schema.encode(calls, self._form), content_type=_CONTENT_TYPES[self._form], limit_s=limit_s)
        return schema.decode(body, len(calls), self._form)

    async def close(self) -> None:
        await self._client.close()
        await asyncio.sleep(0)  # TLS connections end in the loop's next round
