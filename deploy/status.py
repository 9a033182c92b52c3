"""The state of a running run as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc

from deploy.mistakes import Mistakes
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc
from protos.rollout.v1alpha1 import rollout_pb2
from protos.rpc import channel, deadline_s

DEFAULT_ADDRESS = "127.0.0.1:7430"


def address_of(target: str) -> str:
    """host:port of a learner, from itself or from a run folder. Raises Mistakes."""
    folder = Path(target).expanduser()
    if folder.is_dir():
        file = folder / "gateway.address"
        if not file.is_file():
            raise Mistakes([f"{target}: no gateway.address in this folder: no learner has started there; give a run folder or HOST:PORT"])
        return file.read_text().strip()
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise Mistakes([f"{target}: neither a run folder nor HOST:PORT; give one of them"])
    return target


async def fetch(address: str) -> learner_pb2.GetStatusResponse:
    """Asks a learner. Raises Mistakes when it does not answer."""
    async with channel(address) as open_channel:
        try:
            answer: learner_pb2.GetStatusResponse = await learner_pb2_grpc.LearnerServiceStub(open_channel).GetStatus(
                learner_pb2.GetStatusRequest(), timeout=deadline_s("GetStatus")
            )
        except grpc.aio.AioRpcError as error:
            raise Mistakes([f"no learner answers on {address} ({error.code().name}): is the run over, or the address another?"]) from None
    return answer


def lines(status: learner_pb2.GetStatusResponse) -> Iterator[str]:
    """The account, the versions, the replicas."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(status.num_dropped.items())) or "none"
    yield f"run {status.run_id}  {status.run_dir}  {'finished' if status.finished else 'running'}"
    yield f"step {status.policy_step}  version {status.newest_version}  lineage {status.lineage}"
    yield (
        f"groups: leased {status.num_leased} = trained {status.num_trained} + dropped {sum(status.num_dropped.values())} + open {status.num_open}"
        f" (at most {status.max_open} open, {status.num_waiting} complete and waiting); dropped: {dropped}"
    )
    yield f"staleness (bound {status.max_staleness}): {staleness_words(dict(status.trained_tokens_by_staleness))}"
    if status.HasField("evaluation"):
        yield _evaluation(status.evaluation)
    if status.alarm:
        yield f"ALARM: {status.alarm}"
    yield f"replicas: {len(status.replicas)}"
    for replica in status.replicas:
        yield "  " + _replica(replica)


def staleness_words(tokens: dict[int, int]) -> str:
    """`{0: 30, 1: 10}` to "0: 75%, 1: 25% of 40 tokens"."""
    total = sum(tokens.values())
    if not total:
        return "no token trained yet"
    return ", ".join(f"{age}: {100 * count / total:.0f}%" for age, count in sorted(tokens.items())) + f" of {total} tokens"


def _evaluation(own: learner_pb2.GetStatusResponse.Evaluation) -> str:
    runs = f"step {own.policy_step}, version {own.version} or newer, runs" if own.running else "none runs"
    last = f"; last, step {own.last_step}: {own.last}" if own.last else ""
    return (
        f"evaluation: {runs}; samples: leased {own.num_leased} = scored {own.num_scored} + unscored {own.num_unscored} + lost {own.num_lost} + open {own.num_open}"
        f"{f', postponed {own.num_postponed}' if own.num_postponed else ''}{last}"
    )


def _replica(replica: learner_pb2.GetStatusResponse.Replica) -> str:
    state = rollout_pb2.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower() if replica.attending else "gone"
    detail = f"  {replica.detail}" if replica.detail else ""
    return (
        f"{replica.replica_id}  {replica.address}  {state}  version {replica.loaded_version}  running {replica.num_running}"
        f"  leases {replica.num_leases}  tokens {replica.num_tokens}  heard {replica.silent_s:.1f} s ago{detail}"
    )
