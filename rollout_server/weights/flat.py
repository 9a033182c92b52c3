"""Applies staged tensors by one group of device copies: a plan from checkpoint names to the engine's own parameters, made once.

The plan is what protos/weights/layout.py says, held against the loader before it is trusted: at start the engine's loader has put the
model folder's tensors where it wants them, so every parameter must already hold, byte for byte, what the plan would write there; and
the plan must write every row of every parameter once (rows of vocabulary padding excepted). Anything else (weights that the engine
repacks, quantizes, transposes, or that the layout does not know) is a reason to go on with the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from protos.weights.layout import Engine, Place, place_of
from protos.weights.staging import VerifiedStaging

_PADDED = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")
Shapes = Mapping[str, tuple[int, ...]]  # of the checkpoint's tensors, by name


class NotPlain(ValueError):
    """The engine's parameters are not what the plan writes. Example: NotPlain("parameter x is covered in 2 of 3 rows")"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    place: Place
    target: torch.Tensor  # [count, columns], a view of the parameter


class FlatPlan:
    """Made by `make_plan`, which raises NotPlain."""

    def __init__(self, copies: Mapping[str, _Copy]) -> None:
        self._copies = copies

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Holds the parameters, as the loader left them, against the checkpoint's tensors. Raises NotPlain naming the first difference."""
        left = dict(self._copies)
        for name, tensor in tensors:
            copy = left.pop(name, None)
            if copy is None:
                continue  # a tied head that the folder holds twice
            place = copy.place
            part = _rows(tensor)[place.first : place.first + place.count, place.first_column : place.first_column + place.columns]
            if not torch.equal(part.to(device=copy.target.device, dtype=copy.target.dtype), copy.target):
                raise NotPlain(f"the loader put other bytes into {place.parameter} than {name} holds")
        if left:
            raise NotPlain(f"the folder lacks {', '.join(sorted(left)[:4])}")

    def prepare_some(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], None]:
        """As `prepare`, for some whole tensors; the other parameters keep what they have. Raises NotPlain for an unknown one."""
        targets, sources = [], []
        for name, tensor in tensors:
            if name not in self._copies:
                raise NotPlain(f"the plan does not know {name}")
            copy = self._copies[name]
            place = copy.place
            targets.append(copy.target)
            sources.append(_rows(tensor)[place.first : place.first + place.count, place.first_column : place.first_column + place.columns].to(copy.target.device))
        return _copying(targets, sources)

    def prepare(self, staging: VerifiedStaging) -> Callable[[], None]:
        """What is left for the pause: one group of copies. Raises NotPlain for a version with other tensors."""
        targets, sources = [], []
        for name, dtype, part, data in staging.parts():
            copy = self._copies.get(name)
            if copy is None:
                raise NotPlain(f"version {staging.version} brings {name}, which the plan does not know")
            source = data.view(dtype).view(part.num_rows, -1)
            if part.is_whole:
                place = copy.place
                source = _rows(source)[place.first : place.first + place.count, place.first_column : place.first_column + place.columns]
            targets.append(copy.target)
            sources.append(source.view(copy.target.shape) if source.is_contiguous() else source)
        if len(targets) != len(self._copies):
            raise NotPlain(f"version {staging.version} brings {len(targets)} of {len(self._copies)} tensors")

        return _copying(targets, sources)


def _copying(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
    def apply() -> None:
        with torch.inference_mode():
            torch._foreach_copy_(targets, sources)

    return apply


def make_plan(model: torch.nn.Module, shapes: Shapes, engine: Engine | None) -> FlatPlan:
    """The plan of one worker. Raises NotPlain naming the tensor or parameter that does not fit."""
    if engine is None:
        raise NotPlain("the model's configuration does not say its heads, or they do not divide among the workers")
    parameters = dict(model.named_parameters())
    copies: dict[str, _Copy] = {}
    covered: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
    for name, shape in shapes.items():
        place = place_of(name, shape, engine)
        if place is None or place.parameter not in parameters:
            raise NotPlain(f"{name} has no known place in this engine's parameters")
        parameter = parameters[place.parameter].data
        if not parameter.is_contiguous() or parameter.dim() not in (1, 2) or _rows(parameter).shape[1] != place.columns or len(parameter) < place.row + place.count:
            raise NotPlain(f"{place.parameter} of shape {tuple(parameter.shape)} does not hold {place.count} rows of {place.columns} from row {place.row} on, as {name} needs")
        copies[name] = _Copy(place=place, target=_rows(parameter)[place.row : place.row + place.count])
        covered[place.parameter].append((place.row, place.count))
    for name, spans in covered.items():
        _check_cover(name, spans, len(parameters[name]))
    return FlatPlan(copies)


def _check_cover(name: str, spans: list[tuple[int, int]], num_rows: int) -> None:
    at = 0
    for row, count in sorted(spans):
        if row != at:
            raise NotPlain(f"parameter {name}: rows {min(row, at)} to {max(row, at)} are written {'twice' if row < at else 'by nothing'}")
        at += count
    if at != num_rows and not (spans and name.endswith(_PADDED)):
        raise NotPlain(f"parameter {name} is covered in {at} of {num_rows} rows")


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, columns]; a vector has one column."""
    return tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
