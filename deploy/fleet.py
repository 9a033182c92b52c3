"""What a launcher runs on, seen alike: which processes there are, how one more is started, where each is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from deploy.keeper import Keeper
from deploy.local import Local
from deploy.processes import Process, Where, processes
from deploy.schema import RunFile
from deploy.scraping import write_scraping
from deploy.services import Service, fixed, free_addresses, local_service


class Fleet(Protocol):
    """A run's processes on one backend. Example: see launch.py."""

    first: list[Process]  # what the run begins with: reward servers, replicas, the learner

    def keeper(self) -> Keeper[Any]:
        """To be entered before anything is started."""

    def start(self, *started: Process, held: tuple[str, ...] = ()) -> None:
        """Makes them run, and be found by the others. held: names of those that get an address only, until they are released."""

    def release(self, name: str) -> None:
        """Makes one run that was held."""

    async def stop(self, name: str) -> None:
        """Stops one in good order, for good: nobody looks for it any more."""

    def where(self, name: str) -> Where:
        """Where a process is found that has answered health checks."""


class LocalFleet:
    """Processes of this machine. Their addresses are fixed at the start, so one that dies comes back where the others look for it."""

    def __init__(self, run: RunFile, on_event: Callable[[str], None]) -> None:
        self._run, self._on_event = run, on_event
        self._local: Local = Local(on_event=on_event)
        self._services: dict[str, Service] = {}
        self.first = processes(run)

    @classmethod
    @contextmanager
    def open(cls, run: RunFile, on_event: Callable[[str], None]) -> Iterator[LocalFleet]:
        """Holds nothing."""
        yield cls(run, on_event)

    def keeper(self) -> Local:
        return self._local

    def start(self, *started: Process, held: tuple[str, ...] = ()) -> None:
        for service in self.services(*started):
            if service.name not in held:
                self._local.start(service)

    def release(self, name: str) -> None:
        self._local.start(self._services[name])

    async def stop(self, name: str) -> None:
        await self._local.stop(name)
        del self._services[name]
        self._tell_prometheus()

    def services(self, *started: Process) -> list[Service]:
        """Finds addresses for them and writes their configurations under run_dir/resolved/launch."""
        free = iter(free_addresses(2 * len(started)))
        where = {
            process.name: Where(address=fixed(process.wants, next(free)), metrics=process.wants_metrics and fixed(process.wants_metrics, next(free)))
            for process in started
        }
        addresses = {**{name: service.address for name, service in self._services.items()}, **{name: one.address for name, one in where.items()}}
        for process in started:
            needed = {name: addresses[name] for name in process.needs}
            self._services[process.name] = local_service(self._run, process, where[process.name], needed)
        self._tell_prometheus()
        return [self._services[process.name] for process in started]

    def where(self, name: str) -> Where:
        service = self._services[name]
        return Where(address=service.address, metrics=service.metrics_address)

    def _tell_prometheus(self) -> None:
        scraping = write_scraping(self._run, {name: service.metrics_address for name, service in self._services.items()})
        if scraping is not None:
            self._on_event(f"figures: prometheus --config.file={scraping}")
