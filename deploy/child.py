"""`child.py PARENT COMMAND...`: becomes COMMAND, killed by the kernel when PARENT dies.

Run as a file with the bare interpreter: it must act before anything else is imported. The setting survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"headrace: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the line above could tell
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
