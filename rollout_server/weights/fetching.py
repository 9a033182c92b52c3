"""Brings a version to this machine without a push: from the learner, from a peer that has it, or from a shared folder.

    bring ─▶ mirror holds the newest version's bytes ─▶ engine.stage_folder verifies ─▶ settled(ok)

What is held already is told to the source, which may answer with a delta. Every `anchor_every` deltas the copy is full again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from protos import rpc
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.weights import folder
from protos.weights.delta import layout_digest
from protos.weights.errors import TransferError
from protos.weights.folder import Place
from protos.weights.history import plan_of
from protos.weights.mirror import Mirror

log = logging.getLogger("headrace.rollout.fetch")

ANCHOR_EVERY = 32
_PEER_S = 600.0  # a peer that is not done by then is left for the learner
Fetch = Callable[[pb.FetchWeightsRequest], AsyncIterator[pb.FetchWeightsResponse]]


class Source(Protocol):
    """Where a version comes from."""

    @property
    def mirror(self) -> Mirror:
        """Where it comes to lie."""

    async def bring(self, newest: int) -> None:
        """Fills the mirror with a version, at least `newest` where the source has it. Raises when it could not."""


@dataclass(kw_only=True, slots=True)
class FetchStats:
    """Of one replica since its start."""

    num_full: int = 0
    num_deltas: int = 0
    num_from_peers: int = 0
    num_bytes: int = 0  # received


class FolderSource:
    """Versions that a learner publishes on a shared path (protos/weights/folder.py)."""

    def __init__(self, mirror: Mirror, place: Place, *, poll_s: float = 1.0) -> None:
        self.mirror = mirror
        self.place = place
        self._poll_s = poll_s
        self.stats = FetchStats()

    async def bring(self, newest: int) -> None:
        """Waits until a version at least `newest` lies there: whoever calls has a deadline."""
        while True:
            versions = await asyncio.to_thread(self.place.versions)
            if versions and versions[-1] >= newest:
                await asyncio.to_thread(self._take, versions[-1])
                return
            await asyncio.sleep(self._poll_s)

    def _take(self, version: int) -> None:
        if self.mirror.version == version:
            return
        index = folder.read_index(self.place, version)
        data: list[bytes] = []
        folder.checked(self.place, version, folder.MANIFEST, index, lambda _, piece: data.append(piece))
        manifest = manifest_pb2.Manifest.FromString(b"".join(data))
        name = f"delta-{self.mirror.version}.bin"
        if name in index and self.mirror.num_deltas < ANCHOR_EVERY and self.mirror.layout == layout_digest(manifest):
            parts = folder.read_parts(self.place, version, name, index)
            step = manifest_pb2.DeltaStep(from_version=self.mirror.version, to_version=version, num_parts=len(parts))
            self.mirror.apply(manifest, manifest_pb2.DeltaPlan(steps=[step]), parts)
            self.stats.num_deltas += 1
            self.stats.num_bytes += index[name][0]
            return
        self.mirror.open(manifest)
        for owner in sorted({bucket.owner for bucket in manifest.buckets}):
            spread = Spread(self.mirror, manifest, owner)
            folder.checked(self.place, version, f"rank-{owner}.bin", index, spread.take)
            self.stats.num_bytes += index[f"rank-{owner}.bin"][0]
        self.mirror.close()
        self.stats.num_full += 1


class Spread:
    """Brings an owner's file, piece by piece, into its buckets."""

    def __init__(self, mirror: Mirror, manifest: manifest_pb2.Manifest, owner: int) -> None:
        self._mirror = mirror
        self._generation = mirror.generation
        self._buckets = [(index, bucket.file_offset, bucket.num_bytes) for index, bucket in enumerate(manifest.buckets) if bucket.owner == owner]
        self._buckets.sort(key=lambda entry: entry[1])

    def take(self, at: int, data: bytes) -> None:
        """Bytes of the file from `at` on, in order. Raises TransferError once the mirror belongs to another copy: a reading thread that was given
        up at its deadline goes on until it hears so."""
        if self._mirror.generation != self._generation:
            raise TransferError("this copy was given up, another one has begun")
        for index, start, size in self._buckets:
            low, high = max(at, start), min(at + len(data), start + size)
            if low < high:
                self._mirror.write(index, low - start, data[low - at : high - at])


