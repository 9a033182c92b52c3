"""A policy version on shared memory: every rank writes its own shards, no rank ever holds the whole model.

    writer = SnapshotWriter(model, root=snapshot_root(run_id), incarnation=ns, served_dtype="bfloat16", bucket_bytes=512 << 20)
    snapshot = writer.write(policy_step=k)          # every rank; afterwards the optimizer may touch the weights
    # rank 0: CloseBatch(snapshot_dir=str(snapshot.folder)); every rank: pusher.submit(version, snapshot)
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from learner.weights.announce import Probe, Verify, manifest_of
from learner.weights.lora import base_parameters, targets_of, whole
from learner.weights.plan import Run, TransferPlan, make_plan
from learner.weights.roots import MAX_ROOTS
from learner.weights.shards import gather_int64, read_shards
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.adapter import A, B, merged, scalings
from protos.weights.staging import DTYPES, digest
from protos.weights.windows import Windows

Lora = Literal["merged", "adapter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A finished snapshot, the same on all ranks but for the rank's own counts."""

    folder: Path  # holds rank-R.bin of every rank and manifest.bin
    policy_step: int
    rank: int
    num_bytes: int  # written by this rank
    total_bytes: int  # of the version
    seconds: float
    plan: TransferPlan


class SnapshotWriter:
    """Writes versions of one FSDP2 (or plain) model. Made after `fully_shard`; the plan is fixed then.

    `group`: the trainer's process group (None: the default group where it is initialised, else a single rank).
    Raises ValueError naming the tensor for a sharding it does not know, and for an unknown served dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        root: Path,
        incarnation: int,
        served_dtype: str,
        bucket_bytes: int,
        dtypes: Mapping[str, str] | None = None,
        max_roots: int = MAX_ROOTS,
        verify: Verify = "digest",
        lora: Lora = "merged",
        group: dist.ProcessGroup | None = None,
        keep: int = 2,
    ) -> None:
        unknown = sorted({served_dtype, *(dtypes or {}).values()} - DTYPES.keys())
        if unknown:
            raise ValueError(f"served dtype {', '.join(map(repr, unknown))} is none of {', '.join(DTYPES)}")
        self._group = group
        self._world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self._rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._root = root
        self._incarnation = incarnation
        self._verify: Verify = verify
        self._keep = keep
        self._targets = targets_of(model)
        if lora == "adapter" and not self._targets:
            raise ValueError("lora=adapter, but the model has no LoRA modules (peft); send it merged")
        if lora == "adapter" and (beside := [name for name, parameter in base_parameters(model) if parameter.requires_grad]):
            raise ValueError(f"lora=adapter, but the model trains {', '.join(beside[:4])} beside its adapter, which replicas would not get; send it merged")
        self._adapter = scalings({name: target.scaling for name, target in self._targets.items()}, served_dtype) if lora == "adapter" else None
        halves = [(name + half, parameter) for name, target in self._targets.items() for half, parameter in ((A, target.a), (B, target.b))]
        self._shards = read_shards(
            model, served_dtype="float32" if self._adapter else served_dtype, dtypes={} if self._adapter else dtypes, named=halves if self._adapter else base_parameters(model), group=group,
            world_size=self._world_size,
        )  # fmt: skip
        self._windows: Windows | None = None
        self._whole_a: dict[str, torch.Tensor] = {}  # of this version, by module
        self.plan = make_plan(self._shards.tensors, self._shards.held, bucket_bytes=bucket_bytes, max_roots=max_roots, hosts=self._shards.hosts)

    def write(self, policy_step: int, probe: Probe | None = None) -> Snapshot:
        """Collective over all ranks; this rank's file is complete when it returns, and on rank 0 the whole snapshot. Rank 0
        writes manifest.bin last and removes all but the newest `keep` snapshots. `probe` travels with the version (verify: logprobs).

        Raises OSError on every rank when one of them could not write, for instance because shared memory is full.
        """
        began = time.monotonic()
        folder = self._root / f"{self._incarnation}-{policy_step}"
        if not self._adapter:
            self._whole_a = {name: whole(target.a) for name, target in self._targets.items()}  # small, and the same on all ranks
        failure: OSError | None = None
        digests: list[int] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            digests = self._write_file(folder / f"rank-{self._rank}.bin")
        except OSError as error:
            failure = error
        by_owner = self._exchange(digests, failed=failure is not None)
        if failure is not None:
            raise OSError(failure.errno, f"snapshot of policy step {policy_step}: {failure.strerror}; {self.plan.total_bytes} bytes a version, {self._keep + 1} of them at a time", str(folder)) from failure
        if self._rank == 0:
            self._publish(folder, manifest_of(self.plan, policy_step=policy_step, digests=by_owner, verify=self._verify, probe=probe, adapter=self._adapter))
        return Snapshot(
            folder=folder,
            policy_step=policy_step,
            rank=self._rank,
            num_bytes=self.plan.file_bytes(self._rank),
            total_bytes=self.plan.total_bytes,
            seconds=time.monotonic() - began,
            plan=self.plan,
        )

    def close(self) -> None:
        """Rank 0 removes the run's snapshots (open files stay readable)."""
        if self._rank == 0:
            shutil.rmtree(self._root, ignore_errors=True)

    def _write_file(self, path: Path) -> list[int]:
        """Writes this rank's runs and returns the digests of its slices, in the plan's order."""
        size = self.plan.file_bytes(self._rank)
        with path.open("wb+") as file:
            if size == 0:
                return []
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS at the first touch
            with mmap.mmap(file.fileno(), size) as memory:
                return self._fill(memory)

    def _fill(self, memory: mmap.mmap) -> list[int]:
        for run in self.plan.runs:
            if run.owner == self._rank:
                dtype = DTYPES[self.plan.tensors[run.tensor].dtype]
                target = torch.frombuffer(memory, dtype=dtype, offset=run.file_offset, count=run.num_bytes // dtype.itemsize)
                # Casts on the source's device, to nearest even. Nothing is in flight afterwards.
                self._copy(self._part(run).reshape(-1).to(dtype), target)
                del target  # the map cannot be closed while it looks into it
        if self._verify == "off":
            return [0] * sum(piece.owner == self._rank for piece in self.plan.slices)
        starts = [bucket.file_offset for bucket in self.plan.buckets]
        data = np.frombuffer(memory, dtype=np.uint8)
        mine = [piece for piece in self.plan.slices if piece.owner == self._rank]
        spans = [(starts[piece.bucket] + piece.bucket_offset, piece.num_bytes) for piece in mine]
        digests = [digest(data[start : start + count]) for start, count in spans]
        del data
        return digests

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Into the mapped file; from a GPU through pinned windows, at several times the speed of the driver's own copy to pageable memory."""
        windows = self._windows_of(source.device)
        if windows is None:
            target.copy_(source)
            return
        to = target.view(torch.uint8).numpy()
        for offset, window in windows.to_host(source.view(torch.uint8)):
            to[offset : offset + len(window)] = window

    def _windows_of(self, device: torch.device) -> Windows | None:
        if device.type == "cuda" and self._windows is None:
            self._windows = Windows(device)
        return self._windows

    def _part(self, run: Run) -> torch.Tensor:
        """The rank's own part of a tensor, or what of it the rank sends."""
        part, box = self._merged(run.tensor), self._shards.held[run.tensor][self._rank]
        assert box is not None, "a rank sends only what it holds"
        for dim, ((first, _), (start, count)) in enumerate(zip(box, run.box, strict=True)):
            part = part.narrow(dim, start - first, count)
        return part

    def _merged(self, tensor: int) -> torch.Tensor:
        """This rank's part of a tensor, its adapter added in a copy. Raises ValueError where they are not sharded alike."""
        local, name = self._shards.local(tensor), self.plan.tensors[tensor].name
        target = None if self._adapter else self._targets.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if target is None or not local.numel():
            return local
        b = target.b.to_local() if isinstance(target.b, DTensor) else target.b
        if len(b) != len(local) or self._whole_a[target.module].shape[1] != local.shape[1]:
            raise ValueError(f"tensor {name}: this rank holds {tuple(local.shape)} of it and {tuple(b.shape)} of its adapter's B; shard both by rows over the same ranks")
        return merged(local, self._whole_a[target.module], b.detach(), target.scaling)

    def _exchange(self, digests: list[int], *, failed: bool) -> list[list[int]]:
        """Digests of every rank, as int64 over the trainer's group; raises OSError where another rank failed."""
        counts = [sum(piece.owner == owner for piece in self.plan.slices) for owner in range(self._world_size)]
        sent = np.zeros(1 + max(counts), dtype=np.uint64)
        sent[0] = failed
        sent[1 : 1 + len(digests)] = digests
        parts = gather_int64(torch.from_numpy(sent.view(np.int64)), self._group, self._world_size)
        received = [part.numpy().view(np.uint64) for part in parts]
        others = [rank for rank, part in enumerate(received) if part[0] and rank != self._rank]
        if others and not failed:
            raise OSError(f"trainer ranks {others} could not write their part of the snapshot; their own logs say why")
        return [[int(value) for value in part[1 : 1 + count]] for part, count in zip(received, counts, strict=True)]

    def _publish(self, folder: Path, manifest: manifest_pb2.Manifest) -> None:
        partial = folder / "manifest.partial"
        partial.write_bytes(manifest.SerializeToString())
        partial.rename(folder / "manifest.bin")
        for old in self._folders()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _folders(self) -> list[Path]:
        """Snapshot folders, oldest first: incarnations are times, steps only grow inside one."""
        found = []
        for folder in self._root.iterdir():
            incarnation, _, step = folder.name.partition("-")
            if incarnation.isdigit() and step.isdigit():
                found.append((int(incarnation), int(step), folder))
        return [folder for _, _, folder in sorted(found)]
