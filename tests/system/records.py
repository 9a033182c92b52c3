"""What a run left behind, read for tests: journal records in order, cuts, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from learner.gateway.cuts import all_marked, read_account
from learner.gateway.segments import Entry, read_segment, segment_numbers, segment_path


def journal_records(run_dir: Path) -> list[dict[str, Any]]:
    """Every record that the segmented journal still has, oldest first; also of a gateway that is running."""
    return [record for record, _ in journal_entries(run_dir)]


def journal_entries(run_dir: Path) -> list[tuple[dict[str, Any], bytes]]:
    """As `journal_records`, each with its payload."""
    folder = run_dir / "journal"
    numbers = segment_numbers(folder)
    entries = [entry for number in numbers for entry in read_segment(segment_path(folder, number), last=number == numbers[-1])]
    return [(entry.record, bytes(entry.payload)) for entry in entries if isinstance(entry, Entry)]


def newest_step(run_dir: Path) -> int:
    """Policy step of the newest cut; -1 where there is none."""
    return max((cut.policy_step for cut in all_marked(run_dir / "checkpoints")), default=-1)


def tensors_of(cut: Path) -> dict[str, torch.Tensor]:
    """Everything numeric that the ranks saved, whole, by name."""
    entries = dcp.FileSystemReader(cut).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    dcp.load(state, checkpoint_id=cut, no_dist=True)
    return state


def account_by_steps(run_dir: Path, step_of: dict[int, int]) -> dict[str, Any]:
    """The account of the newest cut with versions told by their steps and without what two lives may differ in: lease ids, clocks,
    lineage, numbers of versions."""
    state = read_account(all_marked(run_dir / "checkpoints")[-1])["account"]
    groups = []
    for group in state["groups"]:
        samples = [[index, {**facts, "spans": [[step_of[version], count] for version, count in facts["spans"]], "replica_id": ""}] for index, facts in sorted(group["samples"])]
        groups.append({"seq": group["seq"], "prompt_id": group["prompt_id"], "place": group["place"], "samples": samples})
    kept = ("step", "next_seq", "num_trained", "dropped", "tokens_by_staleness", "closed", "replays", "active", "covered")
    return {**{name: state[name] for name in kept}, "groups": groups}
