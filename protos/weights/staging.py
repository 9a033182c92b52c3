"""Staging of one version at the receiver: tensors that nothing samples from until they are whole and verified."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class VerifiedStaging:
    """All tensors of one version, every byte received once and every slice's digest checked."""

    version: int

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor of the manifest's shape and dtype), in manifest order."""
        raise NotImplementedError
