"""Two FSDP2 ranks push to two real vLLM replicas while requests are in flight; what is served is what the trainers' cuts hold."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.system.clients import Generated, stream_until
from tests.system.harness import ROOT, Run, running, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4  # float32 on both sides, different kernels


def loaded_version(run: Run, name: str) -> int:
    """What a replica serves; 0 before its first version."""
    replica = run.replica(name)
    return replica.loaded_version if replica is not None else 0


def under_load(run: Run, num_steps: int) -> list[Generated]:
    """Long streams at both replicas, by plain clients, until `num_steps` steps are over."""
    stop = threading.Event()
    done: list[Generated] = []
    errors: list[BaseException] = []
    addresses = [run.services[name].address() for name in ("one", "two")]

    async def load() -> None:
        over = asyncio.Event()
        prompts = [[65 + i, 66, 67 + i] for i in range(3)]
        streams = [asyncio.create_task(stream_until(address, prompts, over, max_new_tokens=160)) for address in addresses]
        while not stop.is_set() and not any(task.done() for task in streams):
            await asyncio.sleep(0.05)
        over.set()
        done.extend(item for some in await asyncio.gather(*streams) for item in some)

    def target() -> None:
        try:
            asyncio.run(load())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        run.wait_steps(len(run.metrics()) + num_steps, limit_s=400)
    finally:
        stop.set()
        thread.join(120)
    assert not errors, errors
    return done


def evaluated_afresh(run: Run, generated: list[Generated]) -> list[list[float]]:
    """By another process, from the trainers' checkpoints."""
    step_of = {line["version"]: line["step"] for line in run.metrics()} | {1: 0}
    request = {
        "model": str(run.model), "checkpoints": str(run.run_dir / "checkpoints"), "dtype": "float32",
        "samples": [{"prompt": g.prompt, "completion": g.completion, "spans": [[step_of[v], a, b] for v, a, b in g.spans]} for g in generated],
    }
    question, answer = run.folder / "question.json", run.folder / "answer.json"
    question.write_text(json.dumps(request))
    subprocess.run([sys.executable, "-m", "tests.system.fresh", str(question), str(answer)], cwd=ROOT, check=True, timeout=300)
    return json.loads(answer.read_text())["logprobs"]


def test_two_ranks_push_to_two_vllm_replicas_under_load_and_every_token_has_its_versions_log_prob(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        calls = tmp_path / "full_tensor.jsonl"
        run.start_reward()
        plugins = f"{ROOT / 'tests/system/plugins'}:{ROOT}"
        run.start_learner(
            env={"PYTHONPATH": plugins, "HEADRACE_FULL_TENSOR_LOG": str(calls)}, trainer={"ranks": 2}, checkpoint={"every_steps": 1, "keep": 1000},
            push={"collective_timeout_s": 30, "deadline_s": 60, "prepare_s": 10},
        )
        for name in ("one", "two"):
            run.start_rollout(name, engine="vllm", kv_cache_bytes=128 << 20, max_num_seqs=32)
        for name in ("one", "two"):  # either may be the first to be there; streams want both
            wait_for(f"replica {name} to serve", partial(loaded_version, run, name), limit_s=240)
        run.wait_steps(2, limit_s=240)
        generated = under_load(run, num_steps=8)
        lines = run.metrics()
        pushes = [line["push"] for line in lines]
        epochs = [json.loads(line) for line in (run.run_dir / "pushes.jsonl").read_text().splitlines()]
        whole = [epoch for epoch in epochs if [rank["rank"] for rank in epoch["ranks"]] == [0, 1] and all(rank["ok"] for rank in epoch["ranks"])]
        print(json.dumps({"push": pushes[-1], "last_epoch": epochs[-1]}, indent=1))
        assert len(whole) >= 5
        model_bytes = sum(rank["bytes_rooted"] for rank in whole[-1]["ranks"])
        for rank in whole[-1]["ranks"]:
            assert 0.4 * model_bytes < rank["bytes_rooted"] < 0.6 * model_bytes, "each rank sends its own shards and no more"
            assert rank["peak_bytes"] <= 1 << 16, "a rank holds one bucket at a time"
        assert pushes[-1]["num_pushed"] >= 5
        assert pushes[-1]["bytes_rooted"] > 0
        for call in map(json.loads, calls.read_text().splitlines() if calls.exists() else []):
            assert call["num_elements"] == 1, "only the norm of the gradients may be made whole"
            assert not any("learner/weights" in name for name in call["callers"])
        mixed = [g for g in generated if len(g.spans) > 1]
        assert mixed, "no request was in flight during an update"
        assert all(len(g.completion) == 160 for g in generated), "an update ended a request"
        step_of, saved = {line["version"]: line["step"] for line in run.metrics()} | {1: 0}, run.saved_steps()
        whole_cuts = [g for g in generated if all(step_of.get(version, -1) in saved for version, _, _ in g.spans)]
        chosen = [g for g in whole_cuts if len(g.spans) > 1][:12] + [g for g in whole_cuts if len(g.spans) == 1][:4]
        assert any(len(g.spans) > 1 for g in chosen)
        fresh = evaluated_afresh(run, chosen)
        worst = max(abs(a - b) for g, values in zip(chosen, fresh, strict=True) for a, b in zip(g.logprobs, values, strict=True))
        print(json.dumps({"requests": len(generated), "mixed": len(mixed), "versions": len({v for g in generated for v, _, _ in g.spans}), "worst_difference": worst}))
        assert worst < TOLERANCE
