"""Models and files that a run file names: whether they are on this machine, and what cannot be known here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from deploy.schema import RunFile
from reward_server.scorers import OWN_PROCESS

INDEX = "model.safetensors.index.json"
WHOLE = (("config.json", "configuration"), ("*.safetensors", "weights"), ("tokenizer.json", "tokenizer"))


def findings(run: RunFile) -> Iterator[str]:
    """One line each: a model's folder that is missing or not whole, prompts and folders that are not there or cannot be written."""
    for key, model in models(run):
        yield from _model(key, model)
    yield from _evaluation(run)
    if run.cluster is None or run.cluster.num_nodes == 1:
        folders = {"run_dir": str(run.run_dir), "cluster.logging.save_dir": run.cluster.logging.save_dir if run.cluster else "", "learner.push.folder": run.learner.push.folder}
        for key, folder in folders.items():
            if folder and "://" not in folder and (why := why_not_made(Path(folder))):
                yield f"{key}={folder}: cannot be made or written ({why}); choose a folder that can"


def not_looked_at(run: RunFile) -> Iterator[str]:
    """Models and data by hub id, a line each."""
    for key, model in models(run):
        if not is_path(model) and not Path(model).is_dir():
            yield f"{key}={model} is no folder here{_near(model)}: taken for a hub id, {'which lies in the cache' if _is_cached(model) else 'which is fetched at the first start and was not looked up'}"
    for name, one in run.learner.data.sources.items():
        if one.format == "hub":
            yield f"learner.{run.learner.data.key_of(name)}.prompts={one.prompts}: a data set of the hub, which was not looked up"


def models(run: RunFile) -> Iterator[tuple[str, str]]:
    """(key, folder or hub id) of every model, each once."""
    algorithm, critic = run.learner.algorithm, run.learner.critic_in_use
    named = [
        ("model", run.model),
        ("learner.critic.model", critic.model if critic else None),
        ("learner.algorithm.kl.model", algorithm.kl.model if algorithm.kl else None),
        ("learner.algorithm.teacher.model", algorithm.teacher.model if algorithm.teacher else None),
    ]
    for index, scorer in enumerate(run.reward.scorers if run.reward else ()):
        if scorer.use in OWN_PROCESS and isinstance(model := scorer.args.get("model"), str):
            named.append((f"reward.scorers.{index}.args.model", model))
    seen: set[str] = set()
    for key, model in named:
        if model and model not in seen:
            seen.add(model)
            yield key, model


def is_path(model: str) -> bool:
    """Whether it can be no hub id, which is NAME or OWNER/NAME."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1


def why_not_made(folder: Path) -> str:
    """Why a folder cannot be made and written by this user; empty: it can."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written by this user"


def _model(key: str, model: str) -> Iterator[str]:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if is_path(model):
            yield f"{key}={model}: no such folder (seen from {Path.cwd()}); give a Hugging Face folder, or a hub id"
        elif os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on") and not _is_cached(model):
            yield f"{key}={model}: no folder here, and nothing of it is in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it; give a folder, fill the cache, or unset HF_HUB_OFFLINE"
        return
    for pattern, needed in WHOLE:
        if not any(folder.glob(pattern)):
            yield f"{key}={model}: the folder has no {pattern}, hence no {needed}: give a whole Hugging Face folder (save_pretrained writes one)"
    for file in sorted(folder.glob("*.safetensors")):
        if why := why_torn(file):
            yield f"{key}={model}: {file.name} {why}: fetch it again"
    if missing := sorted(name for name in _listed(folder) if not (folder / name).is_file()):
        yield f"{key}={model}: {INDEX} names {missing[0]}{f' and {len(missing) - 1} more files' if missing[1:] else ''}, which the folder has not: fetch what is missing"


def why_torn(file: Path) -> str:
    """Why a file of weights is not whole, by its header alone; empty: it is."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            return "is a pointer of Git LFS and no file of weights (`git lfs pull`)"
        if size < 8 + length:
            return f"is cut off: {size} bytes, its header alone has {length}"
        try:
            ends = [part["data_offsets"][1] for name, part in json.loads(opened.read(length)).items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, LookupError):
            return "has a header that cannot be read"
    whole = 8 + length + max(ends, default=0)
    return f"is cut off: {size} bytes of {whole}" if size < whole else ""


def _listed(folder: Path) -> set[str]:
    """Files of weights that the folder's index names."""
    try:
        return {str(name) for name in json.loads((folder / INDEX).read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()


def _evaluation(run: RunFile) -> Iterator[str]:
    evaluation, formats = run.learner.evaluation, {one.format for one in run.learner.data.sources.values()}
    if evaluation is not None and "hub" not in formats and not evaluation.prompts.exists():
        yield f"learner.evaluation.prompts={evaluation.prompts}: no such file (seen from {Path.cwd()}); give the path of held-out prompts, in the format of learner.data"


def _near(model: str) -> str:
    """What a folder of the first part's name holds: `models/smolm2` is rather a slip than an owner named models."""
    owner = Path(model).parent
    there = sorted(each.name for each in owner.iterdir() if each.is_dir()) if "/" in model and owner.is_dir() else []
    return f" ({owner}/ is one, and has {', '.join(there[:5])})" if there else ""


def _is_cached(model: str) -> bool:
    """Whether the hub's cache of this machine has its configuration."""
    home = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub")
    return any((home / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
