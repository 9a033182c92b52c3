"""`headrace doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.shared import says_mistakes


@says_mistakes
def doctor(target: Annotated[Path | None, typer.Argument(metavar="[FILE|RUN_DIR]", help="Run file or run folder; none: this machine.")] = None) -> None:
    """What is wrong with this machine, a run file or a run folder: a line for each finding. Exit code 0: nothing; 1: something.

    Example: headrace doctor runs/first
    """
    from deploy.doctor import machine, run_file, run_folder
    from deploy.mistakes import Mistakes

    if target is None:
        found = list(machine.findings(machine.look(Path.cwd())))
    elif target.is_dir():
        found = list(run_folder.findings(target))
    elif target.is_file():
        found = list(run_file.findings(target))
        for line in run_file.not_looked_at_of(target):
            typer.echo(f"not checked: {line}", err=True)
    else:
        raise Mistakes([f"{target}: neither a run file nor a run folder; give one of them, or nothing for this machine"])
    for line in found:
        typer.echo(line)
    typer.echo(f"{len(found)} findings" if found else f"{target or 'this machine'}: nothing wrong found", err=True)
    raise typer.Exit(1 if found else 0)
