"""A step of the learner: `python -m benchmarks.learner --json`.

`vs_bare`: a whole train_step (from samples: packing, masks, loss, metrics, clipping, optimizer) against a bare loop over the same packed tensors, made
beforehand. `vs_padded`: against padded batches of the same samples. Groups of 8, log-normal lengths with p99 = 8 medians. On an H200 `mfu` besides:
arithmetic of a step (benchmarks/_learner_shapes.flops) over 989 TFLOP/s, and over the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import _learner_peers as peers
from benchmarks import _learner_shapes as shapes
from benchmarks import _line
from benchmarks._line import Bar, Pair
from learner.algorithm_config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.trainer.engine import Engine, unit_of
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.packing import Plan, WeightedSample, pack
from learner.trainer.samples import Sample
from learner.trainer.update import train_step

H200_FLOPS = 989e12  # bfloat16, dense, by the data sheet
MFU_BARS = {"1.7B": 0.45, "4B": 0.40}
Recompute = Literal["none", "selective", "full"]


class Ours:
    """The trainer as __main__ builds it, without the services."""

    def __init__(self, name: str, mesh: DeviceMesh, *, row_tokens: int, recompute: Recompute = "none", every: int = 2) -> None:
        cuda = mesh.device_type == "cuda"
        self.row_tokens, self.config = row_tokens, shapes.shape(name)
        self.engine = Engine(attention="flex" if cuda else "pieces", compile=cuda, unit_tokens=unit_of(row_tokens), recompute=recompute, recompute_every=every, reshard=recompute != "none")
        self.policy = shapes.policy_of(self.config, mesh, self.engine, torch.bfloat16 if cuda else torch.float32)
        self.optimizer = Optimizer(self.policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-6))
        self.objective = make_objective(AlgorithmConfig(), max_new_tokens=4096)

    def step(self, made: Sequence[Sample]) -> None:
        train_step(self.policy, self.optimizer, made, [shapes.minibatch(made)], objective=self.objective, row_tokens=self.row_tokens, share_prefix=True)


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds, the device's own work included."""
    _settle(device)
    began_s = time.perf_counter()
    work()
    _settle(device)
    return time.perf_counter() - began_s


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(work: Callable[[], None]) -> float:
    """Memory that a step takes on top of what is held before it (weights and moments), in GiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def matmul_flops(size: int = 8192, rounds: int = 20) -> float:
    """FLOP/s of a bfloat16 matrix product here."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right

    def multiply() -> None:
        for _ in range(rounds):
            left @ right

    seconds = timed(multiply, torch.device("cuda"))
    return rounds * 2 * size**3 / seconds


