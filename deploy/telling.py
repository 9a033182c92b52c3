"""What a launch says while its run goes on: steps, alarms, and why there is no step where groups are only dropped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from deploy.counts import counted
from deploy.mistakes import Mistakes
from deploy.progress import follow, words
from deploy.schema import RunFile
from deploy.status import address_of, fetch, security_of

OnEvent = Callable[[str], None]
SILENCE_S = 60.0  # without a step, after which it is looked at what becomes of the groups


async def tell_steps(run: RunFile, on_event: OnEvent) -> None:
    """A line for each step, evaluation and alarm that is written from now on; ends only when cancelled, or with what one of its tasks raised."""
    silence = Silence(run, on_event)

    async def steps() -> None:
        async for metrics in follow(run.run_dir / "metrics.jsonl"):
            silence.over()
            on_event(words(metrics, run.learner.steps))

    async def alarms() -> None:
        async for alarm in follow(run.run_dir / "alarms.jsonl"):
            on_event(f"alarm {alarm['alarm']}{'' if alarm['fires'] else ' is over'}: {alarm['words']}")

    async with asyncio.TaskGroup() as group:
        for each in (steps(), alarms(), silence.tell()):
            group.create_task(each)


class Silence:
    """Says what was dropped while no step was made. Example: `silence = Silence(run, print); silence.over(); await silence.tell()`"""

    def __init__(self, run: RunFile, on_event: OnEvent, *, silence_s: float = SILENCE_S) -> None:
        self._run, self._on_event, self._silence_s = run, on_event, silence_s
        self._since_s = time.monotonic()
        self._told = ""

    def over(self) -> None:
        """A step was made."""
        self._since_s = time.monotonic()

    async def tell(self) -> None:
        """For ever: each time that long without a step, where groups were dropped, samples were unusable, or a replica has something to say."""
        while True:
            await asyncio.sleep(max(0.01, self._since_s + self._silence_s - time.monotonic()))
            if time.monotonic() - self._since_s < self._silence_s:
                continue
            with contextlib.suppress(Mistakes, OSError):  # a gateway that does not answer is the launcher's to tell
                status = await fetch(address_of(str(self._run.run_dir)), security_of(str(self._run.run_dir)))
                told = [*filter(None, [lost(status.num_dropped, status.num_unusable)]), *(f"{replica.replica_id}: {replica.detail}" for replica in status.replicas if replica.detail)]
                said = ", ".join(told)
                if said and said != self._told:
                    self._told = said
                    self._on_event(f"no step for {time.monotonic() - self._since_s:.0f} s; so far {said}; the logs in {self._run.run_dir}/logs say more")
            await asyncio.sleep(self._silence_s)


def lost(num_dropped: Mapping[str, int], num_unusable: Mapping[str, int]) -> str:
    """Words for what was not trained on; empty where that is nothing. Example: lost({"zero_signal": 26}, {}) is "26 groups dropped (zero_signal 26)"."""
    kinds = ((num_dropped, "groups dropped"), (num_unusable, "samples unusable"))
    return ", ".join(f"{sum(counts.values())} {kind} ({counted(counts)})" for counts, kind in kinds if counts)
