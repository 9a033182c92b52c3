"""`headrace demo` and `headrace smoke`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from deploy.commands.shared import Backend, RunDir, run_folder, says_mistakes, tell


class Control(StrEnum):
    """Demos that must not learn, and the one that must."""

    NONE = "none"
    SHUFFLED_REWARDS = "shuffled-rewards"
    ZERO_LR = "zero-lr"
    IGNORED_PUSHES = "ignored-pushes"


@says_mistakes
def demo(
    run_dir: RunDir = None,
    control: Annotated[Control, typer.Option(help="A control run, which must not learn.")] = Control.NONE,
    baselines: Annotated[bool, typer.Option(help="Also measure the base model with 48 tokens, and with the start of the answer given.")] = False,
    max_minutes: Annotated[float, typer.Option(min=0.1, help="Training time.")] = 7.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, sampling and training.")] = 0,
    backend: Annotated[Backend, typer.Option(help="ray: on a Ray cluster of two nodes that is started on this machine.")] = Backend.LOCAL,
) -> None:
    """Teach SmolLM2-135M to answer sums with GRPO on this machine's CPU, and measure it on held-out tasks before and after.

    Example: headrace demo --run-dir runs/demo
    """
    from deploy.demo.demo import Options, run

    options = Options(run_dir=run_folder(run_dir, "demo"), control=control.value, baselines=baselines, max_minutes=max_minutes, seed=seed, backend=backend.value)
    _finish(run(options, on_event=tell))


class Preset(StrEnum):
    """What a tiny model learns."""

    SORTING = "sorting"
    CALCULATOR = "calculator"


@says_mistakes
def smoke(
    run_dir: RunDir = None,
    preset: Annotated[Preset, typer.Option(help="sorting: three digits in one answer. calculator: a sum by asking a tool, several turns.")] = Preset.SORTING,
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, data, sampling and training.")] = 0,
    algorithm: Annotated[str, typer.Option(help="Preset: docs/algorithms.md lists them.")] = "grpo",
    backend: Annotated[Backend, typer.Option(help="ray: on a Ray cluster of two nodes that is started on this machine.")] = Backend.LOCAL,
) -> None:
    """The demo on a tiny model that sorts digits, or asks a calculator: all services, real engine, under two minutes.

    Example: headrace smoke --preset calculator --seed 1
    """
    if preset is Preset.CALCULATOR:
        from deploy.demo.tool import run as run_tool

        _finish(run_tool(run_folder(run_dir, "calculator"), seed=seed, on_event=tell, algorithm=algorithm))
        return
    from deploy.demo.smoke import run

    _finish(run(run_folder(run_dir, "smoke"), seed=seed, on_event=tell, algorithm=algorithm, backend=backend.value))


def _finish(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result))
