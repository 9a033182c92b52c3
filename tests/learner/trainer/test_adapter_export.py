"""A run that trains adapters, from its first step to what it leaves: merged weights, an exported cut, and a folder that peft reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, Qwen2Config

from deploy.checkpoints import export as export_cut_of
from learner.gateway import cuts
from learner.sums import write_sums
from learner.trainer import loop
from learner.trainer.cut_export import export_cut
from learner.trainer.export import export
from learner.trainer.model import load_policy
from learner.weights.lora import base_parameters, targets_of
from tests.learner.trainer import rig
from tests.learner.trainer.fake_feed import FakeFeed, serving
from tests.learner.trainer.test_loop import batches, config, parts

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


@pytest.fixture(scope="module")
def run(mesh: DeviceMesh, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor], Path]:
    """Run folder, base model, the adapters' live weights at the end, and the folder that the run leaves. A model with biases under its targets."""
    root = tmp_path_factory.mktemp("run")
    folder = rig.saved(Qwen2Config(vocab_size=rig.VOCABULARY, hidden_size=36, intermediate_size=51, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.2), root / "base")
    settings = config(root / "run", folder, trainer={"row_tokens": 40, "lora": LORA})
    before = {name: p.detach().clone() for name, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    with serving(FakeFeed(batches, num_steps=4)) as address:
        policy = load_policy(folder, mesh=mesh, compute_dtype=torch.float32, temperature=rig.TEMPERATURE, lora=settings.trainer.lora, seed=3)
        made = parts(mesh, settings, address, folder, policy=policy)
        end = loop.run(made, 0)
        made.saver.wait()
        assert end.finished and made.saver.report.num_saved == 2
        export(snapshot_dir=end.published.snapshot.folder, model_dir=folder, out_dir=root / "run" / "model")
        made.publisher.pusher.close(timeout_s=5)
        made.feed.close()
    assert all(torch.equal(p, before[name]) for name, p in base_parameters(policy.causal_lm))
    live = {name: 2.0 * target.b.detach() @ target.a.detach() for name, target in targets_of(policy.causal_lm).items()}
    assert len(live) == 2 * 3 and all(float(value.abs().max()) > 1e-4 for value in live.values())
    _mark(root / "run", folder)
    return root / "run", folder, live, root / "run" / "model"


def _mark(run_dir: Path, folder: Path) -> None:
    """What gateway and launcher add: the cut's own account and the resolved configuration."""
    (run_dir / "resolved").mkdir()
    (run_dir / "resolved" / "learner.json").write_text(json.dumps({"model": str(folder), "trainer": {"served_dtype": "float32", "lora": LORA}}))
    saved = next(path for path in (run_dir / "checkpoints").glob("step-000004*"))
    if not saved.name.endswith(".tmp"):
        saved = saved.rename(saved.with_name("step-000004.tmp"))
    write_sums(saved, [path.name for path in saved.iterdir() if not path.name.startswith("sums")], saved / "sums-0.json")
    cuts.write(saved, cuts.Cut(folder=cuts.folder_of(run_dir / "checkpoints", 4), run_id="r1", policy_step=4, lineage=0, segment=0, offset=4), {"account": {}}, [], lambda key: b"")


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.arange(1, 20)[None]).logits[0].float(), -1)


def test_the_run_s_model_the_merged_cut_and_the_adapter_say_the_same(run: tuple[Path, Path, dict[str, torch.Tensor], Path], tmp_path: Path) -> None:
    run_dir, base, live, left = run
    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    untrained = logprobs(expected)
    with torch.no_grad():
        for name, change in live.items():
            expected.get_parameter(f"{name}.weight").add_(change)
    wanted = logprobs(expected)
    assert float((wanted - untrained).abs().max()) > 1e-3
    export_cut_of(run_dir, tmp_path / "merged")
    export_cut_of(run_dir, tmp_path / "adapter", adapter=True)
    merged, snapshot = load_file(tmp_path / "merged" / "model.safetensors"), load_file(left / "model.safetensors")
    assert merged.keys() == snapshot.keys() and all(torch.equal(merged[name], snapshot[name]) for name in merged)  # byte for byte what replicas got last
    alone = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(tmp_path / "adapter"))
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32), AutoModelForCausalLM.from_pretrained(left, dtype=torch.float32), alone):
        torch.testing.assert_close(logprobs(model), wanted, atol=1e-5, rtol=0)
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 2 * 2 * 3


def test_a_cut_of_adapters_whose_scaling_nobody_knows_and_an_adapter_of_none_are_refused(run: tuple[Path, Path, dict[str, torch.Tensor], Path], tmp_path: Path) -> None:
    run_dir, base, _, _ = run
    with pytest.raises(ValueError, match=r"holds adapters of 6 modules, and nothing says their trainer.lora.rank and alpha"):
        export_cut(cut=run_dir / "checkpoints" / "step-000004", model_dir=base, out_dir=tmp_path / "out", dtype="float32")
    resolved = run_dir / "resolved" / "learner.json"
    said = resolved.read_text()
    resolved.write_text(json.dumps({"model": str(base)}))
    try:
        with pytest.raises(ValueError, match="trained without trainer.lora: it has no adapters; leave --adapter out"):
            export_cut_of(run_dir, tmp_path / "out", adapter=True)
    finally:
        resolved.write_text(said)
