"""What is added to vLLM's worker (worker_extension_cls): receiving weights beside generation, and applying them in a pause.

vLLM imports this module in the process that holds the model and calls the methods by name between engine steps
(collective_rpc). Arguments and results are plain values, since nothing else passes unpickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from protos import faultpoints, stacks
from protos.lifeline import die_with_multiprocessing_parent
from protos.weights import marks
from protos.weights.adapter import MergedStaging
from protos.weights.errors import TransferError
from protos.weights.ipc import visible_devices
from protos.weights.landing import Landing
from protos.weights.layout import Engine, engine_of, place_of
from protos.weights.side import Side
from protos.weights.staging import Keep, VerifiedStaging
from rollout_server.checkpoint import stored
from rollout_server.weights.flat import FlatPlan, NotPlain, make_plan
from rollout_server.weights.reloading import changed_by, packs_experts

die_with_multiprocessing_parent()
stacks.answering()

_VOCABULARY_LAYERS = ("ParallelLMHead", "VocabParallelEmbedding")


def refresh_packed_vocabulary(model: torch.nn.Module) -> int:
    """Packs the vocabulary layers' CPU matrices again; returns how many.

    vLLM 0.32 on CPU packs a tied head apart from the embedding, and a reload loads nothing "into" the head, so that it
    goes on multiplying with the old embedding. On CUDA head and embedding share one parameter and nothing is packed.
    """
    packed = [m for m in model.modules() if hasattr(m, "cpu_linear") and type(m).__name__ in _VOCABULARY_LAYERS]
    for module in packed:
        module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
    return len(packed)


class WorkerExtension:
    """Mixed into vLLM's worker; every name carries the prefix so that none of the worker's is hidden."""

    device: torch.device  # the worker's own
    model_runner: Any
    _headrace_taken: VerifiedStaging | None
    _headrace_apply_taken: Callable[[], None] | None
    _headrace_flat: FlatPlan | None
    _headrace_landed: Landing
    _headrace_folder: Path
    _headrace_shapes: dict[str, list[int]]
    _headrace_refusal: str = ""  # why no update is taken

    def headrace_describe(self) -> dict[str, Any]:
        """Where this worker's part of the model lives: its number, device type and UUID, and the GPUs that it sees."""
        cuda = self.device.type == "cuda"
        uuid = str(torch.cuda.get_device_properties(self.device).uuid) if cuda else ""
        return {"worker": _number(), "device": self.device.type, "device_uuid": uuid, "visible": list(visible_devices()) if cuda else [], "quantized": _is_quantized(self.model_runner.get_model())}

    def headrace_prepare(self, folder: str, shapes: dict[str, list[int]], flat: bool) -> str:
        """Settles how updates are applied: "" for copies straight into the parameters, else why by the engine's loader. `shapes`: of
        the folder's tensors by name."""
        if faultpoints.planted() and not hasattr(self, "_headrace_landed"):
            _pass_the_point(self.model_runner)
        _make_room_between_parts(self.model_runner)
        num_workers, worker = _tensor_parallel()
        engine = engine_of(json.loads((Path(folder) / "config.json").read_text()), num_workers=num_workers, worker=worker)
        if not hasattr(self, "_headrace_landed"):  # else its groups, of which the trainer has the other end, would be gone
            self._headrace_landed = Landing(self.device, worker=_number(), keep=_keep(engine) if num_workers > 1 and engine else None, prepare=self._headrace_ready)
        self._headrace_flat = None
        self._headrace_folder, self._headrace_shapes = Path(folder), shapes
        try:
            if not flat:
                raise NotPlain("apply: loader is configured")
            if self.device.type == "cpu":
                raise NotPlain("on a CPU the engine packs its weights")
            plan = make_plan(self.model_runner.get_model(), {name: tuple(shape) for name, shape in shapes.items()}, engine)
            plan.check(_stored(Path(folder)))
        except NotPlain as error:
            self._headrace_refusal = self._headrace_proved_loader()
            return self._headrace_refusal or str(error)
        self._headrace_flat = plan
        return ""

    def _headrace_proved_loader(self) -> str:
        """Why the engine's loader cannot be used for updates of this model; "" where it can."""
        model = self.model_runner.get_model() if hasattr(self, "model_runner") else None
        model = self.model_runner.get_model()
        if not packs_experts(model):
            return ""
        changed = changed_by(lambda: self._headrace_load(_stored(self._headrace_folder)), model)
        if not changed:
            return ""
        return f"this vLLM packs the experts of this model and cannot take them again: loading the same files once more changed {changed}; updates are refused, serve a model without experts or another vLLM"

    def headrace_forbid(self, ids: list[int]) -> None:
        """These ids are never drawn from now on, whoever asks; a prompt's own log-probs (the probe) are not touched."""
        sampler, places = getattr(self.model_runner, "sampler", None), torch.tensor(ids, dtype=torch.long, device=self.device)
        if sampler is None:
            return  # a worker of an earlier pipeline stage draws nothing
        if isinstance(sampler, torch.nn.Module):
            sampler.register_forward_pre_hook(lambda _, args, kwargs: _without(places, args, kwargs), with_kwargs=True)
            return
        sample = sampler.sample  # vLLM's second model runner

        def without(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _without(places, args, kwargs)
            return sample(*args, **kwargs)

        sampler.sample = without

    def headrace_begin_receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        self._headrace_open_landing().begin_receive(group, manifest, timeout_s)

    def headrace_begin_folder(self, folder: str, manifest: bytes) -> None:
        self._headrace_open_landing().begin_folder(folder, manifest)

    def headrace_begin_chunks(self, manifest: bytes) -> None:
        self._headrace_open_landing().begin_chunks(manifest)

    def headrace_write_chunk(self, bucket: int, offset: int, data: bytes) -> None:
        self._headrace_landing().write_chunk(bucket, offset, data)

    def headrace_finish_chunks(self) -> None:
        self._headrace_landing().finish_chunks()

    def headrace_state(self) -> tuple[str, str]:
        """Phase and detail of the landing (protos/weights/landing.py)."""
        state = self._headrace_landing().state()
        return state.phase, state.detail

    def headrace_peak_bytes(self) -> int:
        """Memory of the last transfer by collectives: staging and buckets."""
        return self._headrace_landing().peak_bytes

    def headrace_marks(self) -> list[tuple[str, float, float]]:
        """Pieces of the transfers since the last call (protos/weights/marks.py)."""
        return marks.taken()

    def headrace_discard(self) -> None:
        self._headrace_taken = self._headrace_apply_taken = None
        self._headrace_landing().discard()

    def headrace_take(self, version: int) -> None:
        """Holds the verified tensors of exactly this version for headrace_apply; the model is not touched. What can be made ready was, on the
        receiving thread: this call and those of the pause are all that the engine's own thread does for an update."""
        taken, (flat, apply) = self._headrace_landing().take_prepared(version)
        if flat is not getattr(self, "_headrace_flat", None):  # another way was chosen meanwhile
            _, apply = self._headrace_ready(taken, Side(self.device))
        self._headrace_taken, self._headrace_apply_taken = taken, apply  # the copies look into its memory

    def _headrace_ready(self, taken: VerifiedStaging, side: Side) -> tuple[FlatPlan | None, Callable[[], None]]:
        """How a version will be applied, and by which plan of copies (None: the loader). On the receiving thread."""
        flat = getattr(self, "_headrace_flat", None)
        if taken.manifest.HasField("adapter"):
            return flat, self._headrace_adapter(taken, flat, side)
        return flat, flat.prepare(taken) if flat is not None else lambda: self._headrace_load(taken.tensors())

    def headrace_apply(self) -> float:
        """Loads what was taken; the seconds it took. The scheduler must be paused."""
        apply = getattr(self, "_headrace_apply_taken", None)
        assert apply is not None, "headrace_take comes before headrace_apply"
        began = time.monotonic()
        self._headrace_apply_taken = None
        with marks.span("apply"):
            apply()
        with marks.span("apply is done"):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self._headrace_taken = None
        return time.monotonic() - began

    def _headrace_adapter(self, taken: VerifiedStaging, flat: FlatPlan | None, side: Side) -> Callable[[], None]:
        """Base weights out of the model folder with the adapter added; merged before the pause where they are copied."""
        whole = MergedStaging(taken, lambda name: stored(self._headrace_folder, name), list(self._headrace_shapes), side=None if flat is None else side)
        if flat is None:
            return lambda: self._headrace_load(whole.tensors())
        return flat.prepare_some(whole.changed())

    def _headrace_load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
        refresh_packed_vocabulary(self.model_runner.get_model())

    def _headrace_open_landing(self) -> Landing:
        """For a transfer to begin. Raises TransferError where this model takes no updates."""
        if self._headrace_refusal:
            raise TransferError(f"{self._headrace_refusal}; the old weights stay")
        return self._headrace_landing()

    def _headrace_landing(self) -> Landing:
        if not hasattr(self, "_headrace_landed"):
            self._headrace_landed = Landing(self.device, prepare=self._headrace_ready)
        return self._headrace_landed


def _is_quantized(model: torch.nn.Module) -> bool:
    """Whether any layer's weights are kept otherwise than in the served dtype."""
    methods = {type(module.quant_method).__name__ for module in model.modules() if getattr(module, "quant_method", None) is not None}
    return any(not name.startswith("Unquantized") for name in methods)


def _make_room_between_parts(model_runner: Any) -> None:
    """Where layers lie in several parts: what a part gets from the one before. vLLM makes it in a warm-up, which it leaves out on a CPU."""
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and getattr(model_runner, "intermediate_tensors", False) is None:
        model_runner.intermediate_tensors = model_runner.get_model().make_empty_intermediate_tensors(
            batch_size=model_runner.max_num_tokens, dtype=model_runner.model_config.dtype, device=model_runner.device
        )  # fmt: skip


def _without(places: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sampler's arguments, with the logits (first, or by name) at these places of the vocabulary at -inf."""
    logits = args[0] if args else kwargs["logits"]
    logits.index_fill_(-1, places, -torch.inf)
    return args, kwargs


def _pass_the_point(model_runner: Any) -> None:
    """Each step passes `engine_step` first; only where a test has planted a fault."""
    execute = model_runner.execute_model

    def passing(*args: Any, **kwargs: Any) -> Any:
        faultpoints.point("engine_step")
        return execute(*args, **kwargs)

    model_runner.execute_model = passing


def _tensor_parallel() -> tuple[int, int]:
    """Number of tensor-parallel workers, and which of them this is."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()


def _number() -> int:
    """Which of the engine's workers this is: tensor-parallel ones of one part of the layers stand together."""
    from vllm.distributed.parallel_state import get_pp_group

    num_tensor_parallel, worker = _tensor_parallel()
    return int(get_pp_group().rank_in_group) * num_tensor_parallel + worker


def _keep(engine: Engine) -> Keep:
    """What a worker stages of each tensor: its own part, or all of one whose cut is not known."""
    from protos.weights.blocks import whole_part

    def part(name: str, shape: tuple[int, ...], itemsize: int) -> Any:
        place = place_of(name, shape, engine)
        return whole_part(shape, itemsize) if place is None else place.part(shape, itemsize)

    return part


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face folder, one at a time."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, not a dict
                yield name, file.get_tensor(name)
