"""Samples of several turns: the environment speaks, the policy answers, until one of them is done or there is no room.

    play     consumes a task, produces what was said; waits for a place in the environment, its answers (with deadlines), the engine's answers

Whatever an environment does, the sample ends: played, cut, or failed by a typed reason. Its session is closed on every path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_server.conversation import Conversation
from rollout_server.dialogue import Message
from rollout_server.endpoint.sessions import Sessions
from rollout_server.environment_config import EnvironmentConfig
from rollout_server.environments.host import Host, Session
from rollout_server.environments.interface import Action, EnvironmentFailure, Task
from rollout_server.exchange import Exchange, GivenUp, OutOfRoom
from rollout_server.leased_draw import Draw
from rollout_server.played import Played
from rollout_server.tokens import Tokens

logger = logging.getLogger("headrace.rollout.episodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An environment and where its sessions come from."""

    config: EnvironmentConfig
    host: Host


class Agents(Protocol):
    """Where agents find the model (endpoint/app.py)."""

    sessions: Sessions

    @property
    def api_key(self) -> str: ...

    def url(self, session_id: str = "") -> str: ...


class Episodes:
    """Example: `episodes = Episodes([Place(config=config, host=host)], tokens); played = await episodes.play("calculator", task, draw=draw, room_tokens=256, may_begin=lambda: True)`"""

    def __init__(self, places: Sequence[Place], tokens: Tokens, *, agents: Agents | None = None) -> None:
        """agents: where programs that call the model find it; needed where an environment is one."""
        self.places = {place.config.name: place for place in places}
        self._tokens = tokens
        self._agents = agents

    def chosen(self, fields: Mapping[str, Any]) -> str | None:
        """Name of the environment that a record's samples are played in; None: it is asked once, without any."""
        if not self.places:
            return None
        said = fields.get("environment")
        if said is None:
            return next(iter(self.places)) if len(self.places) == 1 else None
        return str(said) or None

    async def check(self) -> None:
        """Raises ValueError in one line for an environment that could never play."""
        for place in self.places.values():
            await place.host.check()

    def tally(self) -> dict[tuple[str, str], int]:
        """Sessions by environment and how they ended."""
        return {(name, end): count for name, place in self.places.items() for end, count in place.host.tally.items()}

    async def stop(self) -> None:
        await asyncio.gather(*(place.host.stop() for place in self.places.values()))

    async def play(self, name: str, task: Task, *, draw: Draw, room_tokens: int, may_begin: Callable[[], bool]) -> Played:
        """The whole sample. may_begin: asked once there is a place for it. Raises GivenUp, EngineUnavailableError and ValueError of the engine; an environment's failure is in what was played."""
        place = self.places.get(name)
        if place is None:
            known = ", ".join(self.places)
            return Played(conversation=Conversation(), environment=name, is_cut=False, messages=(), failure=EnvironmentFailure("unknown", f"the record names the environment {name!r}; configured are {known}"))
        exchange = Exchange(self._tokens, draw=draw, room_tokens=room_tokens, template=place.config.template == "chat")
        if place.config.agent:
            return await self._work(place, task, exchange, may_begin)
        said = _Said(exchange)
        failure, session = None, None
        try:
            session = await place.host.open()
            if not may_begin():
                raise GivenUp
            await self._turns(session, place.config, task, said)
        except EnvironmentFailure as error:
            failure = error
            logger.info("environment %s: %s", name, error)
        finally:
            if session is not None:
                await asyncio.shield(session.close())
        conversation = exchange.conversation
        given = conversation.reward_sum
        reward = place.config.unfinished_reward if given is None and said.is_cut else given
        return Played(
            conversation=conversation, environment=name, is_cut=said.is_cut, messages=tuple(said.messages), reward=None if failure else reward, parts=said.parts,
            failure=failure, unusable=exchange.unusable,
        )  # fmt: skip

    async def _work(self, place: Place, task: Task, exchange: Exchange, may_begin: Callable[[], bool]) -> Played:
        """A sample that a program of its own works on, calling the model as it likes."""
        assert self._agents is not None, "the configuration asks for an endpoint where there are agents"
        name, failure, earned, hosted = place.config.name, None, None, None
        session = self._agents.sessions.open_leased(exchange)
        try:
            hosted = await place.host.open()
            if not may_begin():
                raise GivenUp
            earned = await hosted.run(task, self._agents.url(session.id), self._agents.api_key)
        except EnvironmentFailure as error:
            if error.reason != "error" or not exchange.is_refused:  # one that ends by the refusal of what outgrew its room is cut there
                failure = error
            logger.info("agent %s: %s", name, error)
        finally:
            self._agents.sessions.close(session.id)
            if hosted is not None:
                await asyncio.shield(hosted.close())
        if session.given_up:
            raise GivenUp
        reward = session.reward if earned is None else earned
        if reward is None and exchange.is_cut:
            reward = place.config.unfinished_reward
        return Played(
            conversation=exchange.conversation, environment=name, is_cut=exchange.is_cut, messages=exchange.messages, reward=None if failure else reward, failure=failure,
            unusable=exchange.unusable,
        )  # fmt: skip

    async def _turns(self, session: Session, config: EnvironmentConfig, task: Task, said: _Said) -> None:
        said.messages += await session.reset(task)
        exchange = said.exchange
        while True:
            try:
                asked = exchange.ask(said.messages)
            except OutOfRoom:
                said.is_cut = True
                return
            except ValueError as error:  # the template's refusal of what the environment said
                raise EnvironmentFailure("bad_answer", str(error)) from None
            reply = await exchange.answer(asked, max_tokens=config.max_turn_tokens)
            said.messages.append({"role": "assistant", "content": reply.text})
            step = await session.step(Action(text=reply.text, turn=reply.turn, cut=reply.finish == "length"))
            if step.reward is not None:
                exchange.conversation.reward(reply.turn, step.reward)
            said.parts |= step.parts
            if step.done:
                return
            if exchange.is_cut or reply.turn + 1 >= config.max_turns:
                said.is_cut = True
                return
            said.messages += step.observation  # type: ignore[arg-type]  # a checked step's observation is messages


class _Said:
    """All that was said so far, and how it ended."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.messages: list[Message] = []
        self.parts: dict[str, float] = {}
        self.is_cut = False
