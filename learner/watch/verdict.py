"""What holds a run back, in words: generation, reward, learner, network, disk, or one replica. Pure.

Causes that stop work outright come first; of those that only share out the time, the one that most of it goes to. Every verdict carries
its evidence, and further causes that hold as well are told after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from learner.alarm_config import AlarmConfig
from learner.watch.picture import Picture

SYNC_SHARE = 0.3  # of the time that the journal waits for its disk, from which on everything waits with it
LOAD_SHARE = 0.5  # of a replica's time that goes into getting weights
LOAD_S = 1.0  # of one transfer, below which it is no matter how often it happens


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One thing that holds the run back. Example: `Cause(kind="reward-bound", why="...", do="...")`"""

    kind: str  # generation-bound, reward-bound, learner-bound, network, disk, stalled replica X, stale replica X, nothing stands out
    why: str  # with its numbers
    do: str


def causes(picture: Picture, config: AlarmConfig) -> tuple[Cause, ...]:
    """The verdict first, then what holds as well; at least one."""
    found = [*_disk(picture, config), *_replicas(picture, config), *_network(picture), *_reward(picture, config), *_shares(picture, config)]
    return tuple(found) or (
        Cause(kind="nothing stands out", why=f"over {picture.over_s:.0f} s neither side waited for the other for long{_waits(picture)}", do="look at the figures of the alarm itself"),
    )


def _disk(picture: Picture, config: AlarmConfig) -> Iterator[Cause]:
    if picture.journal_full:
        yield Cause(kind="disk", why="the journal is full, and no cut could be made that would let it forget", do="`headrace status` says which save failed and why; make room there")
    if picture.disk_free_share is not None and picture.disk_free_share < config.disk_free_share:
        yield Cause(kind="disk", why=f"{picture.disk_free_share:.1%} of the run folder's disk is free", do="make room: fewer checkpoint.keep, other files; until then training may wait, and nothing is lost")
    if picture.sync_s is not None and picture.sync_share is not None and picture.sync_s > config.sync_s and picture.sync_share > SYNC_SHARE:
        yield Cause(
            kind="disk",
            why=f"a sync of the journal takes {picture.sync_s:.2f} s in the mean and {picture.sync_share:.0%} of the time: leases, receipts and batches wait for it",
            do="see who else writes to that disk; move run_dir to a local SSD, or use journal.backend=redis",
        )


def _replicas(picture: Picture, config: AlarmConfig) -> Iterator[Cause]:
    for replica in picture.replicas:
        if replica.stalled_s > config.stalled_s:
            what = f"was last heard of {replica.stalled_s:.0f} s ago and did not say goodbye" if replica.state == "gone" else f"has {replica.num_running} requests and drew no token for {replica.stalled_s:.0f} s"
            yield Cause(kind=f"stalled replica {replica.name}", why=f"it {what}", do="its stacks and its log say where it hangs; its groups are lent again once it is silent, end it and start it anew")
    for replica in picture.replicas:
        if replica.state == "stale":
            yield Cause(kind=f"stale replica {replica.name}", why="an update failed after its weights were touched, and it serves nothing until a full one", do="its log names the tensor or the transfer that failed; restart it if the next version does not mend it")


def _network(picture: Picture) -> Iterator[Cause]:
    if picture.failed_pushes * picture.over_s >= 2:
        yield Cause(kind="network", why=f"{picture.failed_pushes * picture.over_s:.0f} pushes of weights to replicas failed in {picture.over_s:.0f} s", do="pushes.jsonl has the outcome of each; look at the network between learner and replicas, and at push.* deadlines")
    if picture.load_s is not None and picture.load_share is not None and picture.load_s > LOAD_S and picture.load_share > LOAD_SHARE:
        yield Cause(kind="network", why=f"a replica spends {picture.load_share:.0%} of its time getting weights, {picture.load_s:.1f} s a version", do="push over a faster network, let replicas fetch from peers (rollout.peers), or make longer steps")


def _reward(picture: Picture, config: AlarmConfig) -> Iterator[Cause]:
    scoring, drawing, unscored = picture.scoring or 0.0, picture.drawing or 0.0, picture.unscored_share or 0.0
    waits = (picture.waiting_share or 0.0) > config.waiting_share
    if waits and scoring > drawing and (picture.idle_share or 0.0) > config.idle_share:
        yield Cause(
            kind="reward-bound",
            why=f"{scoring:.1f} samples at a time wait for their score and {drawing:.1f} are being drawn, while replicas are idle {picture.idle_share or 0:.0%} of the time{_waits(picture)}",
            do="more reward servers or workers, a faster scorer, a cache; `headrace_reward_*` say which scorer",
        )
    elif unscored > config.unscored_share:
        yield Cause(kind="reward-bound", why=f"{unscored:.0%} of the samples get no score", do="headrace_reward_answers_total by outcome: timeout, breaker_open, unavailable, error")


def _shares(picture: Picture, config: AlarmConfig) -> Iterator[Cause]:
    waiting, idle = picture.waiting_share, picture.idle_share
    reward = any(True for _ in _reward(picture, config))
    if waiting is not None and waiting > config.waiting_share and not reward:
        yield Cause(
            kind="generation-bound",
            why=f"the trainer waited {waiting:.0%} of the time, {picture.drawing or 0:.1f} samples at a time are being drawn and {picture.scoring or 0:.1f} wait for their score",
            do="more replicas, a larger staleness bound, shorter completions, or fewer GPUs for the learner",
        )
    elif waiting is not None and idle is not None and waiting <= config.waiting_share and idle > config.idle_share:
        yield Cause(kind="learner-bound", why=f"replicas had nothing to draw {idle:.0%} of the time{_waits(picture)}", do="more GPUs for the learner, longer packed rows, fewer replicas, or a larger staleness bound if training bears it")


def _waits(picture: Picture) -> str:
    return "" if picture.waiting_share is None else f"; the trainer waited {picture.waiting_share:.0%} of the time"
