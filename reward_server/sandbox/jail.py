"""Isolation by plain system calls: namespaces, a small read-only root, limits, no privileges. Standard library only.

Each layer is tried by itself and reported; a machine that permits none still gets limits and the hunt for leftovers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

LAYERS = ("network", "processes", "files", "user")
_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 36, 38
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _DETACH = 442, -100, 0x8000, 2
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(platform.machine(), (-1, -1))
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_DEVICES = ("null", "zero", "random", "urandom", "full")
_INSIDE_ID = 1000


def die_with_parent() -> None:
    """The kernel kills this process when its parent's thread ends."""
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants that lose their parent become children of this process."""
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)


def hide_memory(hidden: bool) -> None:
    """Whether other processes of this user may trace this one or read its memory."""
    _libc.prctl(_SET_DUMPABLE, 0 if hidden else 1, 0, 0, 0)


def leave(wanted: frozenset[str]) -> dict[str, bool]:
    """Leaves the machine's namespaces as far as permitted: which of the layers but "user" hold. Processes: for children only."""
    spaces = {"network": _NEWNET, "processes": _NEWPID | _NEWIPC | _NEWUTS, "files": _NEWNS}
    tried = [name for name in spaces if name in wanted]
    every = 0
    for name in tried:
        every |= spaces[name]
    if every and _leave_together(every):
        return {name: name in tried for name in spaces}
    return {name: name in tried and _libc.unshare(spaces[name]) == 0 for name in spaces}


def _leave_together(flags: int) -> bool:
    if os.geteuid() == 0 and _libc.unshare(flags) == 0:
        return True
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEWUSER | flags) != 0:
        return False
    with suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_INSIDE_ID} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{_INSIDE_ID} {gid} 1")
    return True


def new_root(folder: str, writable_bytes: int, has_processes: bool) -> bool:
    """A root of its own under `folder`: system and Python read-only, /tmp writable and bounded, nothing else. Whether it holds.

    Must run in mount (and, for /proc, process) namespaces of its own. Raises OSError where a mount fails half-way.
    """
    if _PIVOT_ROOT < 0:
        return False
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    for path in _visible():
        _show(path, folder + path)
    _devices(folder + "/dev")
    os.mkdir(folder + "/proc")
    if has_processes:
        with suppress(OSError):  # a container may hide parts of /proc, and then none may be mounted
            _mount("proc", folder + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.mkdir(folder + "/tmp")
    _mount("tmpfs", folder + "/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={writable_bytes},nr_inodes=4096")
    os.mkdir(folder + "/.old")
    _checked(_libc.syscall(_PIVOT_ROOT, folder.encode(), (folder + "/.old").encode()), "pivot_root")
    os.chdir("/")
    _checked(_libc.umount2(b"/.old", _DETACH), "umount2")
    os.rmdir("/.old")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")
    return True


def _visible() -> list[str]:
    """System folders and this interpreter's own, without those inside another."""
    shown = [path for path in _SYSTEM if os.path.lexists(path)]
    own = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, sys.exec_prefix)}
    for path in sorted(own):
        if not any(path == other or path.startswith(other + "/") for other in shown):
            shown.append(path)
    return shown


def _show(source: str, target: str) -> None:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    os.makedirs(target, exist_ok=True)
    _mount(source, target, None, _BIND | _REC)
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    if _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, 32) != 0:  # before Linux 5.12
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _devices(folder: str) -> None:
    os.mkdir(folder)
    for name in _DEVICES:
        Path(folder, name).touch()
        with suppress(OSError):  # a program can do without
            _mount(f"/dev/{name}", f"{folder}/{name}", None, _BIND)
    os.symlink("/proc/self/fd", f"{folder}/fd")


def limit(*, cpu_s: float, memory_bytes: int, file_bytes: int, processes: int) -> None:
    """Limits of each process from here on; the number of processes counts this user's."""
    bounds = {
        resource.RLIMIT_CPU: int(cpu_s) + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, bound in bounds.items():
        hard = resource.getrlimit(which)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(which, (bound, bound))


def other_user(number: int) -> bool:
    """Root becomes a user that owns nothing, one for each sandbox, so that the number of processes is counted by itself. Whether it is not root any more."""
    if os.geteuid() != 0:
        return True
    for each in (2_000_000_000 + number, 60_000 + number % 5000, 65534):
        with suppress(OSError):  # fewer ids may be mapped here
            os.setgroups([])
            os.setresgid(each, each, each)
            os.setresuid(each, each, each)
            return True
    return False


def no_privileges() -> None:
    """No capabilities, now or by any program that is started."""
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _CAPSET > 0:
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        _libc.syscall(_CAPSET, header, nothing)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [each.encode() if each else None for each in (source, target, kind)]
    _checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
