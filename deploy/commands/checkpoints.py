"""`headrace checkpoint` and `headrace export`: cuts, and what is made of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.shared import say, says_mistakes

checkpoint = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look after the cuts of a run.")


class Mode(StrEnum):
    """Which value of a metric is the best."""

    MAX = "max"
    MIN = "min"


class Dtype(StrEnum):
    """Of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@checkpoint.command("list")
@says_mistakes
def checkpoint_list(
    target: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder, or its checkpoints folder.")],
    metric: Annotated[str, typer.Option(help="Also show this field of metrics.jsonl at each cut's step.")] = "",
) -> None:
    """The cuts of a run: step, size, samples still open, age.

    Example: headrace checkpoint list runs/first --metric reward_mean
    """
    from deploy.checkpoints import table

    for line in table(target, metric):
        typer.echo(line)


@checkpoint.command("verify")
@says_mistakes
def checkpoint_verify(target: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder, its checkpoints folder, or one cut.")]) -> None:
    """Compare every file of every cut with the checksums it was saved with. Exit code 1 when something is wrong.

    Example: headrace checkpoint verify runs/first
    """
    from deploy.checkpoints import cuts_of, verify

    findings = list(verify(target))
    for finding in findings:
        say(f"{finding.folder}: {finding.words}")
    if findings:
        raise typer.Exit(1)
    typer.echo(f"{len(cuts_of(target))} cuts are whole")


@checkpoint.command("prune")
@says_mistakes
def checkpoint_prune(
    target: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder, or its checkpoints folder.")],
    keep: Annotated[int, typer.Option(help="Newest cuts that stay.")],
    metric: Annotated[str, typer.Option(help="The cut with the best value of this field of metrics.jsonl stays too.")] = "",
    mode: Annotated[Mode, typer.Option(help="Which value is the best.")] = Mode.MAX,
) -> None:
    """Delete older cuts.

    Example: headrace checkpoint prune runs/first --keep 1 --metric evaluation.score
    """
    from deploy.checkpoints import prune
    from learner.config import KeepBest

    gone = prune(target, keep=keep, best=KeepBest(metric=metric, mode=mode.value) if metric else None)
    typer.echo("\n".join(f"deleted {folder}" for folder in gone) or "nothing to delete")


@says_mistakes
def export(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A cut, or a run folder for its newest one.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights. Default: what the run served.")] = None,
    model: Annotated[str, typer.Option(help="The model that training began with. Default: what the run folder says.")] = "",
    adapter: Annotated[bool, typer.Option("--adapter", help="Of a run with trainer.lora: the adapters alone, for peft. Without it they are added to the weights.")] = False,
) -> None:
    """Write a cut as a Hugging Face folder: weights, config, tokenizer, chat template, generation settings. Needs no GPU.

    Example: headrace export runs/first/checkpoints/step-000040 exported --dtype bfloat16
    """
    from deploy.checkpoints import export as export_to

    cut = export_to(source, out, model=model, dtype=dtype.value if dtype else "", adapter=adapter)
    typer.echo(f"{cut} is exported to {out}")
