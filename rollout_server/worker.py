"""What is added to vLLM's worker (worker_extension_cls): receiving weights beside generation, and applying them in a pause.

vLLM imports this module in the process that holds the model and calls the methods by name between engine steps
(collective_rpc). Arguments and results are plain values, since nothing else passes unpickled.
"""

from __future__ import annotations

from typing import Any

import torch

from protos.lifeline import die_with_multiprocessing_parent
from protos.weights.landing import Landing
from protos.weights.staging import VerifiedStaging

die_with_multiprocessing_parent()

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
    _headrace_landed: Landing

    def headrace_describe(self) -> dict[str, str]:
        """Where the model lives: device type, and its UUID where it has one."""
        uuid = str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""
        return {"device": self.device.type, "device_uuid": uuid}

    def headrace_begin_receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        self._headrace_landing().begin_receive(group, manifest, timeout_s)

    def headrace_begin_chunks(self, manifest: bytes) -> None:
        self._headrace_landing().begin_chunks(manifest)

    def headrace_write_chunk(self, bucket: int, offset: int, data: bytes) -> None:
        self._headrace_landing().write_chunk(bucket, offset, data)

    def headrace_finish_chunks(self) -> None:
        self._headrace_landing().finish_chunks()

    def headrace_state(self) -> tuple[str, str]:
        """Phase and detail of the landing (protos/weights/landing.py)."""
        state = self._headrace_landing().state()
        return state.phase, state.detail

    def headrace_discard(self) -> None:
        self._headrace_taken = None
        self._headrace_landing().discard()

    def headrace_take(self, version: int) -> None:
        """Holds the verified tensors of exactly this version for headrace_apply; the model is not touched."""
        self._headrace_taken = self._headrace_landing().take(version)

    def headrace_apply(self) -> None:
        """Loads what was taken. The scheduler must be paused."""
        taken = getattr(self, "_headrace_taken", None)
        assert taken is not None, "headrace_take comes before headrace_apply"
        self._headrace_taken = None
        self.reload_weights(weights_iterator=taken.tensors())  # type: ignore[attr-defined]
        refresh_packed_vocabulary(self.model_runner.get_model())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _headrace_landing(self) -> Landing:
        if not hasattr(self, "_headrace_landed"):
            self._headrace_landed = Landing(self.device)
        return self._headrace_landed
