"""Reads the raw journal of the `redis` backend: the stream `headrace:{RUN}:journal`.

An entry's id is EPOCH-N, N counting from 1 in each epoch; its fields are `r` (the record as msgpack), `p` (the payload) and `c` (CRC-32 of
both, in decimal).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import msgpack

from deploy.audit.entry import DAMAGED, Entry
from deploy.audit.findings import Findings

_PAGE = 512


def connect(url: str) -> Any:
    """A client that has been answered. Raises ValueError when there is no Redis."""
    import redis

    client = redis.Redis.from_url(url, socket_timeout=15.0, socket_connect_timeout=5.0)
    try:
        client.ping()
    except redis.RedisError as error:
        raise ValueError(f"journal.url: no Redis answers at {url} ({error}); the journal of this run is kept there: start it, then audit") from None
    return client


def key_of(run_id: str) -> str:
    return f"headrace:{{{run_id}}}:journal"


def beginning(client: Any, run_id: str) -> tuple[str, bool]:
    """The first entry that is there, and whether it is the run's first. Raises ValueError for a run without a journal there."""
    if not client.exists(key_of(run_id)):
        raise ValueError(f"{key_of(run_id)}: is not in this Redis; give the folder of a run that has begun")
    stream = client.xinfo_stream(key_of(run_id))
    first = stream["first-entry"][0].decode() if stream["first-entry"] else "1-1"
    if "entries-added" not in stream:  # Redis before 7.0
        return first, first.endswith("-1")
    return first, first == "1-1" or stream["entries-added"] == stream["length"]


def read(client: Any, run_id: str, findings: Findings) -> Iterator[Entry]:
    """All entries in order; one that is damaged is a finding and left out, so is a gap."""
    name, start, before = key_of(run_id), "-", (0, 0)
    while page := client.xrange(name, start, "+", count=_PAGE):
        for raw, fields in page:
            epoch, number = (int(part) for part in raw.split(b"-"))
            where = f"{name} entry {epoch}-{number}"
            follows = before[0] != epoch or before[1] + 1 == number
            findings.must(follows, DAMAGED, where, f"follows {before[0]}-{before[1]}: {number - before[1] - 1} entries between them are gone")
            before = (epoch, number)
            body, payload = fields.get(b"r", b""), fields.get(b"p", b"")
            same = fields.get(b"c") == str(zlib.crc32(payload, zlib.crc32(body))).encode()
            if findings.must(same, DAMAGED, where, "the checksum does not match"):
                yield Entry(position=before, where=where, record=msgpack.unpackb(body, strict_map_key=False), payload=payload)
        start = f"({before[0]}-{before[1]}"
