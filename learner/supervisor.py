"""Keeps one gateway and N trainer ranks running until the run is finished.

    supervisor ──▶ gateway                  restarted alone; the ranks wait for it
               ├─▶ rank 0 .. rank N-1       restarted all together, from the newest cut, as a new incarnation; or kept by torchrun
               └─▶ trackers                 never waited for; one that ends is not started again

Consumes: exits of children, SIGTERM and SIGINT. Produces: children. Waits for: one of them. Unblocked by: any exit, any signal.
A child that ends with USER_MISTAKE ends everything; a child that keeps failing is given up after MAX_FAILURES in a row.
A signal may come to the supervisor alone or to all of its group: ranks cut and leave at either, the gateway ends when it is told here.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from learner import children, shared_memory
from learner.children import Child, Patience
from learner.config import LearnerConfig
from learner.gateway.founding import run_id_of
from learner.process import END, USER_MISTAKE, complain, next_incarnation
from learner.telling import tell
from learner.trackers.keeping import Trackers
from protos.mistakes import check_address

_LOG = logging.getLogger("headrace.learner.supervisor")
STOP_GRACE_S = 10.0
FAILED_GRACE_S = 3.0  # for the other ranks to say what they know, once one failed
LAST_RANKS_S = 60.0  # for ranks to end once the gateway has ended a finished run
BEFORE_HANDLERS = (-signal.SIGTERM, -signal.SIGINT)  # a rank that was told to stop while it was starting: it has done nothing


def prepare(config: LearnerConfig) -> tuple[LearnerConfig, Path]:
    """Makes the run folder with the resolved configuration in it; the configuration and that file.

    Port 0 becomes a free port, which a restarted gateway takes again. Raises ValueError when the folder cannot be made, or is another run's.
    """
    host, port = check_address("address", config.address, may_be_free=True)
    config = config.model_copy(update={"address": f"{host}:{port or _free_port()}", "run_dir": config.run_dir.resolve()})
    resolved = config.run_dir / "resolved" / "learner.json"
    try:
        for name in ("resolved", "logs", "checkpoints"):
            (config.run_dir / name).mkdir(parents=True, exist_ok=True)
        (config.run_dir / "gateway.address").unlink(missing_ok=True)
        config = config.model_copy(update={"run_id": run_id_of(config)})
        resolved.write_text(config.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise _unusable(config.run_dir, error) from None
    return config, resolved


@contextmanager
def claimed(run_dir: Path, who: str = "learner") -> Iterator[None]:
    """Holds the run folder while the block runs, before anything in it is touched: a second learner would take the first one's
    configuration and address from under it. Raises ValueError when another such process holds it, or when it cannot be made."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / f"{who}.lock").open("a")
    except OSError as error:
        raise _unusable(run_dir, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run_dir: {run_dir} is in use by another {who}; stop that one, or use another run_dir") from None
        yield


def last_words(config: LearnerConfig) -> str:
    """How far a run came, where it lies, and what to do next: a learner does not end without a word."""
    file = config.run_dir / "metrics.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}") and '"evaluation"' not in line] if file.is_file() else []
    step = int(steps[-1]["step"]) if steps else 0
    after = f"headrace report {config.run_dir}" if step >= config.steps else "the same command goes on"
    return f"the learner has left after step {step} of {config.steps}; run folder {config.run_dir}; next: {after}"


