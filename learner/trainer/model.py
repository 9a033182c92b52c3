"""The policy being trained: a Hugging Face causal model, sharded, that answers with log-probs of chosen tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from learner.config import LoraConfig
from learner.trainer.engine import Engine, fitted, hidden_states, layers_of, pairs_per_token, prepare_layers, windows_of
from learner.trainer.loading import build_on_meta, load_weights
from learner.trainer.logprob import Head, token_logprobs
from learner.trainer.lora import add_adapters, start_adapters
from learner.trainer.packing import Row
from protos.vocabulary import ids_with_text, ids_without_text

# Config fields with which a model changes its logits after the head, and the value that means "does not".
_HEAD_CHANGES: dict[str, float | None] = {"logits_scaling": 1.0, "logit_scale": 1.0, "lm_head_multiplier": 1.0}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Policy(nn.Module):
    """A causal model whose forward pass goes straight to token log-probs, so that whole logits never exist.

    `causal_lm` keeps Hugging Face's parameter names; whoever needs names (snapshot, checkpoint) takes them from there.
    """

    def __init__(self, causal_lm: nn.Module, *, temperature: float, engine: Engine = Engine(), tile: int | None = None, without_text: tuple[int, ...] = ()) -> None:
        """tile: logits computed at a time; None: by device. without_text: ids that engines never draw, ascending.

        Raises ValueError for a model whose logits or attention this forward pass would not reproduce.
        """
        super().__init__()
        refuse_unknown_forms(causal_lm)
        self.causal_lm = causal_lm
        self.engine = fitted(engine, causal_lm)
        self._windows = windows_of(causal_lm)
        softcap = getattr(causal_lm.config, "final_logit_softcapping", None)
        self._head = Head(temperature=temperature, softcap=softcap, float32=engine.float32_head, fused=self.engine.compile, tile=tile, without_text=without_text)

    @property
    def device(self) -> torch.device:
        """Where rows are computed, which is not where offloaded weights rest."""
        return torch.device("cuda", torch.cuda.current_device()) if self.engine.offload else next(self.parameters()).device

    @property
    def pairs_per_token(self) -> int:
        """Pairs (query, key) of attention that take as much arithmetic as one token does in the rest of a layer."""
        return pairs_per_token(self.causal_lm)

    def forward(self, row: Row, *, with_entropy: bool = False) -> Tensor:
        """Log-probs [num_targets] of a row's targets under softmax(logits / temperature), at least float32.

        with_entropy: [2, num_targets], log-probs and the entropy of the distribution that each target was drawn from.
        """
        hidden = hidden_states(cast(nn.Module, self.causal_lm.base_model), row, self.engine, self._windows)
        head = output_head(self.causal_lm)
        bias = cast("Tensor | None", getattr(head, "bias", None))
        return token_logprobs(hidden[row.query], cast(Tensor, head.weight), bias, row.target, head=self._head, with_entropy=with_entropy)

    @property
    def num_drawable(self) -> int:
        """Ids that log-probs are over: rows of the head, less those that are never drawn."""
        return cast(Tensor, output_head(self.causal_lm).weight).shape[0] - len(self._head.without_text)

    @contextmanager
    def as_probed(self) -> Iterator[None]:
        """While the block runs log-probs are what an engine answers for a prompt's tokens: at temperature 1 and over all rows of the head."""
        before, self._head = self._head, replace(self._head, temperature=1.0, without_text=())
        try:
            yield
        finally:
            self._head = before


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
    if not kinds <= _LAYER_TYPES:
        raise ValueError(f"model has layers of types {sorted(kinds)}; only {' and '.join(sorted(_LAYER_TYPES))} can be trained in packed rows")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("model sets use_bidirectional_attention=true: a token would see what follows it; only causal models can be trained")


def load_policy(
    folder: Path, *, mesh: DeviceMesh, compute_dtype: torch.dtype, temperature: float, master_dtype: torch.dtype = torch.float32, engine: Engine = Engine(), freeze: Sequence[str] = (),
    lora: LoraConfig | None = None, seed: int = 0, tokens_of: Path | None = None,
) -> Policy:  # fmt: skip
    """The policy of a Hugging Face folder, sharded over the mesh, each rank reading only its own rows from the files.

    A single rank that computes in master_dtype has nothing to shard or cast and keeps plain parameters: sharding over one
    rank copies every weight for each row, a tenth of the time of a 135 M model's row on a CPU. Master weights are kept in master_dtype, computed with in compute_dtype, and gradients are summed (not averaged) over
    ranks in master_dtype. Dropout is off: the model stays in eval mode, which changes nothing else in a decoder.
    freeze: patterns of parameter names that are not trained. lora: adapters, begun from seed, in place of training the weights. tokens_of: folder whose tokenizer.json says which ids
    are drawn (None: folder; without such a file log-probs are over all rows). Raises ValueError when folder and architecture do not fit.
    """
    causal_lm = build_on_meta(folder, master_dtype)
    known = ids_with_text(tokens_of or folder)
    without_text = () if known is None else ids_without_text(known, cast(Tensor, output_head(causal_lm).weight).shape[0])
    if lora is not None:
        add_adapters(causal_lm, lora)
    policy = wrapped(causal_lm, mesh=mesh, compute_dtype=compute_dtype, temperature=temperature, master_dtype=master_dtype, engine=engine, freeze=freeze, without_text=without_text)
    load_weights(causal_lm, folder, torch.device("cpu" if engine.offload else mesh.device_type), buffers_on=torch.device(mesh.device_type))
    if lora is not None:
        start_adapters(causal_lm, seed=seed)
    return policy.eval()


def wrapped(
    causal_lm: nn.Module, *, mesh: DeviceMesh, compute_dtype: torch.dtype, temperature: float, master_dtype: torch.dtype, engine: Engine, freeze: Sequence[str] = (),
    without_text: tuple[int, ...] = (),
) -> Policy:  # fmt: skip
    """A model on meta as a policy, compiled and sharded, its weights still to come (load_policy)."""
    policy = Policy(causal_lm, temperature=temperature, engine=engine, without_text=without_text)
    freeze_matching(causal_lm, freeze)
    layers = layers_of(causal_lm)
    prepare_layers(layers, policy.engine)
    if mesh.size() > 1 or compute_dtype != master_dtype or engine.offload:
        shard(policy, layers, mesh=mesh, compute_dtype=compute_dtype, reduce_dtype=master_dtype, offload=engine.offload, reshard=engine.reshard)
    return policy


def freeze_matching(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose name has a match of a pattern (re.search) are not trained. Raises ValueError for one without a match, and when none is left."""
    for pattern in patterns:
        found = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
        if not found:
            raise ValueError(f"trainer.freeze: no parameter's name matches {pattern!r}; names look like {next(iter(dict(model.named_parameters())))}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"trainer.freeze={list(patterns)} leaves nothing to train; use narrower patterns")


def shard(root: nn.Module, layers: Sequence[nn.Module], *, mesh: DeviceMesh, compute_dtype: torch.dtype, reduce_dtype: torch.dtype, offload: bool = False, reshard: bool = True) -> None:
    """FSDP2 over the mesh: every layer by itself, the rest with the root. reshard: a layer's gathered weights are freed after its forward pass and gathered again for backward."""
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for module in [*layers, root]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(), reshard_after_forward=None if reshard else False)
        sharded = cast(FSDPModule, module)
        if mesh.size() > 1:  # on one rank there is nothing to divide by, and dividing by 1 copies every gradient once more
            # The loss already carries the global denominator, so gradients add up. Plain sums, as gloo knows no scaled ones.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

