"""What the gateway must know after a restart beside the account: the trainer on duty, the prompts, the published snapshots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from learner.gateway.account import Record
from learner.gateway.duty import Post

KEPT_PUBLICATIONS = 2
TYPES = frozenset({"registered", "assembled", "prompts", "cut_asked", "payload"})  # records that are the gateway's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Where a published version lies. Example: version 7 of step 6 in /dev/shm/headrace-r1/1733-6"""

    version: int
    lineage: int
    policy_step: int
    snapshot_dir: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Changed only by records, like the account. Example: `Standing().apply({"type": "prompts", "fingerprint": "0f"})`"""

    post: Post | None = None
    assembled: bool = False  # all ranks of the post have reported
    fingerprint: str = ""  # of the prompts that fit; empty: not rendered yet
    published: tuple[Publication, ...] = ()  # the newest last

    def apply(self, record: Record) -> Standing:
        """After a record; the account's own kinds change nothing, but for `published` and `continued`."""
        match record["type"]:
            case "registered":
                return replace(self, post=Post.from_record(record), assembled=False)
            case "assembled":
                return replace(self, assembled=True)
            case "prompts":
                return replace(self, fingerprint=record["fingerprint"])
            case "continued":
                return replace(self, post=None, assembled=False, published=())
            case "published":
                new = Publication(version=record["version"], lineage=record["lineage"], policy_step=record["step"], snapshot_dir=record["snapshot_dir"])
                return replace(self, published=(*self.published, new)[-KEPT_PUBLICATIONS:])
        return self

    def to_state(self) -> dict[str, Any]:
        """Msgpack-able; `from_state` makes an equal one."""
        return {
            "post": self.post.to_record() if self.post else None,
            "assembled": self.assembled,
            "fingerprint": self.fingerprint,
            "published": [[p.version, p.lineage, p.policy_step, p.snapshot_dir] for p in self.published],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Standing:
        published = (Publication(version=v, lineage=lineage, policy_step=step, snapshot_dir=folder) for v, lineage, step, folder in state["published"])
        post = Post.from_record(state["post"]) if state["post"] else None
        return cls(post=post, assembled=state["assembled"], fingerprint=state["fingerprint"], published=tuple(published))
