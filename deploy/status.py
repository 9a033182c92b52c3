"""The state of a running run as a few lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc

from deploy.counts import counted
from deploy.mistakes import Mistakes
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc
from protos.rollout.v1alpha1 import rollout_pb2
from protos.rpc import OPEN, Security, channel, deadline_s
from protos.security import SecurityConfig, resolve

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


def security_of(target: str, *, ca: Path | None = None, token_env: str = "", token_file: Path | None = None) -> Security:
    """What a service is called with: the options, or what the configuration in a run folder says. Raises Mistakes."""
    file = Path(target).expanduser() / "resolved" / "learner.json"
    try:
        if not (ca or token_env or token_file) and file.is_file():
            return resolve(SecurityConfig.model_validate(json.loads(file.read_text()).get("security", {})))
        return resolve(SecurityConfig(ca=ca, token_env=token_env, token_file=token_file))
    except ValueError as error:
        raise Mistakes([" ".join(str(error).split())]) from None


def at_rest(target: str) -> str:
    """What a run folder whose learner does not answer says of itself; empty for an address or a run without a step."""
    file = Path(target).expanduser() / "metrics.jsonl"
    steps = [line for line in file.read_text().splitlines() if '"step"' in line and '"version"' in line and line.endswith("}")] if file.is_file() else []
    if not steps:
        return ""
    last = json.loads(steps[-1])
    return f"no learner is running for {target}; its last step was {last['step']}, version {last['version']}. `headrace report {target}` shows it, starting it again resumes it"


async def fetch(address: str, security: Security = OPEN) -> learner_pb2.GetStatusResponse:
    """Asks a learner. Raises Mistakes when it does not answer."""
    async with channel(address, security) as open_channel:
        try:
            answer: learner_pb2.GetStatusResponse = await learner_pb2_grpc.LearnerServiceStub(open_channel).GetStatus(
                learner_pb2.GetStatusRequest(), timeout=deadline_s("GetStatus")
            )
        except grpc.aio.AioRpcError as error:
            raise Mistakes([unanswered("learner", address, error, security)]) from None
    return answer


def unanswered(service: str, address: str, error: grpc.aio.AioRpcError, security: Security) -> str:
    """One line: which service did not answer, and what to give when it is a matter of credentials."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"the {service} on {address} asks for a bearer token, and {'takes another one than was given' if security.token else 'none was given'}; give --token-file or --token-env"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"another service than a {service} answers on {address}; give the {service}'s address"
    trust = "its certificate is none that --ca vouches for, or does not hold this name" if security.ca else "it speaks TLS (give --ca)"
    return f"no {service} answers on {address} ({error.code().name}): it is over, the address is another, or {trust}"


def lines(status: learner_pb2.GetStatusResponse) -> Iterator[str]:
    """The account, the versions, the replicas."""
    dropped = counted(status.num_dropped) or "none"
    yield f"run {status.run_id}  {status.run_dir}  {'finished' if status.finished else 'running'}"
    yield f"step {status.policy_step}  version {status.newest_version}  lineage {status.lineage}"
    yield (
        f"groups: leased {status.num_leased} = trained {status.num_trained} + dropped {sum(status.num_dropped.values())} + open {status.num_open}"
        f" (at most {status.max_open} open, {status.num_waiting} complete and waiting); dropped: {dropped}"
    )
    yield f"staleness (bound {status.max_staleness}): {staleness_words(dict(status.trained_tokens_by_staleness))}"
    if status.num_stopped:
        yield f"samples not waited for since the gateway started: {counted(status.num_stopped)}"
    if status.num_continued_samples:
        yield f"samples drawn on from what another replica had drawn: {status.num_continued_samples} ({status.num_continued_tokens} tokens kept)"
    if status.num_unusable:
        yield f"unusable samples since the gateway started: {counted(status.num_unusable)}"
    for one in status.data_sets:
        yield _data_set(one)
    if status.num_kept_flat:
        yield f"groups kept without signal (filter.max_flat_a_step): {status.num_kept_flat}"
    if status.num_refused:
        yield f"refused: {status.num_refused} calls and connections without this run's token or TLS"
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


def _data_set(one: learner_pb2.GetStatusResponse.DataSet) -> str:
    classes = ", ".join(f"{name} {one.prompts_by_class[name]}" for name in ("in", "outside", "solved", "parked", "again") if name in one.prompts_by_class)
    counters = ", ".join(f"{name} {count}" for name, count in sorted(one.counters.items()) if count)
    parts = [f"{one.num_prompts} prompts", f"{one.num_given} groups given", *([classes] if classes else []), *([counters] if counters else []), *(["ended"] if one.ended else [])]
    return f"data{' ' * bool(one.name)}{one.name}: " + "; ".join(parts)


def _replica(replica: learner_pb2.GetStatusResponse.Replica) -> str:
    state = rollout_pb2.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower() if replica.attending else "gone"
    detail = f"  {replica.detail}" if replica.detail else ""
    return (
        f"{replica.replica_id}  {replica.address}  {state}  version {replica.loaded_version}  running {replica.num_running}"
        f"  leases {replica.num_leases}  tokens {replica.num_tokens}  heard {replica.silent_s:.1f} s ago{detail}"
    )
