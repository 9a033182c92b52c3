"""The code that a run file names: scorers, environments, agents, functions of the algorithm. Each is imported as its service would, in a process of its own.

Nothing is called and no model is loaded: what is found is a module that is not there, a name that it does not have, arguments that do not fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deploy.keeper import exit_words
from deploy.schema import RunFile
from protos.mistakes import one_line
from protos.scrubbing import scrubbed
from reward_server.scorers import OWN_PROCESS
from reward_server.wiring import environment_of
from rollout_server.environment_config import BUILT_IN

FUNCTION_S = 120.0  # for a trainer's own function to be imported: torch comes with most
AT_ONCE = 4
Kind = Literal["scorer", "environment", "agent", "function"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One name. Example: `Use(key="reward.scorers.0.use", kind="scorer", name="mine:score", limit_s=120.0)`"""

    key: str  # where the run file says it
    kind: Kind
    name: str  # module:function, or a built-in
    arguments: dict[str, Any] = field(default_factory=dict)
    limit_s: float  # for the import
    sees: dict[str, str] = field(default_factory=dict)  # its environment, without credentials where its service takes them away


def mistakes(run: RunFile) -> list[str]:
    """What is wrong with each, one line; empty: all can be imported here. Takes as long as the slowest import."""
    named = list(uses(run))
    with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
        return [f"{use.key}={use.name}: {words}" for use, words in zip(named, threads.map(wrong, named), strict=True) if words]


def uses(run: RunFile) -> Iterator[Use]:
    """What there is to import; built-ins without arguments are known to be there."""
    if run.reward is not None:
        sees = environment_of(run.reward)
        for index, scorer in enumerate(run.reward.scorers):
            if scorer.use and (":" in scorer.use or scorer.args):
                yield Use(key=f"reward.scorers.{index}.use", kind="scorer", name=scorer.use, arguments=scorer.args, limit_s=run.reward.load_limit_s, sees=sees)
    named = [name for name in (run.rollout.security.token_env,) if name]
    for index, environment in enumerate(run.rollout.environments):
        if not environment.is_remote and (environment.use not in BUILT_IN or environment.options):
            yield Use(
                key=f"rollout.environments.{index}.use", kind="agent" if environment.agent else "environment", name=environment.use,
                arguments=environment.options, limit_s=environment.load_timeout_s, sees=scrubbed(os.environ, named=named),
            )  # fmt: skip
    for name, key in {name: key for key, name in _functions(run)}.items():
        yield Use(key=key, kind="function", name=name, limit_s=FUNCTION_S, sees=dict(os.environ))


def not_looked_at(run: RunFile) -> Iterator[str]:
    """What only the services themselves can find, a line each."""
    for index, scorer in enumerate(run.reward.scorers if run.reward else ()):
        if scorer.use in OWN_PROCESS:
            yield f"reward.scorers.{index}: the model of {scorer.use} was not loaded"
        if scorer.http or scorer.grpc or scorer.judge:
            yield f"reward.scorers.{index}: {scorer.name} is scored elsewhere, which was not asked; `headrace reward try` asks it"
    for index, environment in enumerate(run.rollout.environments):
        if environment.is_remote:
            yield f"rollout.environments.{index}: {environment.use} was not asked"
    if run.cluster is not None and run.cluster.num_nodes > 1:
        yield f"code and files were looked for on this machine alone, of {run.cluster.num_nodes}: `headrace doctor FILE` on each tells of the others"


def wrong(use: Use) -> str:
    """What hinders the import of one; empty: nothing."""
    asked = json.dumps({"kind": use.kind, "name": use.name, "arguments": use.arguments})
    child = subprocess.Popen(
        [sys.executable, "-m", "deploy.importing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env={**use.sees, "PYTHONPATH": os.pathsep.join(filter(None, [use.sees.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[1])]))},
    )  # fmt: skip
    try:
        said, _ = child.communicate(asked, timeout=use.limit_s)
    except subprocess.TimeoutExpired:
        return f"it was not imported within {use.limit_s:g} s; look at what its module does at import"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    try:
        return one_line(ValueError(json.loads(said)["wrong"])) if json.loads(said)["wrong"] else ""
    except (ValueError, TypeError, KeyError):
        return f"its process ended ({exit_words(child.returncode)}) while it was imported; look at what its module does at import"


def _functions(run: RunFile) -> Iterator[tuple[str, str]]:
    """(key, module:function) of the run's algorithm and of those of single data sets."""
    for name in run.learner.data.sources:
        algorithm = run.learner.algorithm_of(name)
        for part, said in (("loss", algorithm.loss), ("advantage", algorithm.advantage)):
            if name_of_it := getattr(said, "function", None):
                yield f"learner.{run.learner.data.key_of(name) + '.' if run.learner.data.sources[name].algorithm else ''}algorithm.{part}.function", name_of_it
