"""The local launcher, with small scripts in the place of services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import services
from deploy.keeper import Policy, RunEnded
from deploy.local import Local
from deploy.services import Service, free_addresses

QUICK = Policy(max_restarts=2, first_backoff_s=0.05, grace_s=1.0)
ROOT = Path(__file__).resolve().parents[2]


def script(folder: Path, name: str, body: str, *, restart: bool = True) -> Service:
    """A service that runs `body`."""
    return Service(name=name, command=(sys.executable, "-c", body), log=folder / "logs" / f"{name}.log", restart=restart)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(question: object, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not question():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


SLEEPS = "import time; time.sleep(60)"


async def test_the_learners_good_end_ends_the_run_and_stops_the_others(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "rollout-0", f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n{SLEEPS}"))
        local.start(script(tmp_path, "learner", "import time; time.sleep(0.5)", restart=False))
        outcome = await local.outcome()
    assert (outcome.code, outcome.message) == (0, "")
    assert not is_alive(int(pid_file.read_text()))


async def test_a_replica_that_dies_is_restarted_and_counted(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    body = f"open({str(lives)!r}, 'a').write('x')\nimport sys, time\nsys.exit(1) if len(open({str(lives)!r}).read()) < 3 else time.sleep(60)"
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "rollout-0", body))
        await asyncio.to_thread(until, lambda: lives.exists() and lives.read_text() == "xxx")
        assert local.restarts["rollout-0"] == 2


async def test_a_service_that_does_not_leave_by_itself_is_started_again_when_it_ends_with_0(tmp_path: Path) -> None:
    """A reward server that was ended with SIGTERM: nothing would be scored from then on."""
    lives = tmp_path / "lives"
    body = f"open({str(lives)!r}, 'a').write('x')\nimport sys, time\nsys.exit(0) if len(open({str(lives)!r}).read()) < 2 else time.sleep(60)"
    told: list[str] = []
    async with Local(QUICK, on_event=told.append) as local:
        local.start(replace(script(tmp_path, "reward-0", body), leaves=False))
        await asyncio.to_thread(until, lambda: lives.exists() and lives.read_text() == "xx")
    assert told[0].startswith("reward-0 died (exit code 0); restart 1 of 2")


async def test_a_service_that_left_may_be_started_anew(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    service = script(tmp_path, "rollout-0", f"open({str(lives)!r}, 'a').write('x')")
    async with Local(QUICK) as local:
        for count in (1, 2):
            local.start(service)
            assert not local.left
            await asyncio.to_thread(until, lambda: local.left == {"rollout-0"})
            assert lives.read_text() == "x" * count


async def test_a_mistake_of_an_earlier_life_is_not_told_again(tmp_path: Path) -> None:
    service = script(tmp_path, "rollout-0", "import sys; sys.exit(2)")
    service.log.parent.mkdir()
    service.log.write_text("headrace: the mistake of yesterday\n")
    async with Local(QUICK) as local:
        local.start(service)
        outcome = await local.outcome()
    assert outcome.message == f"rollout-0: refused its configuration, see {service.log}"


async def test_a_launcher_under_nohup_goes_on_when_the_terminal_hangs_up(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with Local(QUICK) as local:
            local.start(script(tmp_path, "learner", "import time; time.sleep(1)", restart=False))
            os.kill(os.getpid(), signal.SIGHUP)
            assert (await local.outcome()).code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_service_beyond_its_restarts_ends_the_run_and_names_its_log(tmp_path: Path) -> None:
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "reward-0", "import sys; sys.exit(3)"))
        outcome = await local.outcome()
    assert outcome.code == 1
    assert outcome.message == f"reward-0 died (exit code 3) after 2 restarts in a row, see {tmp_path}/logs/reward-0.log"


async def test_a_users_mistake_is_never_restarted_and_its_line_is_passed_on(tmp_path: Path) -> None:
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "rollout-0", "import sys; print('noise'); sys.stderr.write('headrace: model is missing\\n'); sys.exit(2)"))
        outcome = await local.outcome()
    assert (outcome.code, outcome.message) == (2, "rollout-0: model is missing")
    assert local.restarts["rollout-0"] == 0


async def test_the_learners_death_is_a_failure_that_names_the_signal(tmp_path: Path) -> None:
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "learner", "import os; os.kill(os.getpid(), 9)", restart=False))
        outcome = await local.outcome()
    assert outcome.code == 1
    assert outcome.message.startswith("learner died (killed by SIGKILL)")


async def test_a_service_gets_sigterm_and_time_to_leave_in_order(tmp_path: Path) -> None:
    body = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('in order', flush=True), sys.exit(0)))\nprint('up', flush=True)\ntime.sleep(60)"
    service = script(tmp_path, "rollout-0", body)
    async with Local(QUICK) as local:
        local.start(service)
        await asyncio.to_thread(until, lambda: service.log.exists() and "up" in service.log.read_text())
    assert "in order" in service.log.read_text()


LEAVES_SLOWLY = (
    "import signal, sys, time\ndef leave(*_):\n    time.sleep(2)\n    open({left!r}, 'w').close()\n    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, leave)\nopen({up!r}, 'w').close()\ntime.sleep(60)"
)


@pytest.mark.parametrize(("pause_s", "in_order"), [(0.0, True), (0.3, False)])
async def test_a_signal_told_twice_at_once_is_one_word_and_a_later_one_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float, in_order: bool) -> None:
    monkeypatch.setattr("deploy.keeper.AGAIN_S", 0.2)
    up, left = tmp_path / "up", tmp_path / "left"
    told: list[str] = []
    async with Local(Policy(grace_s=30.0), on_event=told.append) as local:
        local.start(script(tmp_path, "learner", LEAVES_SLOWLY.format(up=str(up), left=str(left))))
        await asyncio.to_thread(until, up.exists)
        os.kill(os.getpid(), signal.SIGTERM)
        if not pause_s:
            os.kill(os.getpid(), signal.SIGINT)  # in the same millisecond, as `timeout` does; another one, since equal ones are one
        outcome = await local.outcome()
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, os.kill, os.getpid(), signal.SIGTERM)
    assert outcome.code == 128 + signal.SIGTERM and left.exists() is in_order
    assert any("killed at once" in words for words in told) is not in_order


async def test_what_ignores_sigterm_is_killed_with_its_children_after_the_grace(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(60)"
    )
    started = time.monotonic()
    async with Local(Policy(grace_s=0.3)) as local:
        local.start(script(tmp_path, "rollout-0", body))
        await asyncio.to_thread(until, lambda: pids.exists() and len(pids.read_text().split()) == 2)
    assert time.monotonic() - started < 10
    until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


async def test_a_service_that_takes_longer_to_leave_has_a_grace_of_its_own(tmp_path: Path) -> None:
    """A learner cuts before it leaves."""
    up, left = tmp_path / "up", tmp_path / "left"
    body = (
        f"import signal, sys, time\ndef leave(*_):\n    time.sleep(1)\n    open({str(left)!r}, 'w').close()\n    sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, leave)\nopen({str(up)!r}, 'w').close()\ntime.sleep(60)"
    )
    async with Local(Policy(grace_s=0.1)) as local:
        local.start(replace(script(tmp_path, "learner", body), grace_s=30.0))
        await asyncio.to_thread(until, up.exists)
    assert left.exists()


async def test_what_a_dead_service_leaves_behind_is_killed_before_it_comes_back(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\nsys.exit(1)"
    )
    async with Local(Policy(max_restarts=0)) as local:
        local.start(script(tmp_path, "rollout-0", body))
        await local.outcome()
        await asyncio.to_thread(until, lambda: not is_alive(int(pid_file.read_text())))


async def test_waiting_for_a_service_ends_when_the_run_does(tmp_path: Path) -> None:
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "rollout-0", "import sys; sys.exit(3)"))
        with pytest.raises(RunEnded, match="rollout-0 died .exit code 3. after 2 restarts"):
            await local.ready("rollout-0", limit_s=20)


async def test_waiting_for_a_service_raises_a_users_mistake_as_one(tmp_path: Path) -> None:
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "rollout-0", "import sys; sys.stderr.write('headrace: no such model\\n'); sys.exit(2)"))
        with pytest.raises(ValueError, match="rollout-0: no such model"):
            await local.ready("rollout-0", limit_s=20)


async def test_waiting_for_a_silent_service_gives_up_and_says_so(tmp_path: Path) -> None:
    async with Local(QUICK) as local:
        local.start(script(tmp_path, "rollout-0", SLEEPS))
        with pytest.raises(TimeoutError, match="rollout-0 did not answer health checks within 0 s"):
            await local.ready("rollout-0", limit_s=0.1)


async def test_a_launcher_that_fails_itself_ends_the_run_with_a_word(tmp_path: Path) -> None:
    async with Local(QUICK) as local:
        local.start(replace(script(tmp_path, "rollout-0", SLEEPS), environment={"A": 1}))  # type: ignore[dict-item]
        outcome = await local.outcome()
    assert outcome.code == 1 and outcome.message.startswith("rollout-0: the launcher failed: TypeError: ")


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from deploy import services
from deploy.keeper import Policy
from deploy.local import Local
from deploy.services import Service
async def main():
    async with Local(Policy(grace_s=2.0), on_event=print) as local:
        local.start(Service(name="rollout-0", command=(sys.executable, "-c", sys.argv[2]), log=Path(sys.argv[1]) / "rollout-0.log"))
        outcome = await local.outcome()
    print(outcome.code, outcome.message)
asyncio.run(main())
"""


def launched(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A launcher in a process of its own, and the pid of the service it keeps."""
    pid_file = folder / "pid"
    body = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), body], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: pid_file.exists() and pid_file.read_text())
    return launcher, int(pid_file.read_text())


def test_no_service_outlives_a_launcher_killed_by_sigkill(tmp_path: Path) -> None:
    launcher, pid = launched(tmp_path)
    launcher.kill()
    launcher.communicate(timeout=10)
    until(lambda: not is_alive(pid))


def test_control_c_stops_the_services_in_order(tmp_path: Path) -> None:
    launcher, pid = launched(tmp_path)
    os.killpg(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=20)
    assert not is_alive(pid)
    assert output.splitlines()[-1] == "130 stopped by SIGINT"


def test_free_addresses_all_differ() -> None:
    assert len(set(free_addresses(20))) == 20


def test_free_addresses_are_none_that_outgoing_connections_get_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_first_outgoing_port", lambda: 32_768)
    assert all(20_000 <= int(each.rpartition(":")[2]) < 32_768 for each in free_addresses(20))
    monkeypatch.setattr(services, "_first_outgoing_port", lambda: 1024)
    assert len(set(free_addresses(20))) == 20
