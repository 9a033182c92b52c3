"""The policy being trained: a Hugging Face causal model, sharded, that answers with log-probs of chosen tokens."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from learner.trainer.loading import build_on_meta, load_weights
from learner.trainer.logprob import CHUNK_TOKENS, token_logprobs
from learner.trainer.mask import attention_mask
from learner.trainer.packing import Row

# Config fields with which a model changes its logits after the head, and the value that means "does not".
_HEAD_CHANGES: dict[str, float | None] = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "lm_head_multiplier": 1.0}


class Policy(nn.Module):
    """A causal model whose forward pass goes straight to token log-probs, so that whole logits never exist.

    `causal_lm` keeps Hugging Face's parameter names; whoever needs names (snapshot, checkpoint) takes them from there.
    """

    def __init__(self, causal_lm: nn.Module, *, temperature: float, chunk_tokens: int = CHUNK_TOKENS) -> None:
        """Raises ValueError for a model whose logits or attention this forward pass would not reproduce."""
        super().__init__()
        refuse_unknown_forms(causal_lm)
        self.causal_lm = causal_lm
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def forward(self, row: Row, *, with_entropy: bool = False) -> Tensor:
        """Log-probs [num_targets] of a row's targets under softmax(logits / temperature), at least float32.

        with_entropy: [2, num_targets], log-probs and the entropy of the distribution that each target was drawn from.
        """
        decoder = cast(nn.Module, self.causal_lm.base_model)
        mask = attention_mask(row.document, row.branch)
        output = decoder(input_ids=row.ids[None], position_ids=row.position[None], attention_mask=mask, use_cache=False)
        hidden = output.last_hidden_state[0]
        if hidden.shape[0] != row.ids.numel():
            raise ValueError(f"the model answered {hidden.shape[0]} positions for {row.ids.numel()} ids; a model that inserts tokens cannot be trained here")
        head = output_head(self.causal_lm)
        bias = cast("Tensor | None", getattr(head, "bias", None))
        return token_logprobs(hidden[row.query], cast(Tensor, head.weight), bias, row.target, temperature=self._temperature, chunk_tokens=self._chunk_tokens, with_entropy=with_entropy)


def output_head(causal_lm: nn.Module) -> nn.Module:
    """The module whose weight [vocabulary, width] gives logits."""
    return cast(nn.Module, causal_lm.get_output_embeddings())  # type: ignore[operator]


def refuse_unknown_forms(causal_lm: nn.Module) -> None:
    """Raises ValueError naming what a model does that packed rows or the chunked head would compute differently."""
    config = causal_lm.config
    for name, neutral in _HEAD_CHANGES.items():
        value = getattr(config, name, neutral)
        if value is not None and value != neutral:
            raise ValueError(f"model sets {name}={value}, which changes its logits after the head; only models with {name}={neutral} can be trained")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        raise ValueError(f"model has layers of types {sorted(kinds)} and sliding_window={getattr(config, 'sliding_window', None)}; only full attention in every layer can be trained")


def load_policy(folder: Path, *, mesh: DeviceMesh, compute_dtype: torch.dtype, temperature: float, master_dtype: torch.dtype = torch.float32) -> Policy:
    """The policy of a Hugging Face folder, sharded over the mesh, each rank reading only its own rows from the files.

    A single rank that computes in master_dtype has nothing to shard or cast and keeps plain parameters: sharding over one
    rank copies every weight for each row, a tenth of the time of a 135 M model's row on a CPU. Master weights are kept in master_dtype, computed with in compute_dtype, and gradients are summed (not averaged) over
    ranks in master_dtype. Dropout is off: the model stays in eval mode, which changes nothing else in a decoder.
    Raises ValueError when folder and architecture do not fit.
    """
    causal_lm = build_on_meta(folder, master_dtype)
    policy = Policy(causal_lm, temperature=temperature)
    if mesh.size() > 1 or compute_dtype != master_dtype:
        shard(policy, mesh=mesh, compute_dtype=compute_dtype, reduce_dtype=master_dtype)
    load_weights(causal_lm, folder, torch.device(mesh.device_type))
    return policy.eval()


def shard(policy: Policy, *, mesh: DeviceMesh, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """FSDP2 over the mesh: every decoder layer by itself, the rest with the root."""
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    names = set(getattr(policy.causal_lm, "_no_split_modules", None) or [])
    layers = [module for module in policy.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"model {type(policy.causal_lm).__name__} does not say which modules are its layers (_no_split_modules={sorted(names)}); it cannot be sharded layer by layer")
    for module in [*layers, policy]:
        fully_shard(module, mesh=mesh, mp_policy=precision)
        sharded = cast(FSDPModule, module)
        # The loss already carries the global denominator, so gradients add up. Plain sums, as gloo knows no scaled ones.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
