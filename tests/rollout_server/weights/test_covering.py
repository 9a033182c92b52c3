"""Eight cases that cover families × ties × biases × ranks × replicas × tensor parallelism: FSDP2 ranks push to real vLLM engines.

Each engine starts with other weights than are pushed, and then draws what transformers would with those; a second push of the same
weights changes nothing. Bytes held at once are bounded at every rank and receiver. `pytest -m slow -s` prints the table.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from protos.learner.v1alpha1 import learner_pb2
from rollout_server.config import RolloutConfig
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference
from tests.rollout_server.reference import Sample, largest_difference
from tests.rollout_server.weights.covering_rank import BUCKET_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PROMPT = [10 + i % 200 for i in range(40)]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 259, "max_position_embeddings": 512}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    family: str
    config: Any
    tied: bool
    ranks: int
    replicas: int = 1
    workers: int = 1  # tensor parallel, of each replica
    biases: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}{'-biases' * self.biases}-{'tied' if self.tied else 'untied'}-{self.ranks}x{self.replicas}{'-tp2' * (self.workers > 1)}"


CASES = [
    Case(family="llama", config=LlamaConfig, tied=True, ranks=1),
    Case(family="qwen2", config=Qwen2Config, tied=True, biases=True, ranks=1, replicas=2),  # of q, k and v
    Case(family="llama", config=LlamaConfig, tied=False, biases=True, ranks=2, replicas=2),  # of every matrix but the head
    Case(family="qwen3", config=Qwen3Config, tied=True, ranks=2, workers=2),
    Case(family="gemma", config=GemmaConfig, tied=True, ranks=2),
    Case(family="qwen2", config=Qwen2Config, tied=False, biases=True, ranks=4),
    Case(family="mistral", config=MistralConfig, tied=False, ranks=4),
    Case(family="qwen3", config=Qwen3Config, tied=False, ranks=4, replicas=2),
]
TABLE: list[str] = []


def folder_of(case: Case, folder: Path, *, seed: int, tokenizer: Path) -> Path:
    """The case's model with weights of `seed`; no parameter is left at 0 or 1."""
    more = {"attention_bias": True, "mlp_bias": True} if case.config is LlamaConfig and case.biases else {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(case.config(**SIZES, **more, tie_word_embeddings=case.tied, pad_token_id=0, bos_token_id=1, eos_token_id=2), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


class Fleet:
    """The trainer ranks of one world size, for one case after the other."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = Path(tempfile.mkdtemp())
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
        command = [sys.executable, str(HERE / "covering_rank.py")]
        self.ranks = [
            subprocess.Popen([*command, str(rank), str(world), str(self._folder / "init")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) for rank in range(world)
        ]  # fmt: skip

    def ask(self, line: str) -> list[dict[str, Any]]:
        """Every rank's answer."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(line + "\n")
            rank.stdin.flush()
        answers = []
        for rank in self.ranks:
            assert rank.stdout is not None
            answer = rank.stdout.readline()
            assert answer, f"a trainer rank ended with {rank.wait(5)}"
            answers.append(json.loads(answer))
        return answers

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[int, Fleet]]:
    made: dict[int, Fleet] = {}
    yield made
    for fleet in made.values():
        fleet.close()
    print("\n| family | head | biases | ranks | replicas | served bytes | peak at a rank | peak at a receiver | log-probs off by at most |\n|---|---|---|---|---|---|---|---|---|\n" + "\n".join(TABLE))


def fleet_of(made: dict[int, Fleet], world: int) -> Fleet:
    """One fleet at a time."""
    if world not in made:
        for other in made.values():
            other.close()
        made.clear()
        made[world] = Fleet(world)
    return made[world]


async def push(case: Case, fleet: Fleet, engines: list[VllmEngine], port: int, version: int) -> tuple[int, int, int]:
    """A new version to all engines, committed: (bytes of the version, most held at a rank, most held at a receiver)."""
    written = await asyncio.to_thread(fleet.ask, f"write {version}")
    spec = learner_pb2.GroupSpec(
        transport=learner_pb2.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=port, group_key=case.name, num_owners=case.ranks, num_receivers=case.replicas * case.workers, collective_timeout_s=60.0,
    )  # fmt: skip
    sending = asyncio.create_task(asyncio.to_thread(fleet.ask, f"send {spec.SerializeToString().hex()} {version}"))
    manifest = bytes.fromhex(written[0]["manifest"])

    async def receive(number: int) -> None:
        own = learner_pb2.GroupSpec.FromString(spec.SerializeToString())
        own.receiver_rank = 1 + number * case.workers
        await engines[number].receive(own.SerializeToString(), manifest, 120.0)

    await asyncio.gather(*[receive(number) for number in range(case.replicas)])
    sent = await sending
    assert [answer["error"] for answer in sent] == [""] * case.ranks
    assert sum(answer["sent_bytes"] for answer in sent) == written[0]["total_bytes"]
    peaks = [peak for engine in engines for peak in await engine._rpc("headrace_peak_bytes", timeout_s=30.0)]
    for engine in engines:
        await engine.commit(version)
    return written[0]["total_bytes"], max(answer["peak_bytes"] for answer in sent), max(peaks)


async def drawn(engine: VllmEngine, name: str, **more: Any) -> Sample:
    return await Sample(engine, PROMPT, name, **{"temperature": 1.0, "max_new_tokens": 32, "seed": 5} | more).task


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_what_was_pushed_is_what_is_drawn_from_and_a_second_push_of_it_changes_nothing(
    case: Case, fleets: dict[int, Fleet], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    base, pushed = (folder_of(case, tmp_path / f"{seed}", seed=seed, tokenizer=tiny_model) for seed in (1, 2))
    fleet = fleet_of(fleets, case.ranks)
    fleet.ask(f"load {pushed} {tmp_path / 'shm'}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    engines = [VllmEngine(RolloutConfig(model=str(base), max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20, threads=1, tensor_parallel=case.workers), base) for _ in range(case.replicas)]
    try:
        for engine in engines:
            await engine.start()
        base_sample = await drawn(engines[0], "base")
        total, at_rank, at_receiver = await push(case, fleet, engines, store.port, 1)
        model, off = reference.load(pushed), []
        for engine in engines:
            sample = await drawn(engine, "pushed")
            off.append(largest_difference(sample.logprobs, reference.logprobs(model, PROMPT, sample.ids)))
        greedy = [await drawn(engine, "greedy", temperature=0.0) for engine in engines]
        await push(case, fleet, engines, store.port, 2)
        again = [await drawn(engine, "again", temperature=0.0) for engine in engines]
    finally:
        for engine in engines:
            await engine.stop()
    assert max(off) < 1e-4
    # The control: under the base weights, which the engines started with, the pushed model's log-probs are elsewhere.
    assert largest_difference(base_sample.logprobs, reference.logprobs(model, PROMPT, base_sample.ids)) > 0.05
    for first, second in zip(greedy, again, strict=True):  # faults.md 10: bit for bit
        assert (first.ids, first.logprobs) == (second.ids, second.logprobs)
        assert second.last is not None and [span.version for span in second.last.spans] == [2]
    # A rank sends straight from the mapped file, a bucket at a time; a receiver holds its own staging and two buckets. Of two workers each
    # keeps half of the matrices, all of the norms and its half of the vocabulary padded from 259 to 320.
    assert at_rank <= BUCKET_BYTES
    assert at_receiver <= (total if case.workers == 1 else 0.66 * total) + 2 * BUCKET_BYTES
    replicas = f"{case.replicas}" + (", tensor parallel 2" if case.workers > 1 else "")
    TABLE.append(f"| {case.family} | {'tied' if case.tied else 'own'} | {'yes' if case.biases else 'no'} | {case.ranks} | {replicas} | {total:,} | {at_rank:,} | {at_receiver:,} | {max(off):.1e} |")
    print(TABLE[-1], flush=True)
