"""Low-rank adapters on the wire: which tensors one has, what they make of a base weight, and how they are applied.

W' = W + scaling · (B A)  (Hu et al. 2021, LoRA, section 4.1; scaling = alpha / rank there, peft's own value here)

A version is either whole, the adapter already in its tensors (SnapshotWriter's lora="merged"), or the adapter alone ("adapter"): then each
target has two tensors, `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank], Manifest.adapter says the scaling,
and a replica makes W' out of the base weights in its own model folder. Both ways give the same bytes: base and product are added in
float32, in this one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError
from protos.weights.side import Side
from protos.weights.staging import DTYPES, VerifiedStaging, check_names

A, B = ".lora_A.weight", ".lora_B.weight"


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """W' in float32; base is not touched. Shapes [out, in], [rank, in], [out, rank]; rows of base and b may be a part of the whole."""
    return base.float() + (b.float() @ a.float()) * scaling


def targets(manifest: manifest_pb2.Manifest) -> list[str]:
    """Modules that the adapter changes, in the order of the manifest."""
    return [tensor.name.removesuffix(A) for tensor in manifest.tensors if tensor.name.endswith(A)]


def check_adapter(manifest: manifest_pb2.Manifest, expected: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Holds an adapter against the (name, shape) pairs of the model it is for. Raises TransferError naming the first module that the model
    lacks (a wrong prefix), that has one half only, or whose halves do not fit its weight."""
    have = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    want = {name: tuple(shape) for name, shape in expected}
    modules = dict.fromkeys(name.removesuffix(half) for name in have for half in (A, B) if name.endswith(half))
    foreign = [name for name in have if not name.endswith((A, B))]
    if foreign or not modules:
        raise TransferError(f"adapter of version {manifest.version} holds {', '.join(foreign[:8]) or 'nothing'}, which is no half of an adapter; the old weights stay")
    unknown = [module for module in modules if f"{module}.weight" not in want]
    if unknown:
        raise TransferError(f"adapter of version {manifest.version} does not fit the model: {len(modules) - len(unknown)} of {len(modules)} modules match; unknown: {', '.join(unknown[:8])}; the old weights stay")
    for module in modules:
        a, b, weight = have.get(module + A), have.get(module + B), want[f"{module}.weight"]
        if a is None or b is None or (b[0], a[1]) != weight or a[0] != b[1]:
            raise TransferError(f"adapter of version {manifest.version}: {module} has A {a} and B {b} for a weight {weight}; the old weights stay")


class MergedStaging:
    """A verified adapter upon base weights: the tensors of a whole version, made one at a time.

    base: from a name to the base tensor in the model folder; names: of all of the folder's tensors, in order. side: by which base tensors
    come to the device; None: by the current stream.
    """

    def __init__(self, staging: VerifiedStaging, base: Callable[[str], torch.Tensor], names: Sequence[str], *, side: Side | None = None) -> None:
        self._halves = dict(staging.tensors())
        self._adapter = staging.manifest.adapter
        self._targets = {f"{module}.weight": module for module in targets(staging.manifest)}
        self._base = base
        self._names = names
        self._side = side
        self.version = staging.version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the version, as a merged push would bring it."""
        for name in self._names:
            yield name, self._merged(name) if name in self._targets else self._base(name).to(DTYPES[self._adapter.served_dtype])

    def changed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those alone that the adapter changes."""
        for name in self._targets:
            yield name, self._merged(name)

    def _merged(self, name: str) -> torch.Tensor:
        module = self._targets[name]
        a, b = (self._halves[module + half] for half in (A, B))
        base = self._base(name)
        return merged(base.to(a.device) if self._side is None else self._side.moved(base), a, b, self._adapter.scaling[module]).to(DTYPES[self._adapter.served_dtype])


def scalings(values: Mapping[str, float], dtype: str) -> manifest_pb2.Adapter:
    """What announces an adapter."""
    return manifest_pb2.Adapter(scaling=values, served_dtype=dtype)


def check_fits(manifest: manifest_pb2.Manifest, expected: Sequence[tuple[str, Sequence[int]]]) -> None:
    """check_adapter for an adapter, check_names for a whole version."""
    (check_adapter if manifest.HasField("adapter") else check_names)(manifest, expected)
