"""The actor's own part, without Ray: one process, its log, its end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.on_ray.host import Host

SAYS = "import json, sys\nprint(json.load(open(sys.argv[2]))['word'], flush=True)\n"
SLEEPS = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('in order', flush=True), sys.exit(0)))\nprint('up', flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host("rollout-0", "127.0.0.9")
    yield made
    made.clean()


def ended(host: Host, limit_s: float = 20) -> tuple[int, bytes]:
    """Its exit code, and all that it wrote."""
    end, said = time.monotonic() + limit_s, b""
    while time.monotonic() < end:
        code, more = host.poll(len(said))
        said += more
        if code is not None and not more:
            return code, said
        time.sleep(0.02)
    raise AssertionError(f"it did not end; it said {said!r}")


def module(folder: Path, body: str) -> dict[str, str]:
    """The environment in which `python -m served` runs the body."""
    (folder / "served.py").write_text(body)
    return {"PYTHONPATH": str(folder)}


def test_a_process_gets_its_configuration_as_a_file_and_its_log_comes_back(host: Host, tmp_path: Path) -> None:
    host.start(("served",), '{"word": "grist"}', module(tmp_path, SAYS), str(tmp_path))
    assert ended(host) == (0, b"grist\n")


def test_a_process_is_asked_to_leave_and_does(host: Host, tmp_path: Path) -> None:
    host.start(("served",), "{}", module(tmp_path, SLEEPS), str(tmp_path))
    said = b""
    while b"up" not in said:
        said += host.poll(len(said))[1]
    host.signal(signal.SIGTERM)
    assert ended(host) == (0, b"up\nin order\n")


def test_what_ray_sets_for_its_workers_is_not_inherited(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_JOB_ID", "01")
    host.start(("served",), "{}", module(tmp_path, "import os\nprint([n for n in os.environ if n.startswith(('RAY', 'OMP'))])"), str(tmp_path))
    assert ended(host) == (0, b"[]\n")


def test_addresses_are_this_machines_and_all_differ(host: Host) -> None:
    free = host.addresses(("", "", "0.0.0.0:0", "10.0.0.1:7430"))
    assert all(each.startswith("127.0.0.9:") for each in free)
    assert len(set(free)) == 4 and free[3] == "127.0.0.9:7430"  # a wanted port is kept, a wanted host is another machine's


def test_a_port_that_was_had_before_is_had_again_where_it_is_free(host: Host) -> None:
    (first,) = host.addresses(("",))
    assert host.addresses(("",), (first,)) == [first]
    with socket.create_server(("127.0.0.9", int(first.rpartition(":")[2]))):
        (other,) = host.addresses(("",), (first,))
    assert other.startswith("127.0.0.9:") and other != first


def test_a_folder_that_is_not_on_the_machine_is_named(host: Host, tmp_path: Path) -> None:
    assert host.lacks(str(tmp_path), os.getcwd()) == ""
    assert host.lacks("/no/such/run", os.getcwd()) == "/no/such/run is not on machine 127.0.0.9: put it on storage that the launcher's machine and the cluster's share"


def test_a_clean_host_leaves_neither_process_nor_file(tmp_path: Path) -> None:
    host = Host("reward-0", "127.0.0.9")
    pid = host.start(("served",), "{}", module(tmp_path, SLEEPS), str(tmp_path))
    folder = host._folder
    host.clean()
    assert ended_at(pid) and not folder.exists()


def ended_at(pid: int) -> bool:
    """Whether the process is gone or a zombie, within a while."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_guardian_ends_the_session_when_its_input_ends(tmp_path: Path) -> None:
    import subprocess

    from deploy.on_ray.cluster import GUARDIAN

    pid_file = tmp_path / "pid"
    body = f"import os, subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nopen({str(pid_file)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(60)"
    guardian = subprocess.Popen([sys.executable, str(GUARDIAN), sys.executable, "-c", body], stdin=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 20
    while not (pid_file.exists() and len(pid_file.read_text().split()) == 2):
        assert time.monotonic() < end, "the command did not start"
        time.sleep(0.02)
    assert guardian.stdin is not None
    guardian.stdin.close()
    guardian.wait(20)
    assert all(ended_at(int(pid)) for pid in pid_file.read_text().split())
