"""The command line. Imports neither torch nor vLLM, and the rest only inside the command that needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands.checkpoints import checkpoint, export
from deploy.commands.demos import demo, smoke
from deploy.commands.doctor import doctor
from deploy.commands.environment import environment
from deploy.commands.reward import reward
from deploy.commands.runs import audit, launch, plan, report, schema, scrape_config, status, validate
from deploy.commands.serve import serve
from deploy.commands.shared import Mistaken

app = typer.Typer(cls=Mistaken, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help="Reinforcement learning for language models: rollout, reward and learner as separate services.")
app.add_typer(serve, name="serve")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(reward, name="reward")
app.add_typer(environment, name="environment")
for command in (launch, validate, plan, schema, status, scrape_config, report, export, audit, doctor, demo, smoke):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from deploy import __version__

        typer.echo(__version__)


def main() -> None:
    """Entry point of the `headrace` command."""
    app(prog_name="headrace")


if __name__ == "__main__":
    main()
