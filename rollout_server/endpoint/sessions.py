"""Sessions: whose requests belong to one sample.

A session of a run belongs to a leased sample: the actor opens it, an agent works in it, the actor takes what was said. A session of a
caller's own begins with its first request, is read by its id, and is forgotten when nobody has asked for it in a while.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_server.exchange import Exchange

MAX_ID = 128


@dataclass(kw_only=True, slots=True, eq=False)
class AgentSession:
    """Example: `AgentSession(id="a", exchange=exchange, leased=False)`"""

    id: str
    exchange: Exchange
    leased: bool  # a sample of a run: it is drawn as the run says
    reward: float | None = None  # what the agent said that it earned; None: nothing
    given_up: bool = False  # the replica drains; the sample is drawn elsewhere
    used_s: float = field(default_factory=time.monotonic)


class Sessions:
    """Example: `sessions = Sessions(max_own=1024, idle_s=3600, make=make); session = sessions.of("a")`"""

    def __init__(self, *, max_own: int, idle_s: float, make: Callable[[], Exchange]) -> None:
        """make: an exchange for a caller's own session."""
        self._max_own, self._idle_s, self._make = max_own, idle_s, make
        self._leased: dict[str, AgentSession] = {}
        self._own: OrderedDict[str, AgentSession] = OrderedDict()  # the one used last comes last
        self.num_forgotten = 0

    def open_leased(self, exchange: Exchange) -> AgentSession:
        """Of a leased sample, under an id that nobody can guess."""
        session = AgentSession(id=f"run-{secrets.token_urlsafe(18)}", exchange=exchange, leased=True)
        self._leased[session.id] = session
        return session

    def close(self, session_id: str) -> None:
        """Idempotent."""
        self._leased.pop(session_id, None)
        self._own.pop(session_id, None)

    def find(self, session_id: str) -> AgentSession | None:
        return self._leased.get(session_id) or self._own.get(session_id)

    def of(self, session_id: str) -> AgentSession:
        """The session, begun now where it is a caller's own and new; an empty id: one that nobody else sees. Raises ValueError for an id of a
        leased sample that is over, or one that is too long."""
        found = self.find(session_id)
        if found is None and session_id.startswith("run-"):
            raise ValueError("this session is over: its sample was submitted, or drawn elsewhere")
        if len(session_id) > MAX_ID:
            raise ValueError(f"a session's id of {len(session_id)} characters; at most {MAX_ID}")
        if found is None:
            found = AgentSession(id=session_id, exchange=self._make(), leased=False)
            if session_id:
                self._own[session_id] = found
        found.used_s = time.monotonic()
        if session_id in self._own:
            self._own.move_to_end(session_id)
        self._forget()
        return found

    def _forget(self) -> None:
        while self._own:
            oldest = next(iter(self._own.values()))
            if len(self._own) <= self._max_own and time.monotonic() - oldest.used_s <= self._idle_s:
                return
            del self._own[oldest.id]
            self.num_forgotten += 1
