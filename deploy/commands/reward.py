"""`headrace reward`: scorers, here or at a server that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.shared import Ca, Sets, TokenEnv, TokenFile, says_mistakes

if TYPE_CHECKING:
    from deploy.reward_try import Line, Row

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
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Ask this reward server, and start no scorers here.")] = "",
    ca: Ca = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = "",
    sets: Sets = [],  # noqa: B006
) -> None:
    """Score the lines of a file, as a reward server would or by one that runs, and show a table.

    Example: headrace reward try answers.jsonl --scorer answer=last_number --scorer maths=math
    """
    from deploy import reward_try as trying
    from deploy.mistakes import Mistakes
    from deploy.reward_asked import asked
    from deploy.status import security_of
    from protos.mistakes import check_address

    here = {"--config": config, "--scorer": scorer, "--set": sets}
    if server and (given := [name for name, value in here.items() if value]):
        raise Mistakes([f"--server {server} with {given[0]}: that server has scorers of its own; remove one of the two"])
    if not server and not any(here.values()):
        raise Mistakes(["nothing says what scores: give --scorer NAME=USE, --config FILE, or --server HOST:PORT of a reward server that runs"])
    if not server and (ca or token_file or token_env):
        raise Mistakes(["--ca, --token-file and --token-env are for --server, and it is not given; add it, or remove them"])
    lines = trying.read(file, prompt_field=prompt_field, completion_field=completion_field)
    if server:
        check_address("--server", server)
        credentials = security_of(server, ca=ca, token_env=token_env, token_file=token_file)
        names, found = asyncio.run(asked(server, credentials, lines, only))
    else:
        names, found = _tried(config, scorer, sets, lines, only)
    for words in trying.records(found) if as_json else trying.table(found, names, most):
        typer.echo(words)


def _tried(config: Path | None, scorer: list[str], sets: list[str], lines: Sequence[Line], only: list[str]) -> tuple[list[str], list[Row]]:
    """Names and rows of scorers that are started here. Raises Mistakes."""
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
    return names, asyncio.run(trying.rows(resolved, lines, names))
