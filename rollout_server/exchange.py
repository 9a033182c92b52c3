"""What one sample and the policy say to each other: messages in, an answer out, every token kept.

An environment's loop and an agent's session both work with this; they differ only in who makes the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_server.conversation import Conversation
from rollout_server.dialogue import Asked, Dialogue, Message
from rollout_server.engine import Finish
from rollout_server.leased_draw import Draw, Watch
from rollout_server.tokens import Tokens
from rollout_server.usable import unusable_reason


class OutOfRoom(Exception):
    """A prompt leaves no room for a token: the conversation has outgrown its context."""


class GivenUp(Exception):
    """The replica drains: the sample is drawn elsewhere, from its beginning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One answer. Example: Reply(asked=asked, ids=(7, 2), logprobs=(-0.1, -0.7), text="seven", finish="stop", turn=0)"""

    asked: Asked
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish
    turn: int


class Exchange:
    """Example: `exchange = Exchange(tokens, draw=draw, room_tokens=256, template=True); reply = await exchange.answer([{"role": "user", "content": "3*4"}])`"""

    def __init__(self, tokens: Tokens, *, draw: Draw, room_tokens: int, template: bool) -> None:
        """room_tokens: of prompt and answer together, in any context."""
        self.conversation = Conversation()
        self.unusable = ""  # why no answer of it may be trained on
        self.is_cut = False  # an answer or a prompt met the end of the room
        self.is_refused = False  # the newest prompt left no room for an answer
        self.messages: tuple[Message, ...] = ()  # of the latest answer: all that came before it, and itself
        self._tokens = tokens
        self._dialogue = Dialogue(tokens, template=template)
        self._draw = draw
        self._room_tokens = room_tokens
        self._num_asked = 0

    def ask(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Asked:
        """The prompt that `answer` would draw after. Raises ValueError, OutOfRoom."""
        return self._with_room(self._dialogue.ask(messages, tools))

    def ask_completion(self, prompt: str | tuple[int, ...]) -> Asked:
        """The same for a text to go on from, or for ids. Raises ValueError, OutOfRoom."""
        if isinstance(prompt, str):
            return self._with_room(self._dialogue.ask_text(prompt))
        return self._with_room(Asked(messages=(), rendered=(), tools=None, text="", ids=prompt, goes_on=False))

    def _with_room(self, asked: Asked) -> Asked:
        self.is_refused = len(asked.ids) >= self._room_tokens
        if self.is_refused:
            self.is_cut = True
            raise OutOfRoom(f"the prompt is {len(asked.ids)} tokens, and {self._room_tokens} must hold them and an answer; in a run a sample has its leased prompt and sampling.max_new_tokens in all")
        return asked

    async def answer(
        self, asked: Asked, *, max_tokens: int | None = None, watch: Watch | None = None, message: Callable[[str], Message] | None = None, draw: Draw | None = None
    ) -> Reply:
        """Draws after a prompt. message: what the caller gets for an answer's text, by which the answer is known when it comes back; draw: in
        place of the exchange's own.

        Raises GivenUp, EngineUnavailableError, and ValueError for a prompt that the engine refuses.
        """
        room = self._room_tokens - len(asked.ids)
        turn, self._num_asked = self._num_asked, self._num_asked + 1
        last = await (draw or self._draw)(asked.ids, turn=turn, max_new_tokens=min(room, max_tokens or room), watch=watch)
        if last is None or last.finish == "abort" or last.finish is None:
            raise GivenUp
        self.is_cut = self.is_cut or (last.finish == "length" and len(last.token_ids) >= room)
        self.unusable = self.unusable or unusable_reason(last.token_ids, last.logprobs, num_known=self._tokens.size)
        logprobs = tuple(float(value) for value in last.logprobs)
        number = self.conversation.answer(asked.ids, ids=last.token_ids, logprobs=logprobs, spans=last.spans)
        text = self._tokens.text(last.token_ids)
        said = {"role": "assistant", "content": text} if message is None else message(text)
        self._dialogue.answered(asked, last.token_ids, said)
        self.messages = (*(asked.messages or ({"role": "user", "content": asked.text},)), said)
        return Reply(asked=asked, ids=tuple(last.token_ids), logprobs=logprobs, text=text, finish=last.finish, turn=number)

