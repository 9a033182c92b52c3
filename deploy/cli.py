"""The command line. Imports neither torch nor vLLM, and the rest only inside the command that needs it."""

from __future__ import annotations

import asyncio
import functools
import json
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
RunDir = Annotated[Path | None, typer.Option(help="Run folder; one that exists is resumed. Default: runs/COMMAND-TIME.")]


class Mistaken(TyperGroup):
    """Says usage errors in one line, as all other mistakes."""

    def main(self, *args: Any, **extra: Any) -> Any:
        standalone = extra.pop("standalone_mode", True)
        try:
            result = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.TyperException as error:
            _say(error.format_message() if hasattr(error, "format_message") else str(error))
            result = 2
        except typer.Abort:
            result = 130
        if standalone:
            sys.exit(result if isinstance(result, int) else 0)
        return result


def _say(message: str) -> None:
    for line in message.splitlines():
        typer.echo(f"headrace: {line}", err=True)


def says_mistakes(command: Command) -> Command:
    """A command's ValueError is the user's: its message and exit code 2. What else may end a run: its message and 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **keywords: Any) -> None:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        try:
            command(*args, **keywords)
        except ValueError as error:
            _say(str(error))
            raise typer.Exit(2) from None
        except typer.Exit:  # a RuntimeError as well
            raise
        except (RuntimeError, TimeoutError) as error:
            _say(str(error))
            raise typer.Exit(getattr(error, "exit_code", 1)) from None

    return wrapped  # type: ignore[return-value]


app = typer.Typer(cls=Mistaken, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help="Reinforcement learning for language models: rollout, reward and learner as separate services.")
serve = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run one service alone.")
app.add_typer(serve, name="serve")
checkpoint = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look after the cuts of a run.")
app.add_typer(checkpoint, name="checkpoint")


class Backend(StrEnum):
    """Where a run is launched."""

    LOCAL = "local"


class Mode(StrEnum):
    """Which value of a metric is the best."""

    MAX = "max"
    MIN = "min"


class Dtype(StrEnum):
    """Of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Control(StrEnum):
    """Demos that must not learn, and the one that must."""

    NONE = "none"
    SHUFFLED_REWARDS = "shuffled-rewards"
    ZERO_LR = "zero-lr"
    IGNORED_PUSHES = "ignored-pushes"


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from deploy import __version__

        typer.echo(__version__)


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


@app.command()
@says_mistakes
def launch(
    file: Annotated[Path, typer.Argument(help="Run file.")],
    backend: Annotated[Backend, typer.Option(help="Where to run.")] = Backend.LOCAL,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved plan and start nothing.")] = False,
    sets: Sets = [],  # noqa: B006
) -> None:
    """Start all services of a run file and keep them running until it is finished. An existing run folder is resumed.

    Example: headrace launch deploy/templates/cpu.yaml --set learner.steps=20
    """
    from deploy.schema import load
    from deploy.serve import parse_sets
    from deploy.services import describe

    run = load(file, overrides=parse_sets(sets))
    if dry_run:
        typer.echo(json.dumps(describe(run), indent=2))
        return
    from deploy.launch import launch_local

    outcome = launch_local(run, on_event=lambda text: typer.echo(text, err=True))
    if outcome.code:
        _say(outcome.message)
    raise typer.Exit(outcome.code)


@app.command()
@says_mistakes
def validate(file: Annotated[Path, typer.Argument(help="Run file.")], sets: Sets = []) -> None:  # noqa: B006
    """Check a run file without starting anything.

    Example: headrace validate deploy/templates/cpu.yaml
    """
    from deploy.schema import load
    from deploy.serve import parse_sets

    run = load(file, overrides=parse_sets(sets))
    typer.echo(f"{file}: valid; {run.rollout.replicas} rollout, {run.reward.replicas if run.reward else 0} reward, {run.learner.trainer.ranks} trainer ranks")


