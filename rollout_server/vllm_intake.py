"""The front end's side of columns: each step's tokens go straight to the requests that wait for them.

    arrived    consumes messages of the engine's process, produces tokens,   waits for nothing (called by vLLM's socket task)
    take       consumes one request's tokens,  waits for a delta to be due,  unblocked by the last token, the interval or the engine's end

vLLM's output processor is passed by: no object a token, no text, no task woken for every token. A stream's deltas lie at least
`interval_s` apart, first and last token excepted, and further where very many run; a request without stream is woken once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_server.engine import EngineUnavailableError, Finish
from rollout_server.vllm_accounting import Accounting
from rollout_server.vllm_columns import ENDS, HANDLE, MARK, NO_TOKEN, rows_of

MESSAGES_PER_S = 2500  # of all streams together, first and last ones excepted: about a quarter of a core of grpc.aio


@dataclass(kw_only=True, slots=True, eq=False)
class Stream:
    """One request in columns: what has arrived and was not taken."""

    name: str  # our id, as in Accounting
    engine_id: str  # vLLM's
    streaming: bool  # False: only the whole completion is wanted
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""  # a word of ENDS; empty: it goes on
    error: str = ""  # why the engine is gone
    due_s: float = 0.0  # loop time before which the next delta waits
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self) -> tuple[list[int], list[float], Finish | None]:
        """Waits until a delta is due; (ids, log-probs, finish or None). Raises EngineUnavailableError when the engine dies or gives the request up."""
        await self.ready.wait()
        self.ready.clear()
        if self.error:
            raise EngineUnavailableError(self.error)
        taken, self.ids, self.logprobs = (self.ids, self.logprobs), [], []
        match self.end:
            case "":
                return *taken, None
            case "stop" | "length" | "abort" as finish:
                return *taken, finish
        raise EngineUnavailableError(f"vLLM ended the request with {self.end!r}")


class Intake(Accounting):
    """Accounting that also hands out what comes in columns. `interval_s`: least time between two deltas of a stream."""

    def __init__(self, engine: Any, *, interval_s: float) -> None:
        super().__init__(engine)
        self._engine = engine
        self._interval_s = interval_s
        self._serial = itertools.count(1)
        self._streams: dict[int, Stream] = {}  # by handle
        self._by_id: dict[str, int] = {}  # handle by vLLM's id
        self._ticking: asyncio.TimerHandle | None = None

    async def open(self, name: str, prompt: dict[str, Any], parameters: Any, *, streaming: bool) -> Stream:
        """Gives one request to the engine. Raises what vLLM raises for a request that it refuses."""
        handle = next(self._serial)
        parameters.extra_args = {**(parameters.extra_args or {}), HANDLE: handle}
        tasks = await self._engine.get_supported_tasks()
        request = self._engine.input_processor.process_inputs(f"{name}/{handle}", {"type": "token", **prompt}, parameters, supported_tasks=tasks)
        request.external_req_id = name
        stream = Stream(name=name, engine_id=request.request_id, streaming=streaming)
        self._streams[handle], self._by_id[stream.engine_id] = stream, handle
        self.admit(name, stream.engine_id)
        try:
            await self._engine.engine_core.add_request_async(request)
        except BaseException:  # a cancelled task among them: the engine may have got it all the same
            await self.close(stream)
            raise
        return stream

    async def close(self, stream: Stream) -> None:
        """The caller has what it wants; what still runs is aborted in the engine."""
        runs = stream.engine_id in self._by_id
        self._leave(stream)
        if runs and not stream.error:
            await self._engine.engine_core.abort_requests_async([stream.engine_id])

    async def abort(self, name: str) -> None:
        """Its stream ends with "abort" and the tokens so far; unknown names are ignored."""
        for stream in [stream for stream in self._streams.values() if stream.name == name]:
            self._end(stream, "abort")
            await self._engine.engine_core.abort_requests_async([stream.engine_id])

    def seen(self, request_id: str, start: int) -> tuple[list[int], list[float]] | None:
        """As Accounting's; of a request without stream, whose tokens stay here until its end."""
        stream = self._streams.get(self._by_id.get(self._ids.get(request_id, ""), 0))
        if stream is None:
            return super().seen(request_id, start)
        return (stream.ids[start:], stream.logprobs[start:]) if not stream.streaming and len(stream.ids) > start else None

    def arrived(self, outputs: Any) -> bool:
        if isinstance(outputs, BaseException):
            self.fail(f"the engine's process is gone: {type(outputs).__name__}: {outputs}")
            return True
        rest = []
        for output in outputs.outputs:
            if output.request_id == MARK:
                self._count_events(output)
                self._step(output.new_logprobs)
            elif (handle := self._by_id.get(output.request_id)) is not None:  # it ended outside a step: aborted by a pause, refused, in error
                self._end(self._streams[handle], str(output.finish_reason))
            else:
                rest.append(output)
        self.num_steps += bool(outputs.outputs) and not rest
        outputs.outputs = rest
        # What is of no request of vLLM's front end is not queued for it: its handler runs only once it has had a request, and nobody else reads.
        return super().arrived(outputs) and bool(rest)

    def _step(self, columns: Sequence[Any]) -> None:
        """One step's rows, to the streams that still want them."""
        streams, now_s, interval_s = self._streams, asyncio.get_running_loop().time(), self._between_deltas_s()
        for handle, token, logprob, end in rows_of(*columns[:3]):
            stream = streams.get(handle)
            if stream is None:
                continue  # given up meanwhile
            if token != NO_TOKEN:
                stream.ids.append(token)
                stream.logprobs.append(logprob)
                self._count(stream.name, 1, ended=False)
            if end:
                self._end(stream, ENDS[end])
            elif stream.streaming and now_s >= stream.due_s:
                stream.due_s = now_s + interval_s
                stream.ready.set()
        if self._ticking is None and self._interval_s:
            self._tick()

    def _between_deltas_s(self) -> float:
        """The interval, or longer where so many run that their messages alone would fill this process."""
        return max(self._interval_s, len(self._streams) / MESSAGES_PER_S) if self._interval_s else 0.0

    def _tick(self) -> None:
        """What waits for its interval while no step comes (a pause) is handed out all the same."""
        waiting = [stream for stream in self._streams.values() if stream.streaming]
        loop = asyncio.get_running_loop()
        for stream in waiting:
            if stream.ids and loop.time() >= stream.due_s:
                stream.due_s = loop.time() + self._between_deltas_s()
                stream.ready.set()
        self._ticking = loop.call_later(self._interval_s, self._tick) if waiting else None

    def _end(self, stream: Stream, end: str) -> None:
        stream.end = stream.end or end
        self._leave(stream)
        stream.ready.set()

    def _leave(self, stream: Stream) -> None:
        """From here on nothing more is taken for it."""
        self._streams.pop(self._by_id.pop(stream.engine_id, 0), None)
        self._settle(stream.name)

    def fail(self, why: str) -> None:
        for stream in list(self._streams.values()):
            stream.error = why
            stream.ready.set()
