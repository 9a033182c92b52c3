"""The critic of PPO: a backbone of its own with one number a token on top, trained on the returns of the actor's samples.

    before a step's updates:  values of every row ─▶ advantages (GAE) and returns of every token, over all ranks
    per minibatch:            regression to the returns, its own gradient, optimizer, schedule and skip

The value of a token is that of the state it was drawn in: the hidden state that predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from learner.algorithms.aggregation import token_mean
from learner.algorithms.value_loss import clipped_value_loss
from learner.trainer.adamw8 import Packed
from learner.trainer.engine import Engine, fitted, hidden_states, layers_of, prepare_layers, windows_of
from learner.trainer.loading import WeightFiles, build_on_meta, fill_weights, materialize, on_meta, own_block
from learner.trainer.model import refuse_unknown_forms, shard
from learner.trainer.optimizer import Optimizer, Update
from learner.trainer.packing import Row
from learner.trainer.table import Counts

_SCORE = "score.weight"  # of a reward model's files: [1, width], what the head starts from


class ValueModel(nn.Module):
    """A decoder without its language head, and a linear map from its hidden states to one number."""

    def __init__(self, causal_lm: nn.Module, *, engine: Engine) -> None:
        """Args: causal_lm, on meta; its output head is dropped. Raises ValueError as Policy does."""
        super().__init__()
        refuse_unknown_forms(causal_lm)
        self.backbone = cast(nn.Module, causal_lm.base_model)
        self.engine, self._windows = fitted(engine, causal_lm), windows_of(causal_lm)
        config: Any = causal_lm.config
        width, dtype = int(config.hidden_size), next(self.backbone.parameters()).dtype
        with on_meta():
            self.head = nn.Linear(width, 1, dtype=dtype)

    def tie_weights(self) -> None:
        self.backbone.tie_weights()  # type: ignore[operator]

    def forward(self, row: Row) -> Tensor:
        """Values [num_targets], at least float32, of the states that a row's targets were drawn in."""
        hidden = hidden_states(self.backbone, row, self.engine, self._windows)[row.query]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return functional.linear(hidden.to(dtype), self.head.weight.to(dtype), self.head.bias.to(dtype))[:, 0]


def load_value_model(folder: Path, *, mesh: DeviceMesh, compute_dtype: torch.dtype, master_dtype: torch.dtype = torch.float32, engine: Engine = Engine()) -> ValueModel:
    """Sharded as the policy is. The head starts at 0, so that every value does, or from `score.weight` where the files hold one of shape [1, width].

    Raises ValueError when folder and architecture do not fit.
    """
    causal_lm = build_on_meta(folder, master_dtype)
    prefix = f"{causal_lm.base_model_prefix}."
    model = ValueModel(causal_lm, engine=engine)
    layers = layers_of(causal_lm)
    prepare_layers(layers, model.engine)
    if mesh.size() > 1 or compute_dtype != master_dtype or engine.offload:
        shard(model, layers, mesh=mesh, compute_dtype=compute_dtype, reduce_dtype=master_dtype, offload=engine.offload, reshard=engine.reshard)
    materialize(model, torch.device("cpu" if engine.offload else mesh.device_type), buffers_on=torch.device(mesh.device_type))
    fill_weights(model.backbone, folder, prefix=prefix)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
        with WeightFiles(folder) as files:
            if _SCORE in files.names() and files.shape(_SCORE) == tuple(model.head.weight.shape):
                local, offset = own_block(model.head.weight.detach())
                if local.numel():
                    local.copy_(files.block(_SCORE, offset, tuple(local.shape)))
    return model.eval()


class Critic:
    """Example: `Critic(load_value_model(...), Optimizer(...), clip=0.2)`"""

    def __init__(self, model: ValueModel, optimizer: Optimizer, *, clip: float | None) -> None:
        """clip: how far a value may move in a step before its loss stops following; None: no such bound."""
        self.model, self.optimizer, self._clip = model, optimizer, clip
        self._counters = torch.zeros(2, dtype=torch.int64)

    def values(self, rows: Sequence[Sequence[Row]]) -> list[list[Tensor]]:
        """Values [num_targets] of each row of each minibatch. Collective: every rank must give the same number of rows."""
        with torch.no_grad():
            found = [[self.model(row) for row in part] for part in rows]
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # without a backward pass the root would keep its weights gathered through the actor's
        return found

    def backward(self, row: Row, counts: Counts) -> dict[str, Tensor]:
        """Forward and backward of one row that has values and returns; gradients add up. Sums over its tokens, detached."""
        assert row.value is not None and row.returns is not None, "values come before the updates"
        value = self.model(row)
        losses, sums = clipped_value_loss(value, row.value, row.returns.to(value.dtype), clip=self._clip)
        token_mean(losses, num_tokens=counts.num_tokens).backward()
        returns, error = row.returns, row.returns - value.detach()
        moments = {"returns": returns.sum(), "returns_squared": returns.square().sum(), "value_error": error.sum(), "value_error_squared": error.square().sum()}
        return {"value_targets": torch.tensor(row.num_targets), "value_loss": losses.detach().sum(), **sums, **moments}

    def update(self) -> Update:
        """Collective. Clips and steps, or skips when the critic's own gradient norm is not finite."""
        return self.optimizer.update()

    def state(self) -> Mapping[str, Tensor | Packed]:
        """What a cut holds of it, as tensors that share memory with the live ones: weights, moments, and how many updates were made and skipped."""
        self._counters[0], self._counters[1] = self.optimizer.num_updates, self.optimizer.num_skipped
        weights = {f"critic.model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        moments: dict[str, Tensor | Packed] = {**self.optimizer.state(), **self.optimizer.packed()}
        return {**weights, **{f"critic.optimizer.{name}": value for name, value in moments.items()}, "critic.counters": self._counters}

    def restored(self) -> None:
        """After a cut was loaded into `state`."""
        self.optimizer.num_updates, self.optimizer.num_skipped = (int(value) for value in self._counters)
