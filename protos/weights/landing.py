"""What the engine's own process keeps of a weight update until it is committed.

The engine's worker calls these from its step thread (vLLM: through `collective_rpc`), so every method returns at once;
the receiving runs in a daemon thread while generation goes on.

    landing.begin_receive(group_spec_bytes, manifest_bytes, timeout_s)     # then poll state() until it is not "receiving"
    landing.begin_chunks(manifest_bytes); landing.write_chunk(bucket, offset, data) ...; landing.finish_chunks()
    staging = landing.take(version); model.load(staging.tensors())          # in the pause

Receiving thread: consumes collectives, produces the next state, waits for peers, unblocked by its deadline or discard().
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import marks
from protos.weights.errors import TransferError
from protos.weights.receiver import Receiver
from protos.weights.side import Side
from protos.weights.staging import Keep, Staging, VerifiedStaging, check_names, read_buckets

Phase = Literal["empty", "receiving", "ready", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LandingState:
    """Example: LandingState(phase="failed", version=7, detail="version 7: 1 of 9 slices ...: model.norm.weight", seconds=0.2)"""

    phase: Phase
    version: int  # of the update under way or ready; 0 when empty
    detail: str  # with failed: what happened, naming the tensor or peer to blame
    seconds: float  # spent receiving so far


_EMPTY = LandingState(phase="empty", version=0, detail="", seconds=0.0)


class Landing:
    """One update at a time; a new one drops what lay there. `device` is where staging tensors are allocated and where
    an NCCL group receives; groups are kept between updates while the group key is unchanged.

    `expected`: (Hugging Face name, shape) of every tensor of the model, where the engine knows them; a manifest with other
    names or shapes is then refused before any byte moves. `worker`, `keep`: of several workers, which this is and what it keeps.
    `prepare`: makes ready what of a version can be beside generation, on the receiving thread and its side; where it raises, the version has failed.
    """

    def __init__(
        self, device: torch.device | None = None, expected: Sequence[tuple[str, Sequence[int]]] | None = None, *, worker: int = 0, keep: Keep | None = None,
        prepare: Callable[[VerifiedStaging, Side], Any] = lambda verified, side: None,
    ) -> None:  # fmt: skip
        self._device = device or torch.device("cpu")
        self._expected = expected
        self._worker = worker
        self._keep = keep
        self._prepare = prepare
        self._lock = threading.Lock()
        self._receiver = self._new_receiver()
        self._cancelled = threading.Event()
        self._started = 0.0
        self._state = _EMPTY
        self._chunks: Staging | None = None
        self._verified: tuple[VerifiedStaging, Any] | None = None  # and what `prepare` made of it

    def begin_receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        """Starts receiving by collectives. `group`, `manifest`: serialized GroupSpec and Manifest. Raises TransferError for a
        manifest that is not this model's."""
        spec, parsed = learner_pb2.GroupSpec.FromString(group), self._open(manifest)
        work = (self._receiver, self._cancelled, spec, parsed, timeout_s)
        threading.Thread(target=self._receive, args=work, name="weights-receive", daemon=True).start()

    def begin_chunks(self, manifest: bytes) -> None:
        """Opens staging for chunks of a FetchWeights stream. Raises TransferError for a manifest that is not this model's."""
        self._chunks = Staging(self._open(manifest), self._device, self._keep)

    def begin_folder(self, folder: str, manifest: bytes) -> None:
        """Starts reading a folder's bucket files (protos/weights/mirror.py); poll state() as after begin_receive."""
        parsed = self._open(manifest)
        threading.Thread(target=self._read, args=(self._receiver, self._cancelled, Path(folder), parsed), name="weights-read", daemon=True).start()

    def write_chunk(self, bucket: int, offset: int, data: bytes) -> None:
        """Raises TransferError when the chunk does not lie inside the manifest's bucket."""
        if self._chunks is None:
            raise TransferError(f"chunk of bucket {bucket} without begin_chunks")
        self._chunks.write_chunk(bucket, offset, data)

    def finish_chunks(self) -> None:
        """Verifies coverage and digests. Raises TransferError listing the tensors to blame; then nothing is kept."""
        staging, self._chunks = self._chunks, None
        if staging is None:
            raise TransferError("finish_chunks without begin_chunks")
        try:
            verified = self._prepared(self._receiver, staging.verify())
        except Exception as error:  # told by state() as well
            self._end(self._cancelled, "failed", str(error), None)
            raise
        self._end(self._cancelled, "ready", "", verified)

    def state(self) -> LandingState:
        """What lies there now."""
        with self._lock:
            if self._state.phase != "receiving":
                return self._state
            seconds = time.monotonic() - self._started
            return LandingState(phase="receiving", version=self._state.version, detail="", seconds=seconds)

    def take(self, version: int) -> VerifiedStaging:
        """Hands over the verified tensors of exactly this version. Raises TransferError otherwise."""
        return self.take_prepared(version)[0]

    def take_prepared(self, version: int) -> tuple[VerifiedStaging, Any]:
        """`take`, with what `prepare` made of it."""
        with self._lock:
            state, verified = self._state, self._verified
            if verified is None or verified[0].version != version:
                raise TransferError(f"version {version} is not ready to commit: {state.phase} version {state.version} {state.detail}".rstrip())
            self._state, self._verified = _EMPTY, None
            return verified

    def discard(self) -> None:
        """Gives up what runs and frees what lies there. A receive that blocks is abandoned, never waited for."""
        with self._lock:
            running = self._state.phase == "receiving" and self._chunks is None
            self._cancelled.set()
            self._cancelled = threading.Event()
            self._state, self._verified, self._chunks = _EMPTY, None, None
            if running:  # its thread closes the groups; the next update starts with none
                self._receiver = self._new_receiver()

    @property
    def peak_bytes(self) -> int:
        """Memory of the last transfer by collectives: staging and buckets."""
        return self._receiver.peak_bytes

    def close(self) -> None:
        """discard, and the groups are closed."""
        self.discard()
        self._receiver.close()

    def _new_receiver(self) -> Receiver:
        return Receiver(self._device, worker=self._worker, keep=self._keep)

    def _open(self, manifest: bytes) -> manifest_pb2.Manifest:
        self.discard()
        parsed = manifest_pb2.Manifest.FromString(manifest)
        if self._expected is not None:
            check_names(parsed, self._expected)
        with self._lock:
            self._started = time.monotonic()
            self._state = LandingState(phase="receiving", version=parsed.version, detail="", seconds=0.0)
        return parsed

    def _receive(
        self,
        receiver: Receiver,
        cancelled: threading.Event,
        spec: learner_pb2.GroupSpec,
        manifest: manifest_pb2.Manifest,
        timeout_s: float,
    ) -> None:
        """The receiving thread."""
        self._run(receiver, cancelled, lambda: receiver.receive(spec, manifest, timeout_s=timeout_s, cancelled=cancelled))

    def _read(self, receiver: Receiver, cancelled: threading.Event, folder: Path, manifest: manifest_pb2.Manifest) -> None:
        """The reading thread."""

        def read() -> VerifiedStaging:
            with receiver.side.open():
                return read_buckets(folder, manifest, self._device, keep=self._keep, cancelled=cancelled, side=receiver.side)

        self._run(receiver, cancelled, read)

    def _prepared(self, receiver: Receiver, verified: VerifiedStaging) -> tuple[VerifiedStaging, Any]:
        with marks.span("prepare"), receiver.side.open():
            return verified, self._prepare(verified, receiver.side)

    def _run(self, receiver: Receiver, cancelled: threading.Event, work: Callable[[], VerifiedStaging]) -> None:
        try:
            prepared = self._prepared(receiver, work())
        except Exception as error:  # supervised edge: state() reports it, the driver logs and counts it
            self._end(cancelled, "failed", f"{error}" if isinstance(error, TransferError) else f"{type(error).__name__}: {error}", None)
        else:
            self._end(cancelled, "ready", "", prepared)

    def _end(self, cancelled: threading.Event, phase: Phase, detail: str, verified: tuple[VerifiedStaging, Any] | None) -> None:
        with self._lock:
            if cancelled is not self._cancelled:
                return  # discarded meanwhile
            seconds = time.monotonic() - self._started
            self._state = LandingState(phase=phase, version=self._state.version, detail=detail, seconds=seconds)
            self._verified = verified
