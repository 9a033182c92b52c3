"""The command line of the service: mistakes are one line and exit code 2."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_server import __main__ as command


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["rollout_server", "--config", str(path)])
    code = command.main()
    return code, [line for line in capsys.readouterr().err.splitlines() if line.startswith("headrace: ")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: x\nmodel: y", "modle"),
        ("model: y\nmax_num_seqs: 0", "max_num_seqs: Input should be greater than or equal to 1, got 0"),
        ("model: y\nlearner: a:1", "without rewards"),
        ("model: /nowhere/at/all", "/nowhere/at/all"),
        ("- a", "a mapping of keys"),
        ("a: [", "neither YAML nor JSON"),
    ],
)
def test_a_mistake_in_the_file_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "rollout.yaml"
    path.write_text(text)
    code, lines = run(monkeypatch, capsys, path)
    assert code == 2 and len(lines) == 1 and words in lines[0]


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, lines = run(monkeypatch, capsys, tmp_path / "none.yaml")
    assert code == 2 and len(lines) == 1 and "none.yaml" in lines[0]


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        path = tmp_path / "rollout.yaml"
        path.write_text(f"model: {tiny_model}\nengine: small\naddress: 127.0.0.1:{port}")
        code, lines = run(monkeypatch, capsys, path)
    assert code == 2 and len(lines) == 1 and f"127.0.0.1:{port}" in lines[0]


def test_the_process_serves_writes_its_address_and_leaves_in_order_on_sigterm(tmp_path: Path, tiny_model: Path) -> None:
    path, address_file = tmp_path / "rollout.yaml", tmp_path / "run" / "address"
    path.write_text(f"model: {tiny_model}\nengine: small")
    process = subprocess.Popen([sys.executable, "-m", "rollout_server", "--config", str(path), "--address-file", str(address_file)])
    try:
        end_s = time.monotonic() + 40
        while not address_file.exists():
            assert process.poll() is None and time.monotonic() < end_s
            time.sleep(0.05)
        assert address_file.read_text().startswith("127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
