"""AdamW whose moments take a byte each (Dettmers et al. 2021, arXiv 2110.02861), by torchao, over this rank's shards.

A moment of 4,096 elements or more is kept as codes of blocks of 256 with a scale each; the update itself is computed in float32. On CUDA the library
compiles it, once a shape; on a CPU, where that needs a compiler, it runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.config import OptimizerConfig
from learner.trainer.adamw import local


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A moment of one parameter in codes. A cut holds it as float32, so that it fits any number of ranks and plain AdamW too.

    Example: Packed(parameter=weight, moment=state["exp_avg"]).unpacked()
    """

    parameter: Tensor  # whose placement it has
    moment: Tensor  # the live one: codes and scales of this rank's shard

    def unpacked(self, into: Tensor | None = None) -> Tensor:
        """float32 in host memory, sharded as the parameter is; into: an earlier one, written over."""
        made = into if isinstance(into, Tensor) and into.shape == self.parameter.shape and into.dtype == torch.float32 else self.parameter.detach().to("cpu", torch.float32, copy=True)
        local(made).copy_(_codes(self.moment).dequantize())
        return made

    def pack(self, values: Tensor) -> None:
        """The reverse. What was unpacked from the same shard is the same again, bit for bit."""
        held = _codes(self.moment)
        own = local(values).to(held.device)
        held.copy_(own)
        if held.signed:
            _keep_exactly(held, own.reshape(held.scale.numel(), -1))


class AdamW8:
    """As adamw.AdamW. Raises ValueError without the package torchao."""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ValueError('optimizer.kind=adamw_8bit needs the package torchao: pip install ".[adamw-8bit]" in a clone of headrace') from error
        self._parameters, self._betas = parameters, config.betas
        self._inner: Any = AdamW8bit(list(parameters.values()), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    def step(self, *, lr: float, divisor: Tensor | None) -> None:
        """Moves every parameter that has a gradient. divisor: as of AdamW."""
        held = [(name, parameter) for name, parameter in self._parameters.items() if parameter.grad is not None]
        if divisor is not None:
            torch._foreach_div_([local(parameter.grad) for _, parameter in held if parameter.grad is not None], divisor)
        for name, _ in held:
            self._state(name)
        self._inner.param_groups[0]["lr"].fill_(lr)
        with _compiled_where_it_pays(held[0][1] if held else None):
            self._inner.step()

    def moments(self, name: str) -> dict[str, Tensor]:
        """Of one parameter, those that are no codes; zeros before its first update."""
        return {key: value for key, value in self._state(name).items() if not _is_packed(value)}

    def packed(self, name: str) -> dict[str, Packed]:
        """The others."""
        return {key: Packed(parameter=self._parameters[name], moment=value) for key, value in self._state(name).items() if _is_packed(value)}

    def _state(self, name: str) -> dict[str, Tensor]:
        parameter = self._parameters[name]
        state: dict[str, Tensor] = self._inner.state[parameter]
        if not state:
            with torch.no_grad():
                made = [self._inner._new_buffer(parameter.detach(), signed) for signed in (True, False)]
            state.update(step=torch.zeros(()), exp_avg=made[0], exp_avg_sq=made[1])
        return state


def _keep_exactly(held: Any, blocks: Tensor) -> None:
    """Blocks that came out of codes are written as they were, where the library would round once more.

    Its table for signed values ends at 1 and at -0.993, and a block's scale is its largest magnitude: where that is negative, what the codes say is smaller than
    the scale, and so would be the next one. The scale that was is the largest magnitude over 0.993, to a unit in the last place.
    """
    codes, middles = held.codes.view(blocks.shape), (held.qmap[1:] + held.qmap[:-1]) / 2
    near = blocks.amin(1) / held.qmap[0]
    for scale in (near, torch.nextafter(near, 2 * near), torch.nextafter(near, torch.zeros_like(near))):
        found = torch.bucketize(blocks / scale[:, None], middles)
        same = (held.qmap[found] * scale[:, None] == blocks).all(1) & (near > 0)
        codes[same] = found[same].to(codes.dtype)
        held.scale[same] = scale[same]


def _is_packed(moment: Tensor) -> bool:
    return hasattr(_codes(moment), "codes")


def _codes(moment: Tensor) -> Any:
    return local(moment)


def _compiled_where_it_pays(parameter: Tensor | None) -> AbstractContextManager[object]:
    return nullcontext() if parameter is not None and parameter.device.type == "cuda" else torch.compiler.set_stance("force_eager")
