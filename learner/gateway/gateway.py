"""One gateway, wired: the account and its journal, the two services on one port, and the loops that watch clocks.

    watch (attendance)   ends silent replicas          watch (leases)   ends lapsed leases
    _load_prompts        renders the prompts once      run              waits for the first reason to end
    run (lookout)        alarms and their diagnoses
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from learner.config import LearnerConfig
from learner.gateway import catalog, cuts, evaluation_prompts, founding, prompts, wire
from learner.gateway.attendance import Attendance
from learner.gateway.batches import Batches
from learner.gateway.books import Books
from learner.gateway.clock import RunClock
from learner.gateway.counters import PushCounters, StepClock
from learner.gateway.deltas import Deltas
from learner.gateway.evaluation_desk import EvaluationDesk
from learner.gateway.feed import Feed
from learner.gateway.feed_servicer import FeedServicer, add_to_server
from learner.gateway.fetches import Fetches
from learner.gateway.handshake import Identity
from learner.gateway.journals import open_journal
from learner.gateway.last_step import LastStep
from learner.gateway.leases import LeaseDesk
from learner.gateway.lookout import Bulletin, Lookout
from learner.gateway.metrics import FIGURES, Seen
from learner.gateway.progress import Progress
from learner.gateway.recovery import Recovered, put_back, recover
from learner.gateway.refusals import unavailable
from learner.gateway.saving import Saving
from learner.gateway.servicer import LearnerServicer
from learner.gateway.sharing import Sharing
from learner.gateway.snapshots import Snapshots
from learner.gateway.status import status
from learner.gateway.submissions import Submissions
from learner.gateway.terms import Adaptive, Limits
from learner.gateway.transports import transports_of
from learner.gateway.updates import Limits as UpdateLimits
from learner.gateway.updates import Updates
from learner.lines import Lines
from learner.shared_memory import snapshot_root
from protos.exporting import Exporter
from protos.gpus import Gpus
from protos.identity import CONTRACT, template_digest, tokenizer_digest, weights_digest
from protos.learner.v1alpha1 import learner_pb2_grpc
from protos.rpc import Server
from protos.security import resolve
from protos.weights.folder import Place

logger = logging.getLogger("headrace.learner.gateway")

FINISH_GRACE_S = 30.0  # for replicas to load the last version and leave after RunFinished
LAST_GRACE_S = 8.0  # of that, once told to stop: the supervisor's own grace is 10 s
STOP_GRACE_S = 1.0  # for running calls, once nothing new is taken


class Gateway:
    """Made from a configuration and the model's folder; recovers on construction, so it needs a running loop.

    Raises ValueError or JournalDamaged when the run folder cannot be continued.
    """

    def __init__(self, config: LearnerConfig, folder: Path, run_id: str) -> None:
        self._config, self._folder, self.run_id = config, folder, run_id
        identity, checkpoints = identity_of(config, folder, run_id), config.run_dir / "checkpoints"
        self._founding = founding.founding(config, identity.base_weights_digest)
        founding.check(config, self._founding)
        check_steps(config, cuts.newest(checkpoints))
        check_stop_ids(config, vocabulary_of(folder))
        self._journal = open_journal(config.journal, config.run_dir / "journal", run_id)
        self._recovered = recovered = recover(self._journal, checkpoints, limits_of(config), run_id=run_id)
        self._books = Books(recovered.ledger, self._journal, recovered.evaluations, max_unscored_share=config.filter.max_unscored_share)
        self._books.payloads = recovered.payloads
        self._clock = RunClock(config.run_dir / "active_s")
        self._shelf = catalog.Shelf()
        self._snapshots = Snapshots()
        self._deltas = Deltas(self._snapshots)
        self._snapshots.published.append(self._deltas.published)
        self._sharing = Sharing(Place(config.push.folder), self._deltas) if config.push.folder else None
        if self._sharing is not None:
            sharing = self._sharing
            self._snapshots.published.append(lambda _, new: sharing.offer(new))
        self._attendance = Attendance(
            identity,
            heartbeat_s=config.lease.heartbeat_s,
            silence_s=config.lease.silence_s,
            scorer=config.scorer,
            newest_version=lambda: self._snapshots.newest.version if self._snapshots.newest else 0,
            last_version=lambda: self._books.ledger.account.versions.last_number,
            push_deadline_s=config.push.deadline_s,
        )
        self._held_out = catalog.Shelf()
        self._pushes, self._steps, self._gpus = PushCounters(), StepClock(low_use=config.alarms.low_use), Gpus()
        self._bulletin = Bulletin()
        self._evaluation = self._make_evaluation()
        self._desk = LeaseDesk(
            self._books, self._attendance, self._shelf, lapse_s=config.lease.lapse_s, silence_s=config.lease.silence_s, groups_wanted=self._groups_wanted, evaluation=self._evaluation
        )  # fmt: skip
        self.feed = self._make_feed(recovered, checkpoints)
        self._server = Server(config.address, [self._add_learner_service, self._add_feed_service], resolve(config.security, address=config.address))
        seen = Seen(
            config=config, books=self._books, attendance=self._attendance, saving=self._saving, pushes=self._pushes, steps=self._steps,
            last=LastStep(config.run_dir / "metrics.jsonl"), gpus=self._gpus, num_refused=lambda: self._server.guard.num_refused,
            waited_s=lambda: self._batches.waited_s, bulletin=self._bulletin,
        )  # fmt: skip
        self._lookout = Lookout(config.alarms, FIGURES, seen, run_dir=config.run_dir, attendance=self._attendance, gpus=self._gpus, bulletin=self._bulletin)
        self.exporter = Exporter(config.metrics_address, FIGURES, seen, resolve(config.security, address=config.metrics_address))

    @property
    def port(self) -> int:
        return self._server.port

    async def run(self, stopping: asyncio.Event) -> None:
        """Serves until `stopping` is set or the run is finished. Raises ValueError for a user's mistake found while running,
        JournalFailed when the account can no longer be kept."""
        await put_back(self._recovered, self._books)
        if self._evaluation is None and self._books.evaluations.current is not None:
            self._books.commit(self._books.evaluations.end("removed", None))  # the run had evaluation before and has none now
        await self._server.start()
        await self.exporter.start()
        write_whole(self._config.run_dir / "gateway.address", reachable(self._config.address, self.port))
        await self.feed.restore_snapshots()
        await self._server.ready()
        logger.info("run %s is served on port %d from step %d", self.run_id, self.port, self._books.ledger.step)
        endings: list[asyncio.Future[Any]] = [asyncio.ensure_future(ending) for ending in (stopping.wait(), self.feed.finished.wait(), self._books.failure)]
        evaluating = [self._evaluation.watch()] if self._evaluation else []
        loops = [asyncio.create_task(loop) for loop in (self._attendance.watch(), self._desk.watch(), self._load_prompts(), *evaluating, *([self._sharing.run()] if self._sharing else []), *([self._sample_gpus()] if len(self._gpus) else []))]
        looking = asyncio.create_task(self._lookout.run())
        try:
            await _first(endings, [*loops, looking])
            looking.cancel()  # what ends is no alarm
            if self.feed.finished.is_set():
                await self._let_replicas_leave(stopping)
        finally:
            for task in (*endings[:2], *loops, looking):
                task.cancel()
            await self._stop()

    async def _load_prompts(self) -> None:
        """Renders, checks that they are the run's, opens leasing. Raises ValueError."""
        resolved = self._config.run_dir / "resolved"
        try:
            found = await asyncio.to_thread(catalog.load, self._config, self._folder, resolved / "prompts.msgpack")
            held_out = await asyncio.to_thread(evaluation_prompts.load, self._config, self._folder, resolved / "evaluation" / "prompts.msgpack", training=found)
            self._settle_data(found)
        except ValueError as error:
            self._shelf.fail(error)
            raise
        self._attendance.need_tokens(max(found.needed_tokens, held_out.needed_tokens if held_out else 0))
        if held_out is not None:
            self._held_out.put(held_out)
        self._shelf.put(found)
        self._books.bell.ring()
        await asyncio.Event().wait()  # a loop that ends is taken for a failure

    def _settle_data(self, found: catalog.Catalog) -> None:
        """The account learns what it is to keep of the data. Raises ValueError where the data are others than the run began with."""
        began, ledger, changes = self.feed.fingerprint, self._books.ledger, self._config.data.on_change == "restart"
        if began and not changes:
            prompts.check_fingerprint(began, found.fingerprint, "the data of " + ", ".join(str(one.prompts) for one in self._config.data.sources.values()))
        if not began:
            founding.keep(self._config.run_dir, self._founding)
        restart = bool(began) and began != found.fingerprint
        if restart:
            logger.warning("the data are not those the run began with (fingerprint %s, was %s): their passes begin anew, as data.on_change=restart says", found.fingerprint, began)
            write_whole(self._config.run_dir / "resolved" / "data_began", str(ledger.next_seq))  # for the audit: rows of older groups are of other data
        if (record := ledger.set_data(found.rules, restart=restart)) is not None:
            self._books.commit(record)
        if began != found.fingerprint:
            self.feed.note_prompts(found.fingerprint)

    async def _let_replicas_leave(self, stopping: asyncio.Event) -> None:
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + FINISH_GRACE_S
        told_to_stop = False
        while self._attendance.attending() and now_s() < end_s:
            if stopping.is_set() and not told_to_stop:
                told_to_stop, end_s = True, min(end_s, now_s() + LAST_GRACE_S)
            await asyncio.sleep(0.1)

    async def _sample_gpus(self) -> None:
        """For ever: a look at the learner's GPUs each second, for the use of a whole step."""
        while True:
            await asyncio.sleep(1.0)
            self._steps.sample([gpu.use for gpu in self._gpus.now()])

    async def _stop(self) -> None:
        await self.exporter.stop()
        self._attendance.end_all(unavailable("the gateway is stopping; attend again"))
        await self._server.stop(STOP_GRACE_S)
        self._clock.save()
        await self._journal.close()
        self._snapshots.remove_all(snapshot_root(self.run_id))

    def _make_evaluation(self) -> EvaluationDesk | None:
        config = self._config
        if config.evaluation is None:
            return None
        return EvaluationDesk(
            config.evaluation, self._books, self._attendance, self._held_out,
            vocabulary=vocabulary_of(self._folder), lapse_s=config.lease.lapse_s, max_attempts=config.lease.max_attempts,
            metrics=Lines(config.run_dir / "metrics.jsonl"), samples=Lines(config.run_dir / "samples.jsonl"), on_end=lambda: self._saving.retain_again(),
        )  # fmt: skip

    def _closed(self) -> None:
        """After each publication."""
        self._steps.closed()
        self._clock.save()
        if self._evaluation is not None:
            self._evaluation.published()

    def _make_feed(self, recovered: Recovered, checkpoints: Path) -> Feed:
        config = self._config
        saving = self._saving = Saving(self._books, config.run_dir, run_id=self.run_id, checkpoint=config.checkpoint, journal=config.journal, newest=recovered.cut)
        if self._evaluation is not None:
            saving.undecided = self._evaluation.undecided
        push = UpdateLimits(prepare_s=config.push.prepare_s, collective_timeout_s=config.push.collective_timeout_s, deadline_s=config.push.deadline_s)
        batches = self._batches = Batches(
            self._books, self._attendance, self._shelf, saving,
            num_steps=config.steps, seed=config.seed, shuffle_rewards=config.control == "shuffled_rewards", is_over=self._is_over,
            may_end=self._evaluation.may_end if self._evaluation else lambda _: True,
            alone_s=None if config.lease.alone_minutes is None else 60 * config.lease.alone_minutes,
        )  # fmt: skip
        return Feed(
            books=self._books,
            recovered=recovered,
            attendance=self._attendance,
            batches=batches,
            updates=Updates(self._attendance, self._snapshots, transports=transports_of(config), limits=push, record=both(line_writer(config.run_dir / "pushes.jsonl"), self._pushes.epoch), record_load=both(line_writer(config.run_dir / "loads.jsonl"), self._pushes.load), generating_share=config.push.generating_share),
            published=self._snapshots,
            saving=saving,
            checkpoints=checkpoints,
            on_close=self._closed,
        )

    def _add_learner_service(self, server: Any) -> None:
        vocabulary = vocabulary_of(self._folder)
        servicer = LearnerServicer(
            attendance=self._attendance,
            desk=self._desk,
            submissions=Submissions(self._books, self._shelf, run_id=self.run_id, vocabulary=vocabulary, fallback=self._config.filter.unscored_value, evaluation=self._evaluation),
            progress=Progress(self._books, run_id=self.run_id, vocabulary=vocabulary),
            snapshots=self._snapshots,
            fetches=Fetches(self._snapshots, self._deltas, self._attendance),
            status=lambda: status(config=self._config, run_id=self.run_id, ledger=self._books.ledger, attendance=self._attendance, evaluation=self._evaluation, finished=self.feed.finished.is_set(), alarm=self._saving.alarm, num_refused=self._server.guard.num_refused, num_unusable=self._books.unusable, progress=self._books.progress, stopped=self._books.stopped, catalog=self._shelf.catalog, bulletin=self._bulletin),
            encode=wire.lease_encoder(self._config),
        )
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(servicer, server)

    def _add_feed_service(self, server: Any) -> None:
        add_to_server(FeedServicer(self.feed, self.run_id), server)

    def _is_over(self) -> bool:
        limit_min = self._config.max_minutes
        return self.feed.finished.is_set() or (limit_min is not None and self._clock.active_s >= 60 * limit_min)

    def _groups_wanted(self) -> int:
        """Groups that the rest of the run can train."""
        return 0 if self._is_over() else max(0, self._config.steps - self._books.ledger.step) * self._config.groups_per_step


