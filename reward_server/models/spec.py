"""What a model scorer runs on, as its replicas are told. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Kind = Literal["classification", "yes_no", "number"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model and how it is asked.

    Example: `ModelSpec(kind="classification", model="some/reward-model", devices=("cuda:0", "cuda:1"))` is two replicas.
    """

    kind: Kind
    model: str  # Hugging Face folder or hub id
    devices: tuple[str, ...] = ("cpu",)
    tensor_parallel: int = 1  # devices of one replica
    dtype: Dtype = "auto"  # auto: the checkpoint's
    max_tokens: int = 4096  # of prompt and completion together; a longer conversation is unscored
    batch_items: int = 64
    batch_tokens: int = 65536  # padding included, in one forward
    chat: bool = True  # by the tokenizer's chat template, where it has one
    label: int | str | None = None  # of several: index or name
    template: str = ""  # generative: what the model is asked
    answers: tuple[str, str] = ("Yes", "No")  # yes_no: what speaks for and against
    max_new_tokens: int = 16  # number: of the verdict
    low: float = 0.0  # number: bounds of a valid verdict
    high: float = 10.0
    threads: int = 0  # of one replica on a CPU; 0: torch decides
    trust_remote_code: bool = False

    @staticmethod
    def of(kind: Kind, args: Mapping[str, Any]) -> ModelSpec:
        """From a scorer's arguments; those that are no fields are left out, what is not given has its default."""
        names = {each.name for each in fields(ModelSpec)} - {"kind"}
        return ModelSpec(kind=kind, **{name: _hashable(value) for name, value in args.items() if name in names})

    def replicas(self) -> list[tuple[str, ...]]:
        """Devices of each replica."""
        return [self.devices[at : at + self.tensor_parallel] for at in range(0, len(self.devices), self.tensor_parallel)]

    def packed(self) -> dict[str, Any]:
        """For msgpack; `unpacked` reads it."""
        return asdict(self)

    @staticmethod
    def unpacked(data: dict[str, Any]) -> ModelSpec:
        return ModelSpec(**{key: _hashable(value) for key, value in data.items()})


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def check_devices(devices: Sequence[str], tensor_parallel: int) -> None:
    """Raises ValueError for names that are none, kinds that differ, one device twice, or a number of devices that does not divide."""
    bad = [device for device in devices if not re.fullmatch(r"cpu|(cuda|xpu|npu):\d+", device)]
    if bad or not devices:
        raise ValueError(f'devices={list(devices)}: {bad[0] if bad else "none"!r} is no device; give for instance ["cuda:0", "cuda:1"], or ["cpu"]')
    if len({device.partition(":")[0] for device in devices}) != 1:
        raise ValueError(f"devices={list(devices)} are of different kinds; one scorer runs on one kind, make two scorers of it")
    twice = sorted({device for device in devices if device != "cpu" and list(devices).count(device) > 1})
    if twice:
        raise ValueError(f"devices={list(devices)}: {twice[0]} is named twice; each replica has devices of its own")
    if len(devices) % tensor_parallel:
        raise ValueError(f"devices={list(devices)}: {len(devices)} devices do not make replicas of tensor_parallel={tensor_parallel}; give a multiple")


def micro_batches(lengths: Sequence[int], *, most_items: int, most_tokens: int) -> list[list[int]]:
    """Places of items that go through the model together: longest first, so that little is padded and too much memory shows at once.

    Each batch has at most `most_items`, and at most `most_tokens` padding included, but for a single longer item.
    Example: lengths [5, 1, 4], most_tokens 8: [[0], [2, 1]] since 2 × 5 > 8 and 2 × 4 = 8.
    """
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        if batches and len(batches[-1]) < most_items and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= most_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
