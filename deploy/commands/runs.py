"""Commands about one run: launch, validate, status, report, audit."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.shared import Backend, Ca, Sets, TokenEnv, TokenFile, say, says_mistakes, tell

if TYPE_CHECKING:
    from protos.learner.v1alpha1 import learner_pb2


@says_mistakes
def launch(
    file: Annotated[Path, typer.Argument(help="Run file.")],
    backend: Annotated[Backend, typer.Option(help="Where to run.")] = Backend.LOCAL,
    dry_run: Annotated[bool, typer.Option(help="Print who runs where with which command, and start nothing.")] = False,
    logs: Annotated[bool, typer.Option(help="Also print what all services write, each line with its service's name.")] = False,
    sets: Sets = [],  # noqa: B006
) -> None:
    """Start all services of a run file and keep them running until it is finished. An existing run folder is resumed.

    Example: headrace launch deploy/templates/cpu.yaml --set learner.steps=20
    """
    from deploy.backends import check
    from deploy.dry_run import describe
    from deploy.schema import load
    from deploy.serve import parse_sets

    run = load(file, overrides=parse_sets(sets))
    check(run, backend.value)
    if dry_run:
        typer.echo(json.dumps(describe(run, backend.value), indent=2))
        return
    from deploy.launch import last_words
    from deploy.launch import launch as launch_run

    outcome = launch_run(run, backend=backend.value, with_logs=logs, on_event=tell)
    typer.echo(last_words(run, is_mistaken=outcome.code == 2), err=True)
    if outcome.code:
        say(outcome.message)
    raise typer.Exit(outcome.code)


@says_mistakes
def plan(
    file: Annotated[Path, typer.Argument(help="Run file with `cluster`.")],
    length_share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Mean length of a sample as a share of max_new_tokens.")] = 0.5,
    mfu: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the GPUs' peak that training reaches (docs/benchmarks.md).")] = 0.4,
    sets: Sets = [],  # noqa: B006
) -> None:
    """Predicted throughput, and the best division of the GPUs between training and sampling: an estimate, with its arithmetic.

    Example: headrace plan deploy/templates/stage-1-one-machine.yaml --length-share 0.3
    """
    from deploy.cluster.fits import job_of
    from deploy.planning import lines
    from deploy.schema import load
    from deploy.serve import parse_sets

    run = load(file, overrides=parse_sets(sets))
    job = job_of(run, str(file), length_share=length_share, mfu=mfu)
    most = run.rollout.scale.most if run.rollout.scale else run.rollout.replicas
    for line in lines(job, run.learner.trainer.ranks, most):
        typer.echo(line)


@says_mistakes
def schema(out: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="File to write; none: standard output.")] = None) -> None:
    """The run file's JSON schema, for editors that complete and check YAML.

    Example: headrace schema run-file.schema.json
    """
    from deploy.json_schema import text

    if out is None:
        typer.echo(text(), nl=False)
    else:
        out.write_text(text())


@says_mistakes
def validate(file: Annotated[Path, typer.Argument(help="Run file.")], sets: Sets = []) -> None:  # noqa: B006
    """Check a run file and what it names: models, files, and code, which is imported in a process of its own. No service is started.

    Example: headrace validate deploy/templates/cpu.yaml
    """
    from deploy.doctor.run_file import named_findings, not_looked_at
    from deploy.mistakes import Mistakes
    from deploy.schema import load
    from deploy.serve import parse_sets

    run = load(file, overrides=parse_sets(sets))
    if found := named_findings(run, file):
        raise Mistakes(found)
    typer.echo(f"{file}: valid; {run.rollout.replicas} rollout, {run.reward.replicas if run.reward else 0} reward, {run.learner.trainer.ranks} trainer ranks")
    for line in not_looked_at(run):
        typer.echo(f"not checked: {line}", err=True)


@says_mistakes
def status(
    target: Annotated[str, typer.Argument(metavar="[ADDRESS|RUN_DIR]", help="HOST:PORT of a learner, or a run folder.")] = "127.0.0.1:7430",
    watch: Annotated[bool, typer.Option(help="A page of the terminal that is kept up to date until the run is over; where the output is no terminal, the lines again every two seconds.")] = False,
    ca: Ca = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = "",
) -> None:
    """What a running run is doing: account, versions, staleness, replicas. A run folder knows its own certificates and token.

    Example: headrace status runs/first --watch
    """
    from deploy.status import address_of, at_rest, fetch, lines, security_of

    def ask() -> learner_pb2.GetStatusResponse:
        return asyncio.run(fetch(address_of(target), security_of(target, ca=ca, token_env=token_env, token_file=token_file)))

    try:
        if watch and sys.stdout.isatty():
            from deploy.watching import watch as keep_watching

            keep_watching(ask, target)
            return
        while True:
            answer = ask()
            typer.echo("\n".join(lines(answer)) + ("\n" if watch else ""))
            if not watch or answer.finished:
                return
            time.sleep(2)
    except ValueError:
        if words := at_rest(target):
            typer.echo(words)
            return
        raise
    except KeyboardInterrupt:
        return


@says_mistakes
def scrape_config(
    target: Annotated[Path, typer.Argument(metavar="FILE|RUN_DIR", help="Run file whose sections fix their metrics_address, or the folder of a launched run.")],
    sets: Sets = [],  # noqa: B006
) -> None:
    """Write what Prometheus needs of a run into its folder, as launching does: prometheus.yml, the targets, the alert rules.

    Example: headrace scrape-config runs/first
    """
    from deploy.scraping import scrape_config_of
    from deploy.serve import parse_sets

    typer.echo(str(scrape_config_of(target, overrides=parse_sets(sets))))


@says_mistakes
def report(run_dir: Annotated[Path, typer.Argument(help="Run folder, finished or not.")]) -> None:
    """Write run_dir/report.html: one file with all plots.

    Example: headrace report runs/first
    """
    from deploy.report import write

    typer.echo(str(write(run_dir)))


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
