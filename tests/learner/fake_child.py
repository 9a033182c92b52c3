"""A child that does what a line of its script says: `python -m tests.learner.fake_child --config RESOLVED.json ...`.

Scripts are `<run_dir>/<name>.script`, name being gateway or trainer-R; each start takes the next line, the last one again and
again. A line is a list of words: `say TEXT`, `sleep SECONDS`, `exit CODE`, `deaf` (to SIGTERM), `until-told` (ends with 0 when told to).
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from learner.process import END


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--supervised"]
    arguments = dict(zip(words[::2], words[1::2], strict=True))
    run_dir = Path(json.loads(Path(arguments["--config"]).read_text())["run_dir"])
    name = f"trainer-{arguments['--rank']}" if "--rank" in arguments else "gateway"
    started = run_dir / f"{name}.started"
    with started.open("a") as file:
        file.write(arguments.get("--incarnation", "-") + "\n")
    lines = (run_dir / f"{name}.script").read_text().splitlines()
    act(shlex.split(lines[min(len(started.read_text().splitlines()), len(lines)) - 1]), ready=run_dir / f"{name}.ready")


def act(words: list[str], ready: Path) -> None:
    """ready: made once the child will do with signals what its line says."""
    while words:
        verb = words.pop(0)
        if verb == "until-told":
            signal.signal(END if supervised() else signal.SIGTERM, leave)
            ready.touch()
            time.sleep(60)
        elif verb == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.touch()
        elif verb == "say":
            print(words.pop(0), file=sys.stderr, flush=True)
        elif verb == "sleep":
            time.sleep(float(words.pop(0)))
        elif verb == "exit":
            sys.exit(int(words.pop(0)))


def supervised() -> bool:
    return "--supervised" in sys.argv


def leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
