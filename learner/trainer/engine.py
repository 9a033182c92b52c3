"""How a model's forward and backward pass are computed: attention, compilation, what is computed again in the backward pass, where weights rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from learner.config import TrainerConfig
from learner.trainer.attention import KEYWORD, Kind, layout_of
from learner.trainer.blocks import BLOCK
from learner.trainer.packing import Row

_FLEX_WIDTH = 16  # flex attention's kernels know no narrower heads
_KEPT_GRAPHS = 64  # lengths of rows, with and without gradient, that compiled layers are kept for


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Example: Engine(attention="flex", compile=True, unit_tokens=2048). The default is the plain computation on a CPU."""

    attention: Kind = "pieces"
    compile: bool = False  # each layer by itself, and the elementwise parts of the head
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_every: int = 2  # of selective: one layer in so many is computed again
    unit_tokens: int = BLOCK  # with flex, rows are filled up to a multiple of it: few lengths, few compilations
    float32_head: bool = False
    reshard: bool = True  # gathered weights of a layer are freed between its forward and its backward pass
    offload: bool = False  # sharded weights, gradients and optimizer state rest in CPU memory

    def length_of(self, num_tokens: int) -> int:
        """Tokens that a row of num_tokens is computed with."""
        return num_tokens if self.attention == "pieces" else -(-num_tokens // self.unit_tokens) * self.unit_tokens


def engine_of(config: TrainerConfig, device: torch.device) -> Engine:
    """The configured engine on a device. Raises ValueError for what pays or works on CUDA only."""
    cuda = device.type == "cuda"
    if config.attention == "flex" and not cuda:
        raise ValueError("trainer.attention=flex on a CPU: its backward pass exists for CUDA only; use attention: auto")
    if config.compile and not cuda:
        raise ValueError("trainer.compile=true on a CPU: every row has another mask there and would be compiled anew; leave compile out")
    if config.offload and not cuda:
        raise ValueError("trainer.offload=true on a CPU: the weights are in CPU memory already; leave offload out")
    return Engine(
        attention="flex" if cuda and config.attention != "pieces" else "pieces",
        compile=cuda and config.attention != "pieces" if config.compile is None else config.compile,
        recompute=config.recompute,
        recompute_every=config.recompute_every,
        unit_tokens=unit_of(config.row_tokens),
        float32_head=config.head_dtype == "float32",
        reshard=config.reshard if config.reshard is not None else config.ranks > 1 or config.recompute != "none" or config.offload,
        offload=config.offload,
    )


def unit_of(row_tokens: int) -> int:
    """An eighth of a full row, in whole blocks: at most eight lengths, and at most an eighth of a full row is filled up in vain."""
    return max(BLOCK, -(-row_tokens // (8 * BLOCK)) * BLOCK)


def fitted(engine: Engine, causal_lm: nn.Module) -> Engine:
    """The engine for a model: heads too narrow for flex attention are computed in pieces."""
    config: Any = causal_lm.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if engine.attention == "flex" and width < _FLEX_WIDTH:
        return Engine(attention="pieces", recompute=engine.recompute, recompute_every=engine.recompute_every, float32_head=engine.float32_head, reshard=engine.reshard, offload=engine.offload)
    return engine


def windows_of(causal_lm: nn.Module) -> tuple[int, ...]:
    """Windows of the model's sliding-window layers."""
    found = {getattr(module, "sliding_window", None) for module in causal_lm.modules()} | {getattr(causal_lm.config, "sliding_window", None)}
    return tuple(sorted(window for window in found if isinstance(window, int) and window > 0))


def layers_of(causal_lm: nn.Module) -> list[nn.Module]:
    """The decoder's layers. Raises ValueError for a model that does not name them."""
    names = set(getattr(causal_lm, "_no_split_modules", None) or [])
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"model {type(causal_lm).__name__} does not say which modules are its layers (_no_split_modules={sorted(names)}); it cannot be sharded layer by layer")
    return layers


def pairs_per_token(causal_lm: nn.Module) -> int:
    """weights of a layer / (2 · heads · width): a token takes 2 operations a weight, a pair 4 a head and width, forward."""
    config: Any = causal_lm.config
    names = set(getattr(causal_lm, "_no_split_modules", None) or [])
    layer = next((module for module in causal_lm.modules() if {kind.__name__ for kind in type(module).__mro__} & names), causal_lm)  # sharded, a layer's class has another name
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(1, sum(parameter.numel() for parameter in layer.parameters()) // int(2 * config.num_attention_heads * width))


def prepare_layers(layers: list[nn.Module], engine: Engine) -> None:
    """Compiles the layers and marks those that are computed again in the backward pass. Before they are sharded."""
    if engine.compile:
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _KEPT_GRAPHS)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * _KEPT_GRAPHS)
    for number, layer in enumerate(layers):
        forward: Any = torch.compile(layer.forward, dynamic=False) if engine.compile else layer.forward
        again = engine.recompute == "full" or (engine.recompute == "selective" and number % engine.recompute_every == 0)
        if again:
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        if again or engine.compile:
            layer.forward = forward


def hidden_states(decoder: nn.Module, row: Row, engine: Engine, windows: tuple[int, ...]) -> Tensor:
    """The decoder's last hidden states [length, width] of a packed row. Raises ValueError for a model that inserts tokens."""
    num_tokens = row.ids.numel()
    length = engine.length_of(num_tokens)
    layout = layout_of(row, windows, kind=engine.attention, length=length)
    ids, position = (functional.pad(values, (0, length - num_tokens))[None] for values in (row.ids, row.position))
    output = decoder(input_ids=ids, position_ids=position, attention_mask=None, use_cache=False, **{KEYWORD: layout})
    hidden = cast(Tensor, output.last_hidden_state)[0]
    if hidden.shape[0] != length:
        raise ValueError(f"the model answered {hidden.shape[0]} positions for {length} ids; a model that inserts tokens cannot be trained here")
    return hidden[:num_tokens]
