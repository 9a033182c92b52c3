"""`headrace reward`: scorers without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.shared import Sets, says_mistakes

reward = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Try scorers.")


@reward.command("try")
@says_mistakes
def reward_try(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL: each line a record with a completion, or a list of them for a group.")],
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file with the fields of reward_server/config.py.")] = None,
    scorer: Annotated[list[str], typer.Option(metavar="NAME=USE", help="A scorer: a built-in or module:function; as often as needed.")] = [],  # noqa: B006
    only: Annotated[list[str], typer.Option(metavar="NAME", help="Ask only these of the configured scorers.")] = [],  # noqa: B006
    prompt_field: Annotated[str, typer.Option(help="Field with the prompt.")] = "prompt",
    completion_field: Annotated[str, typer.Option(help="Field with the completion, or a list of them.")] = "completion",
    most: Annotated[int, typer.Option(min=1, help="Lines of the table at most; the summary counts all.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each score instead of a table.")] = False,
    sets: Sets = [],  # noqa: B006
) -> None:
    """Score the lines of a file, as a reward server would, and show a table.

    Example: headrace reward try answers.jsonl --scorer answer=last_number --scorer maths=math
    """
    from deploy import reward_try as trying
    from deploy.mistakes import Mistakes
    from deploy.serve import parse_scorers, resolve
    from reward_server.config import RewardConfig

    resolved = resolve("reward_server", config, {"scorers": parse_scorers(scorer)}, sets)
    assert isinstance(resolved, RewardConfig), "resolve makes the configuration of its module"
    known = [each.name for each in resolved.scorers]
    if unknown := [name for name in only if name not in known]:
        raise Mistakes([f"--only {unknown[0]}: none of the scorers {', '.join(known)}"])
    names = only or known
    lines = trying.read(file, prompt_field=prompt_field, completion_field=completion_field)
    found = asyncio.run(trying.rows(resolved, lines, names))
    for words in trying.records(found) if as_json else trying.table(found, names, most):
        typer.echo(words)
