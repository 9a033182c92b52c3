"""One request from its messages to its answer, streamed or whole.

    answer      consumes a request, produces the answer,  waits for the engine
    streamed    consumes tokens as they are drawn, produces texts that may be said; the end of a text that may still become a stop is held back
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.dialogue import Asked, Message
from rollout_server.endpoint import answers, tools
from rollout_server.endpoint.answers import Said
from rollout_server.endpoint.requests import Wanted
from rollout_server.endpoint.sessions import AgentSession
from rollout_server.engine import Delta, EngineUnavailableError
from rollout_server.exchange import GivenUp, Reply
from rollout_server.leased_draw import Watch, drawn
from rollout_server.replica import Replica
from rollout_server.tokens import Tokens

KEPT_IDS = 32


class Stops:
    """Watches the text of an answer for its stops. Example: `stops = Stops(tokens, ("\\n",)); stops(ids, logprobs)` is the number of tokens once one is there."""

    def __init__(self, tokens: Tokens, stops: Sequence[str], said: asyncio.Queue[str] | None = None) -> None:
        self._stops, self._said_to = stops, said
        self._text = Growing(tokens)
        self._num_ids = self._num_said = 0
        self._longest = max((len(stop) for stop in stops), default=1)

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float]) -> int | None:
        for token in ids:
            self._num_ids += 1
            text = self._text.with_one(token)
            if any(stop in text for stop in self._stops):
                self._say(before_stop(text, self._stops))
                return self._num_ids
        self._say(self._text.whole[: -(self._longest - 1) or None].rstrip("�"))
        return None

    def _say(self, text: str) -> None:
        if self._said_to is not None and len(text) > self._num_said:
            self._said_to.put_nowait(text[self._num_said :])
            self._num_said = len(text)

    def rest(self, text: str) -> str:
        """What of the whole text has not been said yet."""
        return text[self._num_said :]


class Growing:
    """The text of ids that come one by one, of which only the last few are decoded again. Example: `text = Growing(tokens); text.with_one(5); text.whole`"""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._ids: list[int] = []  # the last ones
        self._before = ""  # text of all before them
        self.whole = ""

    def with_one(self, token: int) -> str:
        """The whole text with one token more."""
        self._ids.append(token)
        last = self._tokens.text(self._ids)
        self.whole = self._before + last
        if len(self._ids) > 2 * KEPT_IDS:
            tail = self._tokens.text(self._ids[-KEPT_IDS:])
            if last.endswith(tail) and not tail.startswith("�"):  # the cut lies between two characters
                self._before, self._ids = self._before + last[: len(last) - len(tail)], self._ids[-KEPT_IDS:]
        return self.whole


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to its first stop."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Answering:
    """Answers requests by one replica."""

    replica: Replica
    tokens: Tokens
    model: str
    tool_parser: str
    stop_token_ids: tuple[int, ...]  # that end an answer outside of a run
    serial: itertools.count[int]

    def asked(self, session: AgentSession, wanted: Wanted) -> Asked:
        """Raises ValueError, OutOfRoom, EngineUnavailableError."""
        if not self.replica.life:
            raise EngineUnavailableError(self.replica.detail)
        return session.exchange.ask(wanted.messages, wanted.tools) if wanted.messages else session.exchange.ask_completion(wanted.prompt)

    async def answer(self, session: AgentSession, wanted: Wanted, asked: Asked, answer_id: str, watch: Stops | None = None) -> Said:
        """Raises GivenUp, EngineUnavailableError, ValueError."""
        stops = watch or (Stops(self.tokens, wanted.stops) if wanted.stops else None)
        own = None if session.leased else _OwnDraw(self.replica, wanted, self.stop_token_ids, self.serial)

        def message(text: str) -> Message:
            return answers.message(*tools.parse(before_stop(text, wanted.stops), self._parser(wanted)), answer_id)

        try:
            reply = await session.exchange.answer(asked, max_tokens=wanted.max_tokens, watch=stops, message=message, draw=own)
        except GivenUp:
            session.given_up = True
            raise
        return self._said(session, wanted, reply, answer_id)

    async def streamed(self, session: AgentSession, wanted: Wanted, asked: Asked, answer_id: str) -> AsyncGenerator[str | Said, None]:
        """Texts as they are drawn, last the whole answer. With tools the text comes whole: where it ends and a call begins is known at its end only."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        stops = Stops(self.tokens, wanted.stops, None if wanted.tools else queue)
        task = asyncio.ensure_future(self.answer(session, wanted, asked, answer_id, watch=stops))
        try:
            while not task.done() or not queue.empty():
                waiting = asyncio.ensure_future(queue.get())
                await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
                else:
                    waiting.cancel()
            said = task.result()
            if rest := stops.rest(said.text):
                yield rest
            yield said
        finally:
            task.cancel()

    def _parser(self, wanted: Wanted) -> str:
        return self.tool_parser if wanted.tools else "none"

    def _said(self, session: AgentSession, wanted: Wanted, reply: Reply, answer_id: str) -> Said:
        text, calls = tools.parse(before_stop(reply.text, wanted.stops), self._parser(wanted))
        return Said(
            id=answer_id, created=int(time.time()), model=self.model, text=text, calls=calls, finish="tool_calls" if calls else reply.finish, num_prompt=len(reply.asked.ids),
            num_drawn=len(reply.ids), pieces=[(self.tokens.piece(token), value) for token, value in zip(reply.ids, reply.logprobs, strict=True)] if wanted.logprobs else (),
            extra={"session": session.id, "turn": reply.turn, "goes_on": reply.asked.goes_on},
        )  # fmt: skip


class _OwnDraw:
    """Answers outside of a run, as the request says. A Draw."""

    def __init__(self, replica: Replica, wanted: Wanted, stop_token_ids: tuple[int, ...], serial: itertools.count[int]) -> None:
        self._replica, self._wanted, self._stop_token_ids, self._serial = replica, wanted, stop_token_ids, serial

    async def __call__(self, prompt_ids: Sequence[int], *, turn: int, max_new_tokens: int, watch: Watch | None = None) -> Delta | None:
        number = next(self._serial)
        spec = self._wanted.spec(max_new_tokens, self._stop_token_ids, seed=time.time_ns() % 2**62 ^ number)
        last = await drawn(self._replica, prompt_ids, spec, f"openai-{number}", watch)
        return None if last.finish == "abort" else last


def plain_trajectory(session: AgentSession) -> dict[str, Any]:
    """What a session holds, as JSON: token ids, log-probs, masks and versions of every strand, and where its turns lie."""
    conversation = session.exchange.conversation
    return {
        "session": session.id,
        "reward": session.reward,
        "unusable_reason": session.exchange.unusable,
        "strands": [
            {
                "prompt_ids": strand.prompt_ids, "completion_ids": strand.ids, "logprobs": strand.logprobs, "loss_mask": strand.mask,
                "spans": [{"version": span.version, "start": span.start, "end": span.end} for span in strand.spans],
            }
            for strand in conversation.strands
        ],
        "turns": [{"strand": turn.strand, "start": turn.start, "end": turn.end, "reward": turn.reward} for turn in conversation.turns],
    }  # fmt: skip