def mfu(name: str, mesh: DeviceMesh, *, num_tokens: int, recompute: Recompute, every: int = 2, matmul: float, steps: int = 6) -> dict[str, Any]:
    """One row of num_tokens a step; the arithmetic done over what the chip could do."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ours = Ours(name, mesh, row_tokens=num_tokens, recompute=recompute, every=every)
    made = shapes.one_row(num_tokens, prompt_tokens=64, vocabulary=150_000)
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in made], row_tokens=num_tokens, share_prefix=True)
    first_s = timed(lambda: ours.step(made), torch.device("cuda"))
    for _ in range(2):
        ours.step(made)
    seconds = statistics.median(timed(lambda: ours.step(made), torch.device("cuda")) for _ in range(steps))
    work = shapes.flops(ours.config, rows)
    return {
        "model": name, "recompute": f"{recompute}/{every}" if recompute == "selective" else recompute, "rows": len(rows), "documents": len(made), "input_tokens": sum(r.ids.numel() for r in rows),
        "step_s": round(seconds, 4), "tokens_per_s": round(num_tokens / seconds), "mfu": round(work / seconds / H200_FLOPS, 4), "mfu_of_measured_matmul": round(work / seconds / matmul, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1), "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
        "room_gib": round((torch.cuda.get_device_properties(0).total_memory - torch.cuda.max_memory_reserved()) / 2**30, 1), "first_step_s": round(first_s, 1),
    }  # fmt: skip


def comparison(name: str, mesh: DeviceMesh, *, num_groups: int, prompt_tokens: int, median_tokens: int, row_tokens: int, padded_batch: int, num_pairs: int, until_s: float) -> tuple[list[Pair], dict[str, Any]]:
    """Seconds of a step of each, in turns, and what was seen beside."""
    device = torch.device(mesh.device_type)
    ours = Ours(name, mesh, row_tokens=row_tokens)
    made = shapes.samples(num_groups=num_groups, group_size=8, prompt_tokens=prompt_tokens, median_tokens=median_tokens, vocabulary=ours.config.vocab_size - 100)
    advantages = shapes.minibatch(made).advantages
    weighted = [WeightedSample(sample=s, advantage=advantages[s.group_id, s.sample_index]) for s in made]
    plan = Plan(weighted, row_tokens=row_tokens, share_prefix=True)
    rows = plan.rows(num_rows=plan.num_rows, pairs_per_token=ours.policy.pairs_per_token)
    num_tokens = sum(s.num_trained_tokens for s in made)
    bare = peers.Bare(shapes.shape(name), mesh, torch.bfloat16 if device.type == "cuda" else torch.float32)
    packed = peers.packed(rows, device, [ours.engine.length_of(row.ids.numel()) for row in rows])
    padded = peers.padded(made, [advantages[s.group_id, s.sample_index] for s in made], device, batch_size=padded_batch, multiple=256 if device.type == "cuda" else 1)
    work: dict[str, Callable[[], None]] = {"ours": lambda: ours.step(made), "bare": lambda: bare.step(packed, num_tokens), "padded": lambda: bare.step(padded, num_tokens)}
    notes: dict[str, Any] = {"model": name, "samples": len(made), "trained_tokens": num_tokens, "packed_tokens": sum(r.ids.numel() for r in rows), "rows": len(rows), "padded_tokens": sum(b.ids.numel() for b in padded)}
    _line.tell(notes)
    notes["first_s"] = {}
    pairs: list[Pair] = []
    for peer in ("bare", "padded"):  # one after the other: of a run that is cut off the first is whole
        for key in {"ours", peer} - notes["first_s"].keys():
            notes["first_s"][key] = round(timed(work[key], device), 1)  # compiles
        _line.tell({"model": name, "first_s": notes["first_s"]})
        measures = {key: lambda key=key: timed(work[key], device) for key in ("ours", peer)}
        pairs += _line.interleaved(measures, num_pairs=num_pairs, seen=lambda pair: _line.tell({"model": name, **pair}), until_s=until_s)
    notes["tokens_per_s"] = {key: round(num_tokens / statistics.median(seconds)) for key in work if (seconds := [pair[key] for pair in pairs if key in pair])}
    if device.type == "cuda":
        work["whole_logits"], work["plain"] = lambda: bare.with_whole_logits(packed[0], num_tokens), lambda: bare.plainly(max(padded, key=lambda batch: batch.ids.numel()), num_tokens)
        notes["peak_gib_on_top"] = {key: _peak_or_none(each) for key, each in work.items()}
        _line.tell({"model": name, "peak_gib_on_top": notes["peak_gib_on_top"]})
    return pairs, notes


def _peak_or_none(work: Callable[[], None]) -> float | None:
    """None where it does not fit."""
    try:
        return round(peak_gib(work), 2)
    except torch.OutOfMemoryError:
        return None


def bars_of(pairs: Sequence[Pair], suffix: str) -> list[Bar]:
    """Without those that the run was cut off before it had enough pairs of."""
    wanted = (("bare", 0.95), ("padded", 1.8))
    held = {peer: [pair for pair in pairs if peer in pair] for peer, _ in wanted}
    return [Bar(name=f"vs_{peer}{suffix}", value=_line.ratio(held[peer], peer, "ours"), op=">=", bar=bar) for peer, bar in wanted if len(held[peer]) >= _line.MIN_PAIRS]


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=_line.MIN_PAIRS)
    parser.add_argument("--shapes", default="", help="models of the comparison, the first one's values without its name; default 0.6B on a GPU")
    parser.add_argument("--mfu", default="", help="shapes to measure mfu of, for instance 0.6B/none,1.7B/none,4B/selective/3,1.7B/none@32768 (CUDA only)")
    parser.add_argument("--only-mfu", action="store_true", help="without the comparison")
    parser.add_argument("--tokens", type=int, default=16_384, help="packed tokens of a row on a GPU")
    parser.add_argument("--groups", type=int, help="groups of 8 samples a step; default 16 on a GPU, 4 on a CPU")
    parser.add_argument("--padded-batch", type=int, default=8, help="sequences of a padded batch: fewer where two models lie side by side (4 B: 2, with --tokens 4096)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no part and no pair begins after so many seconds")
    options = parser.parse_args()
    cuda, until_s = torch.cuda.is_available(), time.monotonic() + options.limit_s
    if cuda:
        _line.watch(30.0)
    with tempfile.TemporaryDirectory() as folder:
        if cuda:
            torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        mesh = init_device_mesh("cuda" if cuda else "cpu", (1,), mesh_dim_names=("shard",))
        names = [] if options.only_mfu else (options.shapes or ("0.6B" if cuda else "cpu")).split(",")
        bars, pairs, notes, left_out = _compared(names, mesh, options, until_s=until_s)
        wanted = options.mfu.split(",") if cuda and options.mfu else []
        found = [_try_mfu(part, mesh, options.tokens) for part in wanted if time.monotonic() < until_s]
        left_out += wanted[len(found) :]
        for name in dict.fromkeys(part["model"] for part in found):
            bars.append(Bar(name=f"mfu_{name}", value=max(part.get("mfu", 0.0) for part in found if part["model"] == name), op=">=", bar=MFU_BARS.get(name, 0.0)))
        dist.destroy_process_group()
    notes |= {key: value for key, value in (("mfu", found), ("left_out", left_out)) if value}
    _line.report("learner", bars=bars, pairs=pairs, packages=("torch", "transformers"), quiet=options.json, notes=notes, finished=not left_out)


def _compared(names: Sequence[str], mesh: DeviceMesh, options: argparse.Namespace, *, until_s: float) -> tuple[list[Bar], list[Pair], dict[str, Any], list[str]]:
    """Bars, pairs, notes, and the names that the time did not suffice for."""
    cuda = mesh.device_type == "cuda"
    size = {"prompt_tokens": 256, "median_tokens": 200, "row_tokens": options.tokens} if cuda else {"prompt_tokens": 48, "median_tokens": 40, "row_tokens": 1024}
    size |= {"num_groups": options.groups or (16 if cuda else 4), "padded_batch": options.padded_batch, "num_pairs": max(options.pairs, _line.MIN_PAIRS)}
    bars: list[Bar] = []
    all_pairs: list[Pair] = []
    notes: dict[str, Any] = {}
    left_out = []
    for number, name in enumerate(names):
        pairs: list[Pair] = []
        if time.monotonic() < until_s:
            try:
                pairs, notes[name] = comparison(name, mesh, until_s=until_s, **size)
            except torch.OutOfMemoryError as error:
                notes[name] = {"out_of_memory": str(error)[:300]}
                _line.tell({"model": name, **notes[name]})
            all_pairs += [{"number": float(number), **pair} for pair in pairs]
            _free()
        found = bars_of(pairs, f"_{name}" if number else "")
        bars += found
        left_out += [] if len(found) == 2 else [name]
    return bars, all_pairs, notes, left_out


def _free() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _try_mfu(text: str, mesh: DeviceMesh, num_tokens: int) -> dict[str, Any]:
    shape, _, tokens = text.partition("@")
    name, recompute, *every = shape.split("/")
    try:
        found = mfu(name, mesh, num_tokens=int(tokens or num_tokens), recompute=recompute, every=int(every[0]) if every else 2, matmul=matmul_flops())  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        found = {"model": name, "recompute": text, "out_of_memory": str(error)[:200]}
    _free()
    _line.tell(found)
    return found


if __name__ == "__main__":
    main()
