"""One trainer rank: `python -m learner.trainer --config RESOLVED.json --rank R --world-size N --incarnation NS --rendezvous WHERE`.

Without --rank it reads torchrun's environment. Ends with 0 when the run is finished, or it was told to stop and there is a cut of its last
step, with 1 when there is none, with 2 when starting again would not help.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from learner import shared_memory
from learner.config import LearnerConfig
from learner.process import complain, log_to_stderr, next_incarnation, read_config
from learner.trainer.checkpoint import Saver, restore, seed_all
from learner.trainer.clock import Clock
from learner.trainer.companions import followed, load_companions, load_critic
from learner.trainer.engine import engine_of
from learner.trainer.export import export
from learner.trainer.feed import Feed, Leave, Registration, RunFailed, Superseded
from learner.trainer.loop import End, Parts, run
from learner.trainer.model import Policy, load_policy
from learner.trainer.objective import objective_of_run
from learner.trainer.optimizer import Optimizer
from learner.trainer.probe import TOLERANCES, Prober
from learner.trainer.publish import Publisher
from learner.trainer.record import Recorder
from learner.trainer.shaping import shaping_of
from learner.trainer.world import Place, World, joined, resolve_device
from learner.weights.push import Pusher, store_host
from learner.weights.snapshot import SnapshotWriter
from protos import faultpoints, stacks
from protos.identity import resolve_model
from protos.lifeline import die_with_parent
from protos.security import resolve

_LOG = logging.getLogger("headrace.learner.trainer")
_LAST_PUSH_S = 60.0  # how long a finished run waits for its last version to reach the replicas


def main() -> int:
    arguments = _arguments()
    if arguments.parent or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun gives its workers sessions of their own
        die_with_parent(arguments.parent or os.getppid())
    stacks.answering()
    try:
        log_to_stderr()
        faultpoints.check()
        config = read_config(arguments.config)
        place = _place(arguments, config.run_dir)
        device = resolve_device(config.trainer.device, place.rank, place.size)
        model_dir = resolve_model(config.model)
    except ValueError as error:
        return complain(str(error))
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with joined(place, device) as world:
            return _work(config, world, model_dir, arguments.gateway, stop)
    except RunFailed as error:
        return complain(f"the run cannot go on: {error}")
    except Superseded as error:
        _LOG.error("a newer trainer is on duty: %s", error)
        return 1
    except Leave as error:
        return _uncut(str(error))


def _uncut(why: str) -> int:
    """Exit code of a rank that leaves without a cut of its last step."""
    complain(why)
    return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m learner.trainer")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--incarnation", type=int)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--gateway", default="", help="host:port of the gateway; empty: what it wrote into the run folder")
    parser.add_argument("--parent", type=int, default=0, help="process to die with")
    return parser.parse_args()


def _place(arguments: argparse.Namespace, run_dir: Path) -> Place:
    if arguments.rank is None:
        place = Place.from_environment()
        return place if place.rank else replace(place, incarnation=next_incarnation(run_dir))
    return Place(rank=arguments.rank, size=arguments.world_size or 1, rendezvous=arguments.rendezvous, incarnation=arguments.incarnation)


def gateway_address(run_dir: Path, *, limit_s: float = 120.0) -> str:
    """host:port that the gateway wrote once it was bound. Raises TimeoutError when it does not come."""
    end = time.monotonic() + limit_s
    path = run_dir / "gateway.address"
    while time.monotonic() < end:
        if path.is_file():
            return path.read_text().strip()
        time.sleep(0.1)
    raise TimeoutError(f"no gateway wrote {path} within {limit_s} s")


def _work(config: LearnerConfig, world: World, model_dir: Path, gateway: str, stop: threading.Event) -> int:
    """Sets everything up, trains, and ends in good order."""
    try:
        objective = objective_of_run(config)
        policy = load_policy(
            model_dir, mesh=world.mesh, compute_dtype=getattr(torch, config.trainer.compute_dtype), temperature=config.sampling.temperature,
            engine=engine_of(config.trainer, world.device), freeze=config.trainer.freeze, lora=config.trainer.lora, seed=config.seed,
        )  # fmt: skip
        optimizer = Optimizer(policy.causal_lm.named_parameters(), config.optimizer, total_updates=config.total_updates)
        companions = load_companions(config, policy, model_dir, world)
        critic = load_critic(config, policy, model_dir, world)
        security = resolve(config.security)
    except ValueError as error:
        return complain(str(error))
    address = gateway or gateway_address(config.run_dir)
    feed = Feed(address, incarnation=world.incarnation, rank=world.rank, security=security, leave_s=config.checkpoint.leave_s)
    registration = feed.register(world.size)
    seed_all(config.seed + world.rank)
    if registration.cut_dir:
        restored = restore(Path(registration.cut_dir), policy.causal_lm, optimizer, followed(companions, critic), objective.control.state())
        if critic is not None:
            critic.restored()
        _check_step(registration, restored)
    root = shared_memory.snapshot_root(registration.run_id)
    shared_memory.claim(root, config.run_dir, clear=False)
    writer = SnapshotWriter(
        policy.causal_lm, root=root, incarnation=world.incarnation, served_dtype=config.trainer.served_dtype, bucket_bytes=config.push.bucket_bytes,
        dtypes=config.push.dtypes, max_roots=config.push.max_roots, verify=config.push.verify,
    )  # fmt: skip
    pusher = Pusher(
        address=address, incarnation=world.incarnation, rank=world.rank, world_size=world.size, device=world.device, store_host=store_host(config.address), security=security,
        deadline_s=config.push.deadline_s, settle_s=config.push.collective_timeout_s + config.push.prepare_s,
    )  # fmt: skip
    parts = Parts(
        config=config,
        feed=feed,
        objective=objective,
        companions=companions,
        policy=policy,
        optimizer=optimizer,
        critic=critic,
        publisher=Publisher(feed=feed, writer=writer, pusher=pusher, probe=_probe(config, policy, world)),
        saver=Saver(folder=config.run_dir / "checkpoints", model=policy.causal_lm, optimizer=optimizer, feed=feed, reference=lambda: followed(companions, critic), control=objective.control.state(), limit_s=config.checkpoint.save_s),
        recorder=Recorder(config.run_dir, active=world.rank == 0, clip=config.algorithm.ratio_bounds, shaping=lambda table: shaping_of(table, objective)),
        clock=Clock(),
        stop=stop,
    )
    if critic is not None:
        critic.optimizer.before_update = parts.saver.settle
    _LOG.info("rank %d of %d on %s starts from step %d (%s)", world.rank, world.size, world.device, registration.policy_step, registration.cut_dir or model_dir)
    end = run(parts, registration.policy_step)
    parts.saver.wait()
    _finish(parts, end, model_dir)
    writer.close()
    pusher.close(timeout_s=5.0)
    feed.close()
    step, resumed = end.published.policy_step, registration.policy_step if registration.cut_dir else -1
    if not end.finished and step not in (parts.saver.report.last_step, resumed):
        return _uncut(f"told to stop, and the cut of step {step} failed; the log says why")
    return 0


def _check_step(registration: Registration, restored: int) -> None:
    """Raises RuntimeError when the cut is of another step than the gateway's account."""
    if restored != registration.policy_step:
        raise RuntimeError(f"the cut in {registration.cut_dir} is of step {restored}, the gateway says {registration.policy_step}")


