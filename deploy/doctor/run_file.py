"""A run file: whether it is valid, its addresses are free or answer, and its model is there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from deploy.mistakes import Mistakes
from deploy.schema import RunFile, load

CONNECT_S = 3.0


def findings(path: Path) -> Iterator[str]:
    """One line each. A file that is not valid is not looked at further."""
    try:
        run = load(path)
    except Mistakes as mistakes:
        yield from mistakes.lines
        return
    yield from _addresses(run)
    yield from _model(run)


def _addresses(run: RunFile) -> Iterator[str]:
    listening = {"learner.metrics_address": run.learner.metrics_address, "rollout.metrics_address": run.rollout.metrics_address}
    if "address" in run.learner.model_fields_set:
        listening["learner.address"] = run.learner.address
    for key, address in listening.items():
        if address and (why := why_not_free(address)):
            yield f"{key}={address}: cannot be listened on ({why}): end what holds it (ss -ltnp), or use another port"
    for address in run.rollout.rewards:
        if why := why_no_answer(address):
            yield f"rollout.rewards: {address} does not answer ({why}): start that reward server, or correct the address"


def _model(run: RunFile) -> Iterator[str]:
    folder = Path(run.model).expanduser()
    if not folder.is_dir():
        return  # a hub id: fetched at the first start; a path that is missing is found by validation
    for name, needed in (("*.safetensors", "weights"), ("tokenizer.json", "tokenizer")):
        if not any(folder.glob(name)):
            yield f"model={run.model}: the folder has no {name}, hence no {needed}: give a whole Hugging Face folder (save_pretrained writes one)"


def why_not_free(address: str) -> str:
    """Why nobody could listen there; empty: somebody could."""
    host, port = _parts(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def why_no_answer(address: str) -> str:
    """Why no connection comes about; empty: one does."""
    try:
        with socket.create_connection(_parts(address), timeout=CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