def _unusable(run_dir: Path, error: OSError) -> ValueError:
    return ValueError(f"run_dir: {run_dir} cannot be used: {error}; choose a folder that can be written")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Supervisor:
    """Runs until the run is finished, cannot go on, or was told to stop. Example: `code = await Supervisor(config, resolved).run()`"""

    def __init__(self, config: LearnerConfig, resolved: Path, *, gateway: str = "learner.gateway", trainer: str = "learner.trainer", gateway_only: bool = False) -> None:
        """gateway, trainer: modules to run as children. gateway_only: somebody else (torchrun) keeps the ranks."""
        self._config, self._resolved, self._trainer, self._gateway_only = config, resolved, trainer, gateway_only
        self._gateway = self._child("gateway", gateway, ["--supervised"])
        self._ranks: list[Child] = []
        self._trackers = Trackers(config.trackers.wanted(), resolved, config.run_dir / "logs")
        self._root = shared_memory.snapshot_root(config.run_id)
        self._stopping = asyncio.Event()
        self._finished = False  # the gateway has left after the run was
        self._incarnation = 0

    def _child(self, name: str, module: str, extra: list[str]) -> Child:
        return Child(name, [module, "--config", str(self._resolved), *extra], self._config.run_dir / "logs" / f"{name}.log")

    async def run(self) -> int:
        """Exit code: 0 finished, or told to stop and cut; 1 given up, or told to stop and left without a cut of the last step; 2 a user's mistake."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        self._claim_memory()
        await self._trackers.start()
        gateway, ranks = asyncio.create_task(self._keep_gateway()), asyncio.create_task(self._keep_ranks())
        telling = asyncio.create_task(tell(self._config))
        try:
            await asyncio.wait({gateway, ranks}, return_when=asyncio.FIRST_COMPLETED)
            return ranks.result() if ranks.done() else gateway.result()
        finally:
            for task in (gateway, ranks, telling):
                task.cancel()
            await asyncio.gather(gateway, ranks, telling, return_exceptions=True)
            await asyncio.gather(*(child.end(0.0) for child in self._ranks if child.started))
            await asyncio.gather(self._trackers.end(), *([self._gateway.end(STOP_GRACE_S, END)] if self._gateway.started else []))
            shared_memory.release(self._root)

    def _claim_memory(self) -> None:
        """Clears what an earlier life of this run left, and names what other dead runs did. Raises ValueError for a run id in use.

        Ranks of torchrun may live while the gateway is started again: what they wrote stays.
        """
        shared_memory.claim(self._root, self._config.run_dir, clear=not self._gateway_only)
        found = sorted(shared_memory.left_behind(), key=lambda left: -left.num_bytes)
        if found:
            _LOG.warning(
                "%d dead runs hold %.0f MiB of this machine's memory, most of it %s of the run in %s: start that run again, or remove the folder",
                len(found), sum(left.num_bytes for left in found) / 2**20, found[0].folder, found[0].run_dir,
            )  # fmt: skip

    async def _keep_gateway(self) -> int:
        """Starts the gateway again whenever it ends; returns only when it must not be. Also while ranks leave: they need it for their cut."""
        patience = Patience(self._config.run_dir)
        while True:
            await self._gateway.start()
            code = await self._gateway.wait()
            _LOG.warning("the gateway ended with %d", code)
            if code == USER_MISTAKE:
                return complain(self._gateway.complaint())
            if code == 0:  # of itself, so the run is finished
                self._finished = True
                if not self._gateway_only:
                    await asyncio.sleep(LAST_RANKS_S)
                    _LOG.warning("the run is finished, but ranks are still there after %.0f s: they are ended", LAST_RANKS_S)
                return 0
            if not await patience.after(time.monotonic() - self._gateway.started):
                complain(f"the gateway failed {children.MAX_FAILURES + 1} times in a row, last with code {code}: {self._gateway.complaint()}")
                return 1

    async def _keep_ranks(self) -> int:
        if self._gateway_only:
            await self._stopping.wait()
            return 0
        patience = Patience(self._config.run_dir)
        while True:
            codes = await self._one_incarnation()
            if USER_MISTAKE in codes:
                return complain(self._ranks[codes.index(USER_MISTAKE)].complaint())
            if self._finished or not any(codes):
                return 0
            if self._stopping.is_set():
                return self._left(codes)
            _LOG.warning("trainer ranks ended with %s; starting all of them again", codes)
            if not await patience.after(time.monotonic() - self._ranks[0].started):
                failed = next(i for i, code in enumerate(codes) if code)
                complain(f"the trainer failed {children.MAX_FAILURES + 1} times in a row, last rank {failed} with code {codes[failed]}: {self._ranks[failed].complaint()}")
                return 1
            if self._stopping.is_set():  # the signal had come to the ranks first
                return self._left(codes)

    def _left(self, codes: list[int]) -> int:
        """Exit code after ranks were told to stop and not all of them ended with 0."""
        if not any(codes) or any(code in BEFORE_HANDLERS for code in codes):
            return 0  # without that rank the others had not begun either
        complain(f"told to stop, and left without a cut of the last step (the ranks ended with {codes}; checkpoint.leave_s={self._config.checkpoint.leave_s:.0f}): the same command goes on from the newest cut and trains again, from the journal, what came after it")
        return 1

    async def _one_incarnation(self) -> list[int]:
        """All ranks from their start to the end of the last one; their exit codes, of those killed for another's sake 0."""
        folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        count = self._config.trainer.ranks
        self._incarnation = next_incarnation(self._config.run_dir, self._incarnation)
        shared = ["--world-size", str(count), "--incarnation", str(self._incarnation), "--rendezvous", f"file://{folder / 'rendezvous'}", "--parent", str(os.getpid())]
        self._ranks = [self._child(f"trainer-{rank}", self._trainer, ["--rank", str(rank), *shared]) for rank in range(count)]
        try:
            for rank in self._ranks:
                await rank.start()
            return await self._until_ended()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _until_ended(self) -> list[int]:
        waits = [asyncio.create_task(rank.wait()) for rank in self._ranks]
        stop = asyncio.create_task(self._stopping.wait())
        while await _all_well(waits, stop, limit_s=None):
            if stop.done():
                return await self._ask_to_leave(waits)
        stop.cancel()
        first = [task.result() if task.done() else 0 for task in waits]
        await asyncio.gather(*(rank.end(0.0) for rank in self._ranks))
        return first

    async def _ask_to_leave(self, waits: list[asyncio.Task[int]]) -> list[int]:
        """Exit codes; of ranks that could not leave in time, or not without one that failed, that of a kill."""
        leave_s = self._config.checkpoint.leave_s
        _LOG.info("told to stop: waiting up to %.0f s for the ranks' cut", leave_s)
        for rank in self._ranks:
            rank.signal(signal.SIGTERM)
        end_s = time.monotonic() + leave_s
        while (left_s := end_s - time.monotonic()) > 0 and await _all_well(waits, None, limit_s=left_s):
            pass
        return list(await asyncio.gather(*(rank.end(FAILED_GRACE_S if end_s > time.monotonic() else 0.0) for rank in self._ranks)))


async def _all_well(waits: list[asyncio.Task[int]], stop: asyncio.Task[bool] | None, *, limit_s: float | None) -> bool:
    """Waits for the next exit, the stop, or the limit; whether some ranks are still there and none has failed."""
    pending = {task for task in waits if not task.done()}
    if pending and not any(task.done() and task.result() for task in waits):
        await asyncio.wait({*pending, *([stop] if stop else [])}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    return not all(task.done() for task in waits) and not any(task.done() and task.result() for task in waits)
