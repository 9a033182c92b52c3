"""What every command shares: options that several have, and how a mistake is said."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

Command = TypeVar("Command", bound=Callable[..., None])
Sets = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any other field, dotted, as often as needed.")]
Ca = Annotated[Path | None, typer.Option(help="Certificates to check the service's against, PEM: it is called by TLS.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the service's bearer token.")]
TokenEnv = Annotated[str, typer.Option(metavar="VARIABLE", help="Environment variable with the token, instead of a file.")]
RunDir = Annotated[Path | None, typer.Option(help="Run folder; one that exists is resumed. Default: runs/COMMAND-TIME.")]


class Backend(StrEnum):
    """Where a run is launched."""

    LOCAL = "local"
    RAY = "ray"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"


class Mistaken(TyperGroup):
    """Says usage errors in one line, as all other mistakes."""

    def main(self, *args: Any, **extra: Any) -> Any:
        standalone = extra.pop("standalone_mode", True)
        try:
            result = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.TyperException as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # the help, and no mistake
                typer.echo(error.format_message())
                sys.exit(2)
            say(error.format_message() if hasattr(error, "format_message") else str(error))
            result = 2
        except typer.Abort:
            result = 130
        if standalone:
            sys.exit(result if isinstance(result, int) else 0)
        return result


def say(message: str) -> None:
    """A message on stderr, each line with the program's name before it."""
    for line in message.splitlines():
        typer.echo(f"headrace: {line}", err=True)


def tell(text: str) -> None:
    """An event of a run on stderr. Nobody may read it any more (a closed terminal, `| head`), which ends no run."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def says_mistakes(command: Command) -> Command:
    """A command's ValueError is the user's: its message and exit code 2. What else may end a run: its message and 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **keywords: Any) -> None:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        try:
            command(*args, **keywords)
        except ValueError as error:
            say(str(error))
            raise typer.Exit(2) from None
        except typer.Exit:  # a RuntimeError as well
            raise
        except (RuntimeError, TimeoutError) as error:
            say(str(error))
            raise typer.Exit(getattr(error, "exit_code", 1)) from None

    return wrapped  # type: ignore[return-value]


def run_folder(given: Path | None, command: str) -> Path:
    """The run folder of a command, made when absent.

    Raises ValueError when it cannot be made.
    """
    folder = given or Path("runs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir: {folder} cannot be used: {error}; choose a folder that can be written") from None
    return folder