@app.command()
@says_mistakes
def status(
    target: Annotated[str, typer.Argument(metavar="[ADDRESS|RUN_DIR]", help="HOST:PORT of a learner, or a run folder.")] = "127.0.0.1:7430",
    watch: Annotated[bool, typer.Option(help="Again every two seconds until the run is over.")] = False,
) -> None:
    """What a running run is doing: account, versions, staleness, replicas.

    Example: headrace status runs/first --watch
    """
    from deploy.status import address_of, fetch, lines

    while True:
        answer = asyncio.run(fetch(address_of(target)))
        typer.echo("\n".join(lines(answer)) + ("\n" if watch else ""))
        if not watch or answer.finished:
            return
        time.sleep(2)


@app.command()
@says_mistakes
def report(run_dir: Annotated[Path, typer.Argument(help="Run folder, finished or not.")]) -> None:
    """Write run_dir/report.html: one file with all plots.

    Example: headrace report runs/first
    """
    from deploy.report import write

    typer.echo(str(write(run_dir)))


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
        _say(f"{finding.folder}: {finding.words}")
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


@app.command()
@says_mistakes
def export(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A cut, or a run folder for its newest one.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights. Default: what the run served.")] = None,
    model: Annotated[str, typer.Option(help="The model that training began with. Default: what the run folder says.")] = "",
) -> None:
    """Write a cut as a Hugging Face folder: weights, config, tokenizer, chat template, generation settings. Needs no GPU.

    Example: headrace export runs/first/checkpoints/step-000040 exported --dtype bfloat16
    """
    from deploy.checkpoints import export as export_to

    cut = export_to(source, out, model=model, dtype=dtype.value if dtype else "")
    typer.echo(f"{cut} is exported to {out}")


@app.command()
@says_mistakes
def audit(run_dir: Annotated[Path, typer.Argument(help="Run folder, finished or not.")]) -> None:
    """Prove from a run's files alone that nothing was lost or trained twice. Exit code 1: it was, and each case is named.

    Example: headrace audit runs/first
    """
    from deploy.audit.program import audit as examine
    from deploy.audit.program import table

    outcome = examine(run_dir)
    typer.echo("\n".join(table(outcome)))
    raise typer.Exit(1 if outcome.findings.found else 0)


@app.command()
@says_mistakes
def demo(
    run_dir: RunDir = None,
    control: Annotated[Control, typer.Option(help="A control run, which must not learn.")] = Control.NONE,
    baselines: Annotated[bool, typer.Option(help="Also measure the base model with 48 tokens, and with the start of the answer given.")] = False,
    max_minutes: Annotated[float, typer.Option(min=0.1, help="Training time.")] = 7.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, sampling and training.")] = 0,
) -> None:
    """Teach SmolLM2-135M to answer sums with GRPO on this machine's CPU, and measure it on held-out tasks before and after.

    Example: headrace demo --run-dir runs/demo
    """
    from deploy.demo.demo import Options, run

    options = Options(run_dir=_run_dir(run_dir, "demo"), control=control.value, baselines=baselines, max_minutes=max_minutes, seed=seed)
    _finish(run(options, on_event=lambda text: typer.echo(text, err=True)))


@app.command()
@says_mistakes
def smoke(
    run_dir: RunDir = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, data, sampling and training.")] = 0,
    algorithm: Annotated[str, typer.Option(help="Preset: docs/algorithms.md lists them.")] = "grpo",
) -> None:
    """The demo on a tiny model that sorts digits: all services, real engine, under two minutes.

    Example: headrace smoke --algorithm gspo --seed 1
    """
    from deploy.demo.smoke import run

    _finish(run(_run_dir(run_dir, "smoke"), seed=seed, on_event=lambda text: typer.echo(text, err=True), algorithm=algorithm))


def _run_dir(given: Path | None, command: str) -> Path:
    folder = given or Path("runs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir: {folder} cannot be used: {error}; choose a folder that can be written") from None
    return folder


def _finish(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result))


def main() -> None:
    """Entry point of the `headrace` command."""
    app(prog_name="headrace")


if __name__ == "__main__":
    main()
