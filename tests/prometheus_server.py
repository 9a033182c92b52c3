"""A private Prometheus for tests, and promtool: on a free port, with its data in a folder of its own, killed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from deploy.local import CHILD

MISSING = (
    "these tests need Prometheus' programs `prometheus` and `promtool` (2.40 or later), and they are neither on PATH nor in .venv/prometheus, where `make setup` unpacks Debian's package: "
    "`apt-get install prometheus` or your system's package; HEADRACE_PROMETHEUS=/folder names where they are"
)


def binary(name: str) -> str:
    """prometheus or promtool. Raises AssertionError saying what to install."""
    folders = [os.environ.get("HEADRACE_PROMETHEUS", ""), str(Path(sys.prefix) / "prometheus" / "usr" / "bin")]
    named = next((found for folder in folders if folder and (found := shutil.which(name, path=folder))), None) or shutil.which(name)
    assert named, MISSING
    return named


def promtool(*arguments: str) -> str:
    """What it says. Raises AssertionError with that when it is not content."""
    ran = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def with_us() -> list[str]:
    """Before a command: the kernel kills it when this process dies, however that comes about."""
    return [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())]


class PrometheusServer:
    """Example: `with PrometheusServer(run_dir / "prometheus.yml", folder) as server: server.query("up")`"""

    def __init__(self, configuration: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self._command = [
            *with_us(), binary("prometheus"), f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}", "--storage.tsdb.retention.time=1d",
        ]  # fmt: skip
        self._log = folder / "prometheus.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrometheusServer:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).status == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"Prometheus did not come up: {self._log.read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Each series with its value now."""
        return list(self._ask("query", query=expression)["result"])

    def range(self, expression: str, *, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """Each series with its values over a time."""
        return list(self._ask("query_range", query=expression, start=str(start_s), end=str(end_s), step=str(step_s))["result"])

    def firing(self) -> set[str]:
        """Names of the alarms that fire."""
        return {alert["labels"]["alertname"] for alert in self._ask("alerts")["alerts"] if alert["state"] == "firing"}

    def targets(self) -> dict[str, str]:
        """Health of each target by the name of its service."""
        return {target["labels"]["name"]: target["health"] for target in self._ask("targets")["activeTargets"]}

    def _ask(self, what: str, **arguments: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}", timeout=20) as answer:
            content = json.load(answer)
        assert content["status"] == "success", content
        return content["data"]
