"""Scorers are configured anew while the server runs: SIGHUP reads the configuration file again.

    ask (a signal) ──▶ one task ──▶ read, load ──▶ plane.replace ──▶ new items go to the new scorers
                                        └── a mistake: said in one line, everything stays as it was
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from reward_server import wiring
from reward_server.config import RewardConfig
from reward_server.plane import Plane

log = logging.getLogger("headrace.reward_server.reloading")

# What takes effect; everything else of a changed file waits for the next start, and that is said.
_RELOADED = {"scorers", "default", "workers", "spares", "max_slow", "patience_s", "memory_bytes", "load_limit_s", "pass_env"}


class Reloading:
    """Example: `reloading = Reloading(plane, config, lambda: load_config(path), Path.cwd()); reloading.ask()`"""

    def __init__(self, plane: Plane, config: RewardConfig, reread: Callable[[], RewardConfig], folder: Path) -> None:
        self._plane, self._config, self._reread, self._folder = plane, config, reread, folder
        self._task: asyncio.Task[None] | None = None
        self._is_asked = False

    def ask(self) -> None:
        """Reloads soon; once more when asked while it does."""
        self._is_asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._is_asked:
            self._is_asked = False
            try:
                await self.reload()
            except (ValueError, OSError) as error:  # OSError: a machine without room for another process
                for line in str(error).splitlines():
                    log.error("the scorers stay as they are: %s", line)

    async def reload(self) -> None:
        """Returns once new items go to the scorers of the file. Raises ValueError with a line for each mistake; then nothing has changed."""
        config = self._reread()
        at_work = wiring.scorers(config, self._folder, before=self._plane.at_work)
        await self._plane.replace(at_work, default=config.default or config.scorers[0].name)
        later = sorted(name for name in set(type(config).model_fields) - _RELOADED if getattr(config, name) != getattr(self._config, name))
        if later:
            log.warning("changed in the file, but kept until the next start: %s", ", ".join(later))
        self._config = config.model_copy(update={name: getattr(self._config, name) for name in later})
        log.info("reloaded: %s", ", ".join(each.name for each in config.scorers))
