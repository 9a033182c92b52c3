"""Compute in bfloat16 on float32 master weights, on one rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from learner.trainer.engine import Engine
from learner.trainer.model import load_policy
from learner.trainer.packing import WeightedSample, pack
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import whole


def test_bfloat16_compute_keeps_float32_master_weights_and_gradients(tmp_path: Path) -> None:
    # faults.md 89: moments and weights in bfloat16 would swallow updates of 1e-6
    folder = rig.llama(tmp_path / "llama")
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in rig.samples(2, 2)], row_tokens=64, share_prefix=True)
    with rig.group(0, 1, tmp_path / "store") as mesh:
        half = load_policy(folder, mesh=mesh, compute_dtype=torch.bfloat16, temperature=1.0)
        full = load_policy(folder, mesh=mesh, compute_dtype=torch.float32, temperature=1.0)
        found, exact = half(rows[0]), full(rows[0])
        found.sum().backward()
        assert found.dtype == torch.float32 and 0 < float((found - exact).detach().abs().max()) < 0.2
        for parameter in half.parameters():
            assert parameter.dtype == torch.float32 and parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert all(isinstance(p, DTensor) for p in half.parameters()) and not any(isinstance(p, DTensor) for p in full.parameters())


def test_what_is_computed_again_in_the_backward_pass_changes_nothing(tmp_path: Path) -> None:
    folder = rig.llama(tmp_path / "llama")
    (row,) = pack([WeightedSample(sample=s, advantage=1.0) for s in rig.samples(2, 2)], row_tokens=64, share_prefix=True)
    with rig.group(0, 1, tmp_path / "store") as mesh:
        seen = {}
        for engine in (Engine(), Engine(recompute="full"), Engine(recompute="selective", recompute_every=2), Engine(reshard=False)):
            policy = load_policy(folder, mesh=mesh, compute_dtype=torch.bfloat16, temperature=1.0, engine=engine)
            calls = [0]
            policy.causal_lm.get_submodule("model.layers.0.input_layernorm").register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
            policy(row).sum().backward()
            seen[engine.recompute, engine.reshard] = (calls[0], {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None})
        plain = seen.pop(("none", True))[1]
        assert {kind: number for (kind, _), (number, _) in seen.items()} == {"full": 2, "selective": 2, "none": 1}  # passes of the first layer
        for _, gradients in seen.values():
            assert all(torch.equal(gradients[name], gradient) for name, gradient in plain.items())