async def _first(endings: list[asyncio.Future[Any]], loops: list[asyncio.Task[None]]) -> None:
    """Returns with the first ending; a loop never ends but by raising. Raises what it raised."""
    done, _ = await asyncio.wait({*endings, *loops}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def limits_of(config: LearnerConfig) -> Limits:
    """The account's rules. Raises ValueError for a window that leaves no full batch."""
    return Limits(
        groups_per_step=config.groups_per_step,
        group_size=config.sampling.group_size,
        max_staleness=config.staleness.max_staleness,
        window=config.staleness.window,
        min_usable=config.filter.min_usable,
        zero_signal=config.filter.zero_signal,
        unscored=config.filter.unscored,
        max_consecutive_drops=config.filter.max_consecutive_drops,
        max_attempts=config.lease.max_attempts,
        oversample=config.sampling.oversample,
        stop_flat_after=config.filter.stop_flat_after,
        max_progress_bytes=config.lease.max_progress_bytes,
        max_flat_a_step=config.filter.max_flat_a_step,
        flat_fails=config.filter.then == "fail",
        group_sizes={name: one.group_size for name, one in config.data.sources.items() if one.group_size is not None},
        zero_signals={name: config.zero_signal_of(name) for name in config.data.sets},
        adaptive=None if (adaptive := config.staleness.adaptive) is None else Adaptive(lowest=adaptive.lowest, highest=adaptive.highest, low=adaptive.low, high=adaptive.high),
        baselines=frozenset(name for name in config.data.sources if config.has_baseline(name)),
    )


def identity_of(config: LearnerConfig, folder: Path, run_id: str) -> Identity:
    """What a replica must be. Raises FileNotFoundError for a model without weights."""
    return Identity(
        run_id=run_id,
        contract=CONTRACT,
        base_weights_digest=weights_digest(folder),
        tokenizer_digest=tokenizer_digest(folder),
        template_digest=template_digest(folder),
        served_dtype=config.trainer.served_dtype,
        needed_tokens=2,  # a prompt and a token; known exactly once the prompts are rendered
    )


def vocabulary_of(folder: Path) -> int:
    """Number of token ids of the model. Raises ValueError when config.json does not say."""
    content = json.loads((folder / "config.json").read_bytes())
    size = content.get("vocab_size", content.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ValueError(f"model {folder}: config.json has no vocab_size; give a causal language model")
    return size


def check_steps(config: LearnerConfig, cut: cuts.Cut | None) -> None:
    """Raises ValueError when the run has come further than it is to go."""
    if cut is not None and cut.policy_step > config.steps:
        raise ValueError(f"steps={config.steps}, but the run in {config.run_dir} has done {cut.policy_step} ({cut.folder}); ask for {cut.policy_step} or more, or use another run_dir")


def check_stop_ids(config: LearnerConfig, vocabulary: int) -> None:
    """Raises ValueError for an id that the model can never draw."""
    outside = [token for token in config.sampling.stop_token_ids if token >= vocabulary]
    if outside:
        raise ValueError(f"sampling.stop_token_ids={outside}: the model {config.model} has ids below {vocabulary}; correct them, or leave the list empty for the model's own")


def line_writer(path: Path) -> Callable[[dict[str, Any]], None]:
    """Appends one JSON object a line; a disk that refuses costs the line and a warning, never a weight update."""

    def write(line: dict[str, Any]) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.warning("%s: %s", path, error)

    return write


def both(first: Callable[[dict[str, Any]], None], second: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """One line to two who want it."""

    def tell(line: dict[str, Any]) -> None:
        first(line)
        second(line)

    return tell


def reachable(address: str, port: int) -> str:
    """Where processes of this machine connect: a wildcard host becomes loopback."""
    host = address.rpartition(":")[0]
    return f"{'127.0.0.1' if host in ('', '0.0.0.0', '[::]', '*') else host}:{port}"


def write_whole(path: Path, text: str) -> None:
    """Readers see all of the text or none."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text + "\n")
    part.replace(path)
