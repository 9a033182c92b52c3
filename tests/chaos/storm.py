"""A storm: one fault after another from a printed seed; after each the run must go on, and the audit must be clean."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.audit.findings import Moved
from deploy.audit.program import Audit, audit, table
from tests.chaos.faults import Fault
from tests.chaos.scene import Scene, scene
from tests.system.harness import wait_for

PROGRESS_STEPS = 2  # past the highest step before the fault
FIRST_S = 900.0  # for the first steps: 10 s on two idle cores, minutes on cores that others use


def say(text: str) -> None:
    sys.stderr.write(f"chaos {time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def blow(folder: Path, model: Path, *, seed: int, faults: Sequence[Fault], seconds: float, ranks: int, redis: bool = False) -> Audit:
    """Faults for so many seconds, and to the end of the last one; the last audit, of the run at rest. Raises AssertionError saying seed, fault and what did not hold."""
    rng = random.Random(seed)
    say(f"seed {seed}, {ranks} ranks, journal in {'Redis' if redis else 'segments'}, {seconds:.0f} s")
    with scene(folder, model, ranks=ranks, redis=redis) as at:
        began = time.monotonic()
        wait_for("the first steps", lambda: at.step() >= 2, limit_s=FIRST_S, guard=at.run.learner_must_live)
        at.patience_s = max(at.patience_s, 4 * (time.monotonic() - began))
        say(f"seed {seed}: begun after {time.monotonic() - began:.0f} s; each fault has {at.patience_s:.0f} s to be got over")
        end, order = time.monotonic() + seconds, list[Fault]()
        while time.monotonic() < end:
            order = order or rng.sample(faults, len(faults))  # each once before any comes twice
            _one(at, order.pop(), rng, seed)
        at.run.stop()
        outcome = clean(at, f"seed {seed}: at the end")
        say(f"seed {seed}: {at.step()} steps, {len(at.run.metrics())} lines, clean")
        return outcome


def _one(at: Scene, fault: Fault, rng: random.Random, seed: int) -> None:
    started = time.monotonic()
    done = fault(at, rng)
    time.sleep(0.5)  # for what was already under way
    before = at.step()
    revived = at.revive()
    assert "learner" not in revived or "everything" in done or "learner" in done, f"seed {seed}: {done}: the learner gave up:\n{at.run.services['learner'].tail()}"
    what = f"seed {seed}: {done} (revived: {', '.join(revived) or 'none'})"
    wait_for(f"{PROGRESS_STEPS} steps past {before} after {what}", lambda: at.step() >= before + PROGRESS_STEPS, limit_s=at.patience_s, guard=at.run.learner_must_live)
    say(f"{what}: step {before} to {at.step()} in {time.monotonic() - started:.1f} s")
    clean(at, what)


def clean(at: Scene, what: str) -> Audit:
    """The audit, also of a run that goes on. Raises AssertionError with its table when it is not clean."""
    while True:
        try:
            outcome = audit(at.run.run_dir)
        except Moved:
            continue
        assert not outcome.findings.found, f"{what}: the audit is not clean:\n" + "\n".join(table(outcome))
        return outcome