class LearnerSource:
    """LearnerService.FetchWeights, or the peers that it names. `peers`: whether those may be asked."""

    def __init__(self, mirror: Mirror, fetch: Fetch, *, peers: bool = False, deltas: bool = True, anchor_every: int = ANCHOR_EVERY, security: rpc.Security = rpc.OPEN) -> None:
        self.mirror = self._mirror = mirror
        self._fetch = fetch
        self._peers = peers
        self._deltas = deltas
        self._anchor_every = anchor_every
        self._security = security  # of the peers
        self.stats = FetchStats()

    async def bring(self, newest: int) -> None:
        if newest and self._mirror.version == newest:
            return  # it lies here already, and the engine reads it again
        request = self._request()
        request.peers = self._peers
        addresses = await self._take(self._fetch(request))
        if not addresses:
            return
        for address in addresses:
            try:
                await asyncio.wait_for(self._from_peer(address, newest), _PEER_S)
            except Exception as error:  # supervised edge: a peer is a convenience; the learner is asked instead
                log.warning("peer %s gave no weights: %s", address, error)
            else:
                self.stats.num_from_peers += 1
                return
        await self._take(self._fetch(self._request()))

    def _request(self) -> pb.FetchWeightsRequest:
        """A full copy is asked for at first, after a doubt, and every `anchor_every` deltas."""
        held = self._deltas and self._mirror.num_deltas < self._anchor_every
        return pb.FetchWeightsRequest(have_version=self._mirror.version if held else 0, have_layout=self._mirror.layout if held else 0)

    async def _from_peer(self, address: str, newest: int) -> None:
        request = self._request()
        async with rpc.channel(address, self._security) as channel:
            call = rollout_pb2_grpc.RolloutServiceStub(channel).FetchWeights(
                rollout_pb2.FetchWeightsRequest(have_version=request.have_version, have_layout=request.have_layout), timeout=_PEER_S
            )
            await self._take(call, least=newest)

    async def _take(self, stream: AsyncIterator[Any], *, least: int = 0) -> list[str]:
        """Fills the mirror from a stream, or gives the addresses of peers. Raises TransferError for a stream that is not what it
        announces, RuntimeError for a version older than `least`: a peer gives what it fetched, which a push may have overtaken."""
        stream = aiter(stream)
        first = await anext(stream, None)
        if first is None:
            raise RuntimeError("FetchWeights ended without a word")
        if first.WhichOneof("message") == "peers":
            return list(first.peers.addresses)
        if first.WhichOneof("message") != "manifest":
            raise RuntimeError(f"FetchWeights began with {first.WhichOneof('message')} instead of the manifest")
        if first.manifest.version < least:
            raise RuntimeError(f"it holds version {first.manifest.version}, {least} is wanted")
        second = await anext(stream, None)
        if second is not None and second.WhichOneof("message") == "delta_plan":
            await self._take_delta(first.manifest, second.delta_plan, stream)
        else:
            await self._take_full(first.manifest, second, stream)
        return []

    async def _take_full(self, manifest: manifest_pb2.Manifest, first: Any, stream: AsyncIterator[Any]) -> None:
        await asyncio.to_thread(self._mirror.open, manifest)
        while first is not None:
            chunk = first.chunk
            self._mirror.write(chunk.bucket, chunk.offset, chunk.data)
            self.stats.num_bytes += len(chunk.data)
            first = await anext(stream, None)
        self._mirror.close()
        self.stats.num_full += 1

    async def _take_delta(self, manifest: manifest_pb2.Manifest, plan: manifest_pb2.DeltaPlan, stream: AsyncIterator[Any]) -> None:
        """All parts are here before the first is applied: a stream that breaks leaves what is held as it was."""
        parts = []
        async for response in stream:
            parts.append(response.delta_part)
            self.stats.num_bytes += len(response.delta_part.data)
        await asyncio.to_thread(self._mirror.apply, manifest, plan, parts)
        self.stats.num_deltas += len(plan.steps)


async def serve(mirror: Mirror, have_version: int, have_layout: int, *, chunk_bytes: int = rpc.CHUNK_BYTES) -> AsyncIterator[rollout_pb2.FetchWeightsResponse]:
    """What a peer is given. Raises LookupError when no whole version is held, InterruptedError when it changed meanwhile."""
    version, generation = mirror.version, mirror.generation
    if not version:
        raise LookupError("this replica holds no whole version of its learner; ask the learner")
    manifest = mirror.announced
    yield rollout_pb2.FetchWeightsResponse(manifest=manifest)
    steps = mirror.history.chain(have_version=have_version, layout=have_layout, version=version)
    if steps:
        yield rollout_pb2.FetchWeightsResponse(delta_plan=plan_of(steps))
        for part in (part for step in steps for part in step.parts):
            yield rollout_pb2.FetchWeightsResponse(delta_part=part)
        return
    for index, bucket in enumerate(manifest.buckets):
        for offset in range(0, bucket.num_bytes, chunk_bytes):
            data = await asyncio.to_thread(mirror.read, index, offset, chunk_bytes)
            if mirror.generation != generation:
                raise InterruptedError(f"version {version} was replaced meanwhile; ask again")
            yield rollout_pb2.FetchWeightsResponse(chunk=rollout_pb2.FetchWeightsResponse.Chunk(bucket=index, offset=offset, data=data))


def lost(error: Exception) -> grpc.StatusCode:
    """The status that answers a failure of `serve`."""
    return grpc.StatusCode.NOT_FOUND if isinstance(error, LookupError) else grpc.StatusCode.ABORTED
