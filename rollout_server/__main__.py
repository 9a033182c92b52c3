"""`python -m rollout_server --config FILE`: reads the configuration, wires, serves.

Exit codes: 0 after an orderly stop or the end of the run, 2 for the user's mistakes (one line each, no traceback),
1 for everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from protos import config_file, faultpoints, logs, mistakes, stacks
from protos.identity import resolve_model
from rollout_server.config import RolloutConfig
from rollout_server.engine import Engine
from rollout_server.engines import Engines


def make_engine(config: RolloutConfig, folder: Path) -> Engine:
    """The engine that is configured, or several; imports no other. Raises ValueError for a folder that cannot be served."""
    if config.engines == 1:
        return make_one_engine(config, folder, 0)
    each = [make_one_engine(config, folder, number) for number in range(config.engines)]
    return Engines(each, num_seqs=config.max_num_seqs, num_workers=config.num_workers // config.engines)


def make_one_engine(config: RolloutConfig, folder: Path, number: int) -> Engine:
    """The number-th of a server's engines."""
    if config.engine == "small":
        from rollout_server.small_engine import SmallEngine

        return SmallEngine(config, folder)
    from rollout_server.vllm_engine import VllmEngine

    return VllmEngine(config, folder, number=number)


def check_addresses(config: RolloutConfig) -> None:
    """Raises ValueError for an address that nobody could answer on, which would be waited for in vain."""
    mistakes.check_address("address", config.address, may_be_free=True)
    if config.metrics_address:
        mistakes.check_address("metrics_address", config.metrics_address, may_be_free=True)
    if config.learner:
        mistakes.check_address("learner", config.learner)
    for address in config.rewards:
        mistakes.check_address("rewards", address)


async def serve(config: RolloutConfig, address_file: Path | None) -> None:
    check_addresses(config)  # before torch and vLLM are imported
    from rollout_server.service import Service

    folder = resolve_model(config.model)
    service = Service(config, folder, make_engine(config, folder), address_file=address_file)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    await service.serve()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rollout_server", description="Serves one model, alone or for a learner.")
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file of RolloutConfig")
    parser.add_argument("--address-file", type=Path, help="gets host:port once the service listens")
    arguments = parser.parse_args()
    stacks.answering()
    try:
        logging.basicConfig(stream=sys.stderr, level=logs.level(), format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        faultpoints.check()
        uvloop.run(serve(config_file.read(arguments.config, RolloutConfig), arguments.address_file))
    except ValueError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"headrace: {line}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
