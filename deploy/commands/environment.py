"""`headrace environment`: one sample by hand."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.commands.shared import says_mistakes

if TYPE_CHECKING:
    from rollout_server.environment_config import EnvironmentConfig
    from rollout_server.environments.interface import Task

environment = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Try environments.")


@environment.callback()
def _group() -> None:
    """Keeps `try` a word of its own while it is the only command."""


@environment.command("try")
@says_mistakes
def environment_try(
    use: Annotated[str, typer.Argument(metavar="USE", help="A built-in, module:Class, or grpc://host:port of an environment server.")],
    answer: Annotated[list[str], typer.Option(metavar="TEXT", help="What the policy says, turn by turn; as often as needed.")] = [],  # noqa: B006
    record: Annotated[str, typer.Option(metavar="JSON", help='The prompt\'s record, for instance \'{"prompt": "2 + 2", "answer": "4"}\'.')] = '{"prompt": ""}',
    options: Annotated[str, typer.Option(metavar="JSON", help="Keyword arguments of the class.")] = "{}",
    seed: Annotated[int, typer.Option(min=0, help="The sample's seed.")] = 0,
    name: Annotated[str, typer.Option(help="With grpc: the environment's name there.")] = "tried",
) -> None:
    """Play one sample with answers of your own, and show what the environment says and gives.

    Example: headrace environment try worlds:Counting --answer 1 --answer 2
    """
    from pydantic import ValidationError

    from deploy.mistakes import Mistakes, of_validation
    from rollout_server.environment_config import EnvironmentConfig
    from rollout_server.environments.interface import EnvironmentFailure, Task

    fields = _object("--record", record)
    try:
        config = EnvironmentConfig(name=name, use=use, options=_object("--options", options))
    except ValidationError as error:
        raise of_validation(error, "") from None
    try:
        asyncio.run(_shown(config, Task(prompt=str(fields.get("prompt", "")), fields=fields, seed=seed), answer))
    except EnvironmentFailure as error:
        raise Mistakes([f"the environment failed: {error}; a sample of a run would be unusable (environment_{error.reason})"]) from None
    except ValueError as error:
        raise Mistakes([str(error)]) from None


async def _shown(config: EnvironmentConfig, task: Task, answers: list[str]) -> None:
    from deploy.environment_try import played

    async for words in played(config, task, answers):
        typer.echo(words)


def _object(option: str, text: str) -> dict[str, Any]:
    from deploy.mistakes import Mistakes

    try:
        found = json.loads(text)
    except ValueError as error:
        raise Mistakes([f"{option} is no JSON ({error}); give an object, for instance '{{\"prompt\": \"2 + 2\"}}'"]) from None
    if not isinstance(found, dict):
        raise Mistakes([f"{option} must be a JSON object, it is {type(found).__name__}"])
    return found
