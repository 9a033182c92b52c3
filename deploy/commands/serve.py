"""`headrace serve`: one service alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.commands.shared import Sets, says_mistakes

serve = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run one service alone.")


@serve.command("learner")
@says_mistakes
def serve_learner(
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file with the fields of learner/config.py.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder or hub id.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL or Parquet file; more with --set data.format=….")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT to listen on.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of the run.")] = None,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """The learner: the account of all groups, and the trainer.

    Example: headrace serve learner --model models/smollm2 --prompts train.jsonl --run-dir runs/first --set optimizer.lr=5e-6
    """
    _serve("learner", config, {"model": model, "data.prompts": prompts and str(prompts), "run_dir": run_dir and str(run_dir), "address": address, "steps": steps}, sets)


@serve.command("rollout")
@says_mistakes
def serve_rollout(
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file with the fields of rollout_server/config.py.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder or hub id.")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")] = None,
    learner: Annotated[str | None, typer.Option(help="HOST:PORT of a learner; without: a plain generation service.")] = None,
    rewards: Annotated[list[str], typer.Option(help="HOST:PORT of a reward server, as often as needed.")] = [],  # noqa: B006
    sets: Sets = [],  # noqa: B006
) -> None:
    """A rollout replica: with --learner it samples for that run, without it serves generation to anyone.

    Example: headrace serve rollout --model models/smollm2 --address 127.0.0.1:7440 --learner 127.0.0.1:7430 --rewards 127.0.0.1:7450
    """
    _serve("rollout_server", config, {"model": model, "address": address, "learner": learner, "rewards": rewards}, sets)


@serve.command("environment")
@says_mistakes
def serve_environment(
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file with the fields of rollout_server/environments/config.py.")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")] = None,
    sets: Sets = [],  # noqa: B006
) -> None:
    """An environment server: plays samples of several turns for any number of replicas (`use: grpc://HOST:PORT`).

    Example: headrace serve environment --config sums.yaml --address 127.0.0.1:7460
    """
    _serve("rollout_server.environments", config, {"address": address}, sets)


@serve.command("reward")
@says_mistakes
def serve_reward(
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file with the fields of reward_server/config.py.")] = None,
    scorer: Annotated[list[str], typer.Option(metavar="NAME=USE", help="A scorer: a built-in or module:function; as often as needed.")] = [],  # noqa: B006
    address: Annotated[str | None, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")] = None,
    workers: Annotated[int | None, typer.Option(help="Scorer processes.")] = None,
    sets: Sets = [],  # noqa: B006
) -> None:
    """A reward server.

    Example: headrace serve reward --scorer answer=last_number --scorer mine=my_package.rewards:score --address 127.0.0.1:7450
    """
    from deploy.serve import parse_scorers

    _serve("reward_server", config, {"scorers": parse_scorers(scorer), "address": address, "workers": workers}, sets)


def _serve(module: str, config: Path | None, flags: dict[str, Any], sets: list[str]) -> None:
    from deploy.serve import become, resolve

    become(module, resolve(module, config, flags, sets))
