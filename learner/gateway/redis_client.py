"""A connection to Redis, and whether that Redis may keep a journal: one that would lose what it acknowledged is refused with the setting."""

from __future__ import annotations

import logging
from typing import Any

import redis

_log = logging.getLogger("headrace.gateway.journal")


def connect(url: str) -> Any:
    """Raises ValueError for an address that is none."""
    try:
        return redis.Redis.from_url(url, socket_timeout=15.0, socket_connect_timeout=2.0, health_check_interval=10)
    except ValueError as error:
        raise ValueError(f"journal.url: {url!r} is no address of a Redis ({error}); use redis://HOST:PORT/NUMBER") from None


def must_ask_for_sync(client: Any, url: str) -> bool:
    """Whether appends must ask for a sync. Raises ValueError when this Redis would lose what it acknowledged."""
    try:
        settings = {name: client.config_get(name).get(name, "") for name in ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")}
    except redis.ResponseError as error:
        _log.warning("Redis at %s does not tell its settings (%s): see to appendonly yes, appendfsync always, maxmemory-policy noeviction", url, error)
        return False
    if settings["appendonly"] != "yes":
        raise ValueError(f"journal.url: Redis at {url} has appendonly {settings['appendonly']}, so a restart would lose acknowledged samples; set appendonly yes and appendfsync always")
    if settings["maxmemory"] != "0" and settings["maxmemory-policy"] != "noeviction":
        raise ValueError(f"journal.url: Redis at {url} has maxmemory-policy {settings['maxmemory-policy']} and may throw the journal away; set noeviction")
    if settings["appendfsync"] == "always":
        return False
    version = tuple(int(part) for part in str(client.info("server")["redis_version"]).split(".")[:2])
    if version >= (7, 2):
        return True
    raise ValueError(f"journal.url: Redis {version[0]}.{version[1]} at {url} has appendfsync {settings['appendfsync']}, so a crash would lose acknowledged samples; set appendfsync always (Redis 7.2 and later can wait for the sync instead)")
