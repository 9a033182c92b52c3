"""What may go wrong in a storm. Each fault breaks something, mends it again where it does not mend itself, and says what it did."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from protos import faultpoints
from tests.chaos.scene import KINDS, LEAVE_S, REPLICAS, Scene
from tests.system.harness import wait_for

REACHED_BY_CRASH = "after_rollback_before_answer"  # passed only when a trainer comes back
FULL = ("before_fsync", "before_cut_marker", "trainer_save")  # where the disk may say no; the last one says it to one rank only


def killed_at_a_point(scene: Scene, rng: random.Random) -> str:
    return plant(scene, rng, f"{rng.choice(sorted(faultpoints.POINTS))}=kill")


def disk_error_at_a_point(scene: Scene, rng: random.Random) -> str:
    return plant(scene, rng, f"{rng.choice(FULL)}=full")


def plant(scene: Scene, rng: random.Random, setting: str) -> str:
    """Plants a fault and waits until somebody ran into it."""
    faultpoints.plant(scene.fault_file, setting)
    if setting.startswith(REACHED_BY_CRASH):
        scene.signal(rng.choice(scene.pids("rank")), signal.SIGKILL)
    wait_for(f"somebody to pass {setting}", lambda: not scene.fault_file.exists(), limit_s=scene.patience_s, guard=scene.run.learner_must_live)
    return setting


def killed_at_random(scene: Scene, rng: random.Random, kinds: Sequence[str] = KINDS) -> str:
    kind = rng.choice(kinds)
    pid = rng.choice(scene.pids(kind))
    time.sleep(rng.random())
    scene.signal(pid, signal.SIGKILL)
    return f"SIGKILL {kind} {pid}"


def two_killed_at_once(scene: Scene, rng: random.Random) -> str:
    kinds = rng.sample(KINDS, 2)
    for pid in [rng.choice(scene.pids(kind)) for kind in kinds]:
        scene.signal(pid, signal.SIGKILL)
    return f"SIGKILL {' and '.join(kinds)}"


def machine_lost(scene: Scene, rng: random.Random) -> str:
    for service in scene.services():
        service.signal(signal.SIGKILL)
    for service in scene.services():
        service.process.wait(10)
    return "SIGKILL everything"


def journal_lost(scene: Scene, rng: random.Random) -> str:
    """The disk of the journal with everything else; the cuts are on another one. Needs a cut."""
    wait_for("a cut", lambda: any((scene.run.run_dir / "checkpoints").glob("step-*/cut.json")), limit_s=scene.patience_s, guard=scene.run.learner_must_live)
    done = machine_lost(scene, rng)
    if scene.redis is not None:
        scene.redis.kill()
        shutil.rmtree(scene.redis.folder)
        scene.redis.folder.mkdir()
        scene.redis.start()
    else:
        shutil.rmtree(scene.run.run_dir / "journal")
    return f"{done}, and the journal gone"


def redis_restarted(scene: Scene, rng: random.Random) -> str:
    """Killed, away for a while, and back with its files. Without Redis it is the gateway that is restarted."""
    if scene.redis is None:
        return killed_at_random(scene, rng, ("gateway",))
    seconds = rng.uniform(0.5, 8)
    scene.redis.kill()
    time.sleep(seconds)
    scene.redis.start()
    return f"Redis killed, away for {seconds:.1f} s"


def learner_told_to_stop(scene: Scene, rng: random.Random) -> str:
    """A cut, and leave; then the same command again. The signal comes to the supervisor alone, or to all of its processes at once."""
    learner, whole = scene.run.services["learner"], rng.random() < 0.5
    if whole:
        learner.signal(signal.SIGTERM)
    else:
        os.kill(learner.process.pid, signal.SIGTERM)
    learner.process.wait(LEAVE_S + scene.patience_s)
    assert learner.process.returncode == 0, learner.tail()
    return f"SIGTERM learner{', all of its processes' if whole else ''}"


def stopped(scene: Scene, rng: random.Random, seconds: float = 20.0) -> str:
    kind = rng.choice(KINDS)
    pid = rng.choice(scene.pids(kind))
    scene.signal(pid, signal.SIGSTOP)
    time.sleep(seconds)
    scene.signal(pid, signal.SIGCONT)
    return f"SIGSTOP {kind} for {seconds} s"


def briefly_stopped(scene: Scene, rng: random.Random) -> str:
    return stopped(scene, rng, seconds=4.0)


def network_down(scene: Scene, rng: random.Random) -> str:
    mode, seconds = rng.choice(["cut", "stall"]), rng.uniform(1, 8)
    names = rng.choice([REPLICAS, REPLICAS[:1], REPLICAS[1:]])
    for name in names:
        scene.proxies[name].set(mode)
    time.sleep(seconds)
    for name in names:
        scene.proxies[name].set("pass")
    return f"network {mode} between {', '.join(names)} and the gateway for {seconds:.1f} s"


def disk_full(scene: Scene, rng: random.Random) -> str:
    ballast, seconds = scene.run.run_dir / "ballast", rng.uniform(1, 6)
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    time.sleep(seconds)
    ballast.unlink()
    return f"disk full for {seconds:.1f} s"


def clock_stepped(scene: Scene, rng: random.Random) -> str:
    """The wall clock jumps, and sometimes a process is started under the new time."""
    before = float(scene.clock_file.read_text()) if scene.clock_file.exists() else 0.0
    change = rng.choice([-3600.0, -45.0, 45.0, 3600.0])
    part = scene.clock_file.with_suffix(".part")
    part.write_text(str(before + change))
    part.replace(scene.clock_file)
    if rng.random() < 0.3:
        return f"clock {change:+.0f} s"
    return f"clock {change:+.0f} s, then {killed_at_random(scene, rng)}"


Fault = Callable[[Scene, random.Random], str]
ALL: tuple[Fault, ...] = (killed_at_a_point, killed_at_a_point, killed_at_a_point, disk_error_at_a_point, killed_at_random, killed_at_random, two_killed_at_once, machine_lost, journal_lost, redis_restarted, learner_told_to_stop, stopped, network_down, disk_full, clock_stepped)  # fmt: skip
QUICK: tuple[Fault, ...] = (killed_at_a_point, killed_at_random, network_down, disk_full, clock_stepped, briefly_stopped)
