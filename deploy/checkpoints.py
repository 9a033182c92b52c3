"""`headrace checkpoint` and `headrace export`: what lies in a run's checkpoints folder, whether it is whole, and what may go."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.config import KeepBest
from learner.gateway import cut_payloads, cuts
from learner.gateway.best import best_step, values_by_step
from learner.sums import file_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong with one file of a cut. Example: Finding(folder=Path("…/step-000010"), words="__0_0.distcp is missing")"""

    folder: Path
    words: str


def cuts_of(target: Path) -> list[cuts.Cut]:
    """The marked cuts of a run folder, of a checkpoints folder, or the one cut that the folder is. Raises ValueError where there are none."""
    if not target.is_dir():
        raise ValueError(f"{target} is no folder; give a run folder, its checkpoints folder, or one cut in it")
    own = cuts.marked(target)
    found = [own] if own else cuts.all_marked(checkpoints_of(target))
    if not found:
        raise ValueError(f"{target} holds no cut: nothing was saved there yet, or no save was finished")
    return found


def checkpoints_of(target: Path) -> Path:
    return target / "checkpoints" if (target / "checkpoints").is_dir() else target


def table(target: Path, metric: str = "") -> Iterator[str]:
    """One line a cut: step, lineage, size, open samples, age, and the value of a metric at its step."""
    found = cuts_of(target)
    values = values_by_step(checkpoints_of(target).parent / "metrics.jsonl", metric) if metric else {}
    yield f"{'cut':<14}{'step':>8}{'lineage':>9}{'size':>12}{'open':>7}{'age':>10}" + (f"  {metric}" if metric else "")
    for cut in found:
        sizes = [path.stat().st_size for path in cut.folder.rglob("*") if path.is_file()]
        age_s = time.time() - (cut.folder / cuts.MARKER).stat().st_mtime
        open_samples = sum(1 for _ in cut_payloads.read(cut.folder / cut_payloads.NAME))
        value = f"  {values[cut.policy_step]:g}" if cut.policy_step in values else ""
        yield f"{cut.folder.name:<14}{cut.policy_step:>8}{cut.lineage:>9}{sum(sizes) / 2**20:>8.1f} MiB{open_samples:>7}{age_s / 60:>6.0f} min{value}"


def verify(target: Path) -> Iterator[Finding]:
    """Everything that is not as it was saved: checksums of every file, the account, the open payloads."""
    for cut in cuts_of(target):
        for words in _wrong_files(cut):
            yield Finding(folder=cut.folder, words=words)
        try:
            cuts.read_account(cut)
            for _ in cut_payloads.read(cut.folder / cut_payloads.NAME):
                pass
        except (OSError, ValueError) as error:
            yield Finding(folder=cut.folder, words=str(error))


def _wrong_files(cut: cuts.Cut) -> Iterator[str]:
    try:
        expected = cuts.sums(cut)
    except (OSError, ValueError) as error:
        yield f"its checksums cannot be read: {error}"
        return
    if not any(name.startswith("__") for name in expected):
        yield "no rank left checksums of its files"
    for name, wanted in sorted(expected.items()):
        path = cut.folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != wanted["bytes"]:
            yield f"{name} has {path.stat().st_size} bytes, {wanted['bytes']} were saved"
        elif file_sum(path)["xxh3"] != wanted["xxh3"]:
            yield f"{name} has another checksum than what was saved"


def prune(target: Path, *, keep: int, best: KeepBest | None) -> list[Path]:
    """Deletes all but the newest `keep` cuts and the best one; the folders that went. Raises ValueError for keep below 1."""
    if keep < 1:
        raise ValueError(f"--keep {keep}: at least the newest cut must stay, or the run could not be resumed")
    before = cuts_of(target)
    folder = checkpoints_of(target)
    cuts.retain(folder, keep, best=best_step(folder.parent, best))
    return [cut.folder for cut in before if not cut.folder.exists()]


def export(checkpoint: Path, out: Path, *, model: str = "", dtype: str = "", adapter: bool = False) -> Path:
    """Writes a Hugging Face folder, adapters added to the weights, or with `adapter` them alone for peft; the cut that was exported.

    Raises ValueError, saying what is missing or damaged.
    """
    from learner.config import LoraConfig
    from learner.trainer.adapter_export import export_adapter
    from learner.trainer.cut_export import export_cut, load_saved, saved_shapes
    from protos.identity import resolve_model

    cut = cuts_of(checkpoint)[-1]
    resolved = _resolved(cut)
    model, dtype = model or resolved.get("model", ""), dtype or resolved.get("trainer", {}).get("served_dtype", "float32")
    if not model:
        raise ValueError(f"{cut.folder} does not lie in a run folder that says its model; name it with --model")
    wrong = [finding.words for finding in verify(cut.folder)]
    if wrong:
        raise ValueError(f"{cut.folder} is damaged: {'; '.join(wrong)}; export another cut")
    adapters = resolved.get("trainer", {}).get("lora")
    lora = LoraConfig.model_validate(adapters) if adapters else None
    if not adapter:
        export_cut(cut=cut.folder, model_dir=resolve_model(model), out_dir=out, dtype=dtype, lora=lora)
        return cut.folder
    if lora is None:
        raise ValueError(f"{cut.folder} was trained without trainer.lora: it has no adapters; leave --adapter out")
    saved = saved_shapes(cut.folder)
    export_adapter(out_dir=out, saved=saved, lora=lora, model=model, dtype=dtype, load=lambda names: load_saved(cut.folder, {name: saved[name] for name in names}))
    return cut.folder
    return cut.folder


def _resolved(cut: cuts.Cut) -> dict[str, Any]:
    path = cut.folder.parent.parent / "resolved" / "learner.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
