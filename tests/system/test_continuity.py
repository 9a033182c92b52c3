"""A replica that dies with long samples half drawn: another draws them on, and every token has its version's log-prob."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protos.arrays import unpack
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.system.harness import ROOT, Run, running, wait_for
from tests.system.records import journal_entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4  # float32 on both sides, different kernels
EVERY_TOKENS = 32
Key = tuple[int, int]  # (seq, sample_index)


def serving(run: Run, name: str) -> bool:
    replica = run.replica(name)
    return replica is not None and replica.attending and replica.loaded_version > 0


def unfinished(run: Run) -> dict[Key, list[int]]:
    """Ids that were reported of samples that are not submitted."""
    found: dict[Key, list[int]] = {}
    for record, _ in journal_entries(run.run_dir):
        if record["type"] == "progressed":
            ids = [int.from_bytes(record["ids"][at : at + 4], "little") for at in range(0, len(record["ids"]), 4)]
            found[record["seq"], record["sample_index"]] = found.get((record["seq"], record["sample_index"]), [])[: record["start"]] + ids
        elif record["type"] == "submitted":
            found.pop((record["seq"], record["sample_index"]), None)
    return found


def submitted(run: Run, keys: set[Key]) -> dict[Key, trajectory_pb2.Trajectory] | None:
    """What became of these samples; None while one is missing."""
    found = {
        (record["seq"], record["sample_index"]): trajectory_pb2.Trajectory.FromString(payload)
        for record, payload in journal_entries(run.run_dir)
        if record["type"] == "submitted" and (record["seq"], record["sample_index"]) in keys
    }
    return found if found.keys() == keys else None


def ids_of(packed: trajectory_pb2.PackedArray) -> list[int]:
    return [int(token) for token in unpack(packed)]


def fresh(run: Run, samples: list[trajectory_pb2.Trajectory]) -> list[list[float]]:
    """Another process's log-probs, from the trainer's cuts, each token under its span's weights with all KV made anew."""
    step_of = {line["version"]: line["step"] for line in run.metrics()} | {1: 0}
    items: list[dict[str, Any]] = [
        {"prompt": ids_of(one.prompt_ids), "completion": ids_of(one.completion_ids), "spans": [[step_of[span.version], span.start, span.end] for span in one.spans]} for one in samples
    ]
    question, answer = run.folder / "question.json", run.folder / "answer.json"
    question.write_text(json.dumps({"model": str(run.model), "checkpoints": str(run.run_dir / "checkpoints"), "dtype": "float32", "samples": items}))
    subprocess.run([sys.executable, "-m", "tests.system.fresh", str(question), str(answer)], cwd=ROOT, check=True, timeout=300)
    return json.loads(answer.read_text())["logprobs"]  # type: ignore[no-any-return]


def half_drawn(run: Run) -> dict[Key, list[int]] | None:
    """Several samples of which at least 64 tokens, and not nearly all, are reported."""
    found = {key: ids for key, ids in unfinished(run).items() if 64 <= len(ids) < 300}
    return found if len(found) >= 3 else None


def test_samples_of_a_killed_replica_are_drawn_on_by_another_from_their_last_report(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner(
            sampling={"group_size": 4, "max_new_tokens": 400}, lease={"report_every_tokens": EVERY_TOKENS}, checkpoint={"every_steps": 1, "keep": 1000},
            push={"collective_timeout_s": 30, "deadline_s": 60, "prepare_s": 10},
        )  # fmt: skip
        settings: dict[str, Any] = {"engine": "vllm", "max_model_len": 512, "max_num_seqs": 8, "in_flight": "recompute"}
        run.start_rollout("doomed", **settings)
        wait_for("the first replica to serve", partial(serving, run, "doomed"), limit_s=240)
        run.wait_steps(1, limit_s=240)
        known = wait_for("samples that are half drawn and reported", partial(half_drawn, run), limit_s=120, every_s=0.2)
        run.services["doomed"].kill()
        known = {**known, **{key: ids for key, ids in unfinished(run).items() if key in known}}  # what it said until it died
        run.start_rollout("heir", **settings)
        done = wait_for("the heir to finish what the dead one began", partial(submitted, run, set(known)), limit_s=300, every_s=0.5, guard=run.learner_must_live)
        run.wait_steps(len(run.metrics()) + 2, limit_s=240)
        status = run.status()
        assert status is not None and status.num_continued_samples >= len(known)
        early = {key for key, ids in known.items() if ids_of(done[key].completion_ids)[: len(ids)] != ids}
        assert not early, f"{early} were not drawn on from what was reported"
        heirs = [one for key, one in sorted(done.items()) if one.replica_id == "heir"]
        assert len(heirs) >= 3
        saved = run.saved_steps()
        step_of = {line["version"]: line["step"] for line in run.metrics()} | {1: 0}
        whole = [one for one in heirs if all(step_of.get(span.version, -1) in saved for span in one.spans)]
        assert len(whole) >= 3
        worst = max(
            abs(a - b) for one, values in zip(whole, fresh(run, whole), strict=True) for a, b in zip([float(value) for value in unpack(one.logprobs)], values, strict=True)
        )
        print(json.dumps({"continued": len(heirs), "tokens_kept": sum(map(len, known.values())), "spans": [[(s.version, s.start, s.end) for s in one.spans] for one in whole][:4], "worst_difference": worst}))
        assert worst < TOLERANCE
        audit = subprocess.run([sys.executable, "-m", "deploy.cli", "audit", str(run.run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert audit.returncode == 0, audit.stdout + audit.stderr
