"""`python -m reward_server --config FILE [--address-file PATH]`: reads FILE (YAML or JSON of RewardConfig) and serves."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from protos import config_file, logs, rpc, stacks
from protos.exporting import Exporter
from protos.gpus import Gpus
from protos.reward.v1alpha1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from protos.security import resolve
from reward_server import memory, wiring
from reward_server.config import RewardConfig
from reward_server.metrics import FIGURES, Seen
from reward_server.plane import Plane
from reward_server.reloading import Reloading
from reward_server.servicer import RewardServicer

log = logging.getLogger("headrace.reward_server.main")

USER_MISTAKE = 2


async def serve(config: RewardConfig, address_file: Path | None, reread: Callable[[], RewardConfig]) -> None:
    """Runs until SIGTERM or SIGINT; SIGHUP takes the scorers of `reread()` instead. Raises ValueError for a user's mistake: an address in use, a scorer that cannot be loaded."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    plane = Plane(wiring.scorers(config, Path.cwd()), default=config.default or config.scorers[0].name, caches=wiring.caches(config.cache))
    servicer = RewardServicer(plane, max_pending=config.max_pending, max_pending_bytes=config.max_pending_bytes)
    security = resolve(config.security, address=config.address)
    server = rpc.Server(config.address, [lambda grpc_server: add_RewardServiceServicer_to_server(servicer, grpc_server)], security)
    servicer.refused = lambda: server.guard.num_refused
    seen = Seen(plane=plane, num_pending=lambda: servicer.num_pending, num_refused=servicer.refused, gpus=Gpus())
    exporter = Exporter(config.metrics_address, FIGURES, seen, resolve(config.security, address=config.metrics_address))
    try:
        await exporter.start()
        await server.start()
        if await _unless_told(plane.start(), told):
            await server.ready()
            _announce(config, server.port, address_file)
            reloading = Reloading(plane, config, reread, Path.cwd())
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloading.ask)
            await told.wait()
            servicer.drain()
    finally:
        await exporter.stop()
        await server.stop(config.grace_s)
        await plane.stop()


async def _unless_told(work: Coroutine[Any, Any, None], told: asyncio.Event) -> bool:
    """Whether the work was done before we were told to stop. Raises what it raises."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(told.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not working.done():
        working.cancel()
        return False
    working.result()
    return True


def _announce(config: RewardConfig, port: int, address_file: Path | None) -> None:
    address = f"{config.address.rpartition(':')[0]}:{port}"
    log.info("serving on %s: %s", address, ", ".join(each.name for each in config.scorers))
    if address_file is not None:
        part = address_file.with_name(f"{address_file.name}.{os.getpid()}")
        part.write_text(address)
        part.replace(address_file)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reward_server",
        description="Scores completions over gRPC (RewardService). Functions of yours are imported from the current folder.",
        epilog="Example: python -m reward_server --config reward.yaml --address-file reward.address",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON of RewardConfig")
    parser.add_argument("--address-file", type=Path, help="written with host:port once it serves")
    options = parser.parse_args()
    stacks.answering()
    memory.return_large_blocks()

    def reread() -> RewardConfig:
        return config_file.read(options.config, RewardConfig)

    try:
        logging.basicConfig(stream=sys.stderr, level=logs.level(), format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        uvloop.run(serve(reread(), options.address_file, reread))
    except ValueError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"headrace: {line}\n")
        return USER_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
