"""The learner: `python -m learner --config FILE`. Gateway and trainer ranks as children, kept running until the run is finished."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from learner.process import USER_MISTAKE, complain, log_to_stderr, read_config
from learner.supervisor import Supervisor, claimed, last_words, prepare
from learner.trackers import keeping
from protos import faultpoints, stacks
from protos.security import resolve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m learner", description="Runs one learner: its gateway and its trainer ranks.", epilog="example: python -m learner --config learner.yaml")
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file of LearnerConfig")
    parser.add_argument("--gateway-only", action="store_true", help="keep the gateway only: the ranks are started by torchrun, `torchrun ... -m learner.trainer --config FILE`")
    arguments = parser.parse_args()
    stacks.answering()
    try:
        log_to_stderr()
        faultpoints.check()
        config = read_config(arguments.config)
        resolve(config.security, address=config.address)  # its mistakes are told before anything is started
        keeping.check(config.trackers.wanted())
        with claimed(config.run_dir):
            config, resolved = prepare(config)
            code = asyncio.run(Supervisor(config, resolved, gateway_only=arguments.gateway_only).run())
            if code != USER_MISTAKE:  # then its line says what to do
                sys.stderr.write(f"{last_words(config)}\n")
            return code
    except ValueError as error:
        return complain(str(error))


if __name__ == "__main__":
    sys.exit(main())
