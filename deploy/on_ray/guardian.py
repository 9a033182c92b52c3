"""`guardian.py COMMAND...`: runs COMMAND in a session of its own until standard input ends or it does, then ends all of that session.

Standard input is a pipe that the launcher holds: it ends with the launcher, however that ends. Run as a file; imports nothing of ours.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the pipe alone decides; the command gets the usual handling back
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    while command.poll() is None:
        if select.select([0], [], [], 0.5)[0] and not os.read(0, 1):
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(command.pid, signal.SIGKILL)
    return command.wait()


if __name__ == "__main__":
    sys.exit(main())
