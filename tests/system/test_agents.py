"""An agent written with the OpenAI client trains through the endpoint in a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.audit.program import audit
from protos.arrays import unpack
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.system.harness import ROOT, Run, running
from tests.system.records import journal_entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4  # float32 on both sides, different kernels
STEPS = 4


def trained(run: Run) -> list[trajectory_pb2.Trajectory]:
    return [trajectory_pb2.Trajectory.FromString(payload) for record, payload in journal_entries(run.run_dir) if record["type"] == "submitted"]


def strands(t: trajectory_pb2.Trajectory) -> list[Any]:
    return [t, *t.more_strands]


def ids_of(packed: trajectory_pb2.PackedArray) -> list[int]:
    return [int(token) for token in unpack(packed)]


def fresh(run: Run, words: list[Any]) -> list[list[float]]:
    """Another process's log-probs from the trainer's cuts, each token under the weights of its span's version."""
    step_of = {line["version"]: line["step"] for line in run.metrics()} | {1: 0}
    items = [{"prompt": ids_of(w.prompt_ids), "completion": ids_of(w.completion_ids), "spans": [[step_of[s.version], s.start, s.end] for s in w.spans]} for w in words]
    question, answer = run.folder / "question.json", run.folder / "answer.json"
    question.write_text(json.dumps({"model": str(run.model), "checkpoints": str(run.run_dir / "checkpoints"), "dtype": "float32", "samples": items}))
    subprocess.run([sys.executable, "-m", "tests.system.fresh", str(question), str(answer)], cwd=ROOT, check=True, timeout=300)
    return json.loads(answer.read_text())["logprobs"]  # type: ignore[no-any-return]


def test_an_agent_of_the_openai_client_trains_through_the_endpoint(tmp_path: Path, tiny_model: Path) -> None:
    agent = {"name": "agent", "use": "tests.rollout_server.endpoint.agents:work", "agent": True, "sessions_per_process": 8, "run_timeout_s": 120, "load_timeout_s": 120}
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(steps=STEPS, sampling={"group_size": 4, "max_new_tokens": 220}, checkpoint={"every_steps": 1, "keep": 100})
        run.start_rollout("only", openai={"address": "127.0.0.1:0"}, environments=[agent])
        assert learner.process.wait(600) == 0, learner.tail()
        lines = [line for line in run.metrics() if "turns_mean" in line]
        assert len(lines) == STEPS and all(line["turns_mean"] == 3 and line["strands_mean"] == 2 and line["environment_tokens_mean"] > 0 for line in lines)
        assert all(line["num_usable"] == line["num_samples"] == 8 for line in lines) and any(line["grad_norm"] > 0 for line in lines)
        samples = trained(run)
        assert len(samples) >= 8 * STEPS and all(t.own_prompt and len(t.turns) == 3 and not t.unusable_reason for t in samples)
        saved = run.saved_steps()
        step_of = {line["version"]: line["step"] for line in lines} | {1: 0}
        known = [t for t in samples if all(step_of.get(span.version, -1) in saved for w in strands(t) for span in w.spans)]
        versions = {span.version for t in known for w in strands(t) for span in w.spans}
        words = [w for t in known for w in strands(t)]
        worst, num_tokens = 0.0, 0
        for w, values in zip(words, fresh(run, words), strict=True):
            mask = ids_of(w.loss_mask) if w.loss_mask.data else [1] * len(values)
            for drawn, again, counts in zip((float(x) for x in unpack(w.logprobs)), values, mask, strict=True):
                worst, num_tokens = (max(worst, abs(drawn - again)), num_tokens + 1) if counts else (worst, num_tokens)
        print(json.dumps({"samples": len(known), "strands": len(words), "tokens": num_tokens, "versions": sorted(versions), "worst_difference": worst}))
        assert worst < TOLERANCE and len(versions) >= 2 and num_tokens >= 18 * 8
        assert [str(finding) for finding in audit(run.run_dir).findings.found] == []
