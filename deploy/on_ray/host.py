"""What runs one service on a machine of the cluster: an actor of Ray that owns the service's process.

Every method returns at once, so that the launcher's questions are also a sign of life. The process dies with the actor, which dies with
its raylet: nothing of a run stays on a machine that the cluster has lost. Knows nothing of Ray, whose part begins in launcher.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

CHILD = Path(__file__).resolve().parents[1] / "child.py"
MOST_LOG_BYTES = 256 << 10  # of an answer
# What Ray sets for its own workers, and services must not inherit: threads are the configuration's to say.
OF_RAY = ("OMP_NUM_THREADS", "RAY_")


class Host:
    """Owns the process of one service. Example: see tests/deploy/on_ray/test_host.py"""

    def __init__(self, name: str, ip: str) -> None:
        """ip: of this machine, as the others reach it; empty: Ray is asked."""
        self._name, self._ip = name, ip or _ip_of_ray()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix=f"headrace-{name}-"))
        self._log = self._folder / "log"

    def addresses(self, wants: tuple[str, ...], before: tuple[str, ...] = ()) -> list[str]:
        """host:port on this machine for each: the port that is wanted, else the one that was had before where it is free here, else a free one.

        Nothing holds them from here on.
        """
        with ExitStack() as held:
            return [f"{self._ip}:{self._port(held, want, before[index] if index < len(before) else '')}" for index, want in enumerate(wants)]

    def lacks(self, folder: str, cwd: str) -> str:
        """Why a process could not start here: the folder of the run, or the working folder, is not on this machine. Empty: it could."""
        for path in (cwd, folder):
            if path and not Path(path).is_dir():
                return f"{path} is not on machine {self._ip}: put it on storage that the launcher's machine and the cluster's share"
        return ""

    def start(self, command: tuple[str, ...], config: str, environment: dict[str, str], cwd: str) -> int:
        """Starts `python -m COMMAND --config FILE` with a file of that text; its process id. Raises OSError where it cannot be started."""
        file = self._folder / "config.json"
        file.touch(mode=0o600)
        file.write_text(config)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_RAY)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), sys.executable, "-m", *command, "--config", str(file)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd or None, env={**inherited, "PYTHONUNBUFFERED": "1", **environment}, start_new_session=True,
            )  # fmt: skip
        return self._process.pid

    def poll(self, offset: int) -> tuple[int | None, bytes]:
        """(exit code; None: it runs, the log from a byte offset on, a part of it where it is long)."""
        assert self._process is not None, "started first"
        code = self._process.poll()  # before the log is read: what a process that ended wrote is all there
        with self._log.open("rb") as log:
            log.seek(offset)
            return code, log.read(MOST_LOG_BYTES)

    def signal(self, number: int) -> None:
        """To the process alone, as an orderly stop wants it; SIGKILL to all of its session."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def clean(self) -> None:
        """Ends whatever is left of the service, and removes its files."""
        self.signal(signal.SIGKILL)
        for file in (self._log, self._folder / "config.json"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _port(self, held: ExitStack, want: str, before: str) -> int:
        if wanted := _port_of(want):
            return wanted
        for port in (_port_of(before), 0):
            probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in self._ip else socket.AF_INET))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._ip, port))
            except OSError:
                continue  # somebody has it
            return int(probe.getsockname()[1])
        raise OSError(f"no port of {self._ip} is free")


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2] or 0)


def _ip_of_ray() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())