def _probe(config: LearnerConfig, policy: Policy, world: World) -> Prober | None:
    """With push.verify=logprobs: what replicas are held against after each update."""
    if config.push.verify != "logprobs":
        return None
    coarser = next((dtype for dtype in ("bfloat16", "float16") if dtype in (config.trainer.served_dtype, config.trainer.compute_dtype)), "float32")
    tolerance = config.push.probe_tolerance if config.push.probe_tolerance is not None else TOLERANCES[coarser]
    vocabulary = policy.causal_lm.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return Prober(policy, vocabulary=int(vocabulary), tolerance=tolerance, device=world.device)


def _finish(parts: Parts, end: End, model_dir: Path) -> None:
    """Of a finished run: the last version reaches the replicas, rank 0 writes the model and closes the account."""
    if not end.finished:
        _LOG.info("told to stop: leaving after step %d", end.published.policy_step)
        return
    if not parts.publisher.pusher.wait_idle(_LAST_PUSH_S):
        _LOG.warning("version %d was still being pushed after %.0f s", end.published.version, _LAST_PUSH_S)
    dist.barrier()
    if dist.get_rank() == 0:
        export(snapshot_dir=end.published.snapshot.folder, model_dir=model_dir, out_dir=parts.config.run_dir / "model")
        parts.feed.finish_run()
    _LOG.info("finished after step %d", end.published.policy_step)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # threads of a push that hangs in a collective must not keep a finished rank alive
