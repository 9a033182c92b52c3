"""`python -m rollout_server.environments --config FILE [--address-file PATH]`: an environment server.

Exit codes: 0 after an orderly stop, 2 for the user's mistakes (one line each, no traceback), 1 for everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from protos import config_file, mistakes, rpc
from protos.environment.v1alpha1.environment_pb2_grpc import add_EnvironmentServiceServicer_to_server
from protos.security import resolve
from rollout_server.environments.config import EnvironmentServerConfig
from rollout_server.environments.desk import Desk
from rollout_server.environments.hosts import host_of
from rollout_server.environments.servicer import EnvironmentServicer

logger = logging.getLogger("headrace.environments")


async def serve(config: EnvironmentServerConfig, address_file: Path | None) -> None:
    """Until SIGTERM or SIGINT. Raises ValueError for a user's mistake."""
    mistakes.check_address("address", config.address, may_be_free=True)
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    desk = Desk({each.name: host_of(each, named=(config.security.token_env,)) for each in config.environments}, idle_s=config.idle_s)
    servicer = EnvironmentServicer(desk)
    server = rpc.Server(config.address, [lambda s: add_EnvironmentServiceServicer_to_server(servicer, s)], resolve(config.security, address=config.address))
    sweeping = asyncio.create_task(desk.sweep())
    try:
        await server.start()
        for host in desk.hosts.values():
            await host.check()
        await server.ready()
        address = f"{config.address.rsplit(':', 1)[0]}:{server.port}"
        if address_file is not None:
            address_file.write_text(address)
        logger.info("serving on %s: %s", address, ", ".join(each.name for each in config.environments))
        await told.wait()
    finally:
        sweeping.cancel()
        await server.stop(config.grace_s)
        await desk.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rollout_server.environments", description="Plays environments for rollout servers.")
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file of EnvironmentServerConfig")
    parser.add_argument("--address-file", type=Path, help="gets host:port once the service answers")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        asyncio.run(serve(config_file.read(arguments.config, EnvironmentServerConfig, example="docs/environments.md has one"), arguments.address_file))
    except ValueError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"headrace: {line}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
