"""Whether a replica belongs to this run: pure comparison of what both sides loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What this run is.

    Example: `Identity(run_id="r1", contract="v1alpha1", base_weights_digest="0f..", tokenizer_digest="1a..",
    template_digest="absent", served_dtype="float32", needed_tokens=384)`.
    """

    run_id: str
    contract: str
    base_weights_digest: str  # hexadecimal, protos/identity.py
    tokenizer_digest: str
    template_digest: str
    served_dtype: str  # torch name
    needed_tokens: int  # longest prompt known so far, plus max_new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a replica says it is.

    Example: `Claim(replica_id="a", incarnation=17, run_id="", contract="v1alpha1", ..., max_model_len=2048)`.
    """

    replica_id: str
    incarnation: int  # nanoseconds since the epoch at its start
    run_id: str  # empty: accepts any
    contract: str
    base_weights_digest: str
    tokenizer_digest: str
    template_digest: str
    served_dtype: str
    max_model_len: int  # tokens
    address: str = ""  # for people; may be unreachable
    transports: tuple[int, ...] = ()  # values of the Transport enum, best first
    device_uuid: str = ""  # empty on CPU
    num_workers: int = 1  # receivers that it is in a group
    worker_devices: tuple[str, ...] = ()  # UUID of each worker's device; empty: device_uuid alone
    visible_devices: tuple[str, ...] = ()  # UUIDs that its workers see
    serves_weights: bool = False  # other replicas may fetch from its address


def refusal(claim: Claim, run: Identity) -> str:
    """Why the replica is a stranger, naming both values; empty when it belongs."""
    if not claim.replica_id or not claim.incarnation:
        return f"replica_id={claim.replica_id!r}, incarnation={claim.incarnation}: both must be set to attend"
    if claim.run_id and claim.run_id != run.run_id:
        return _differs(claim, "run id", claim.run_id, run.run_id, "give the replica the address of its own run, or no run_id")
    same_files = "start the replica on the same model folder as the learner"
    pairs = (
        ("contract", claim.contract, run.contract, "install the same version of headrace on both sides"),
        ("base weights digest", claim.base_weights_digest, run.base_weights_digest, same_files),
        ("tokenizer digest", claim.tokenizer_digest, run.tokenizer_digest, same_files),
        ("template digest", claim.template_digest, run.template_digest, same_files),
        ("served dtype", claim.served_dtype, run.served_dtype, "set the replica's dtype to the learner's trainer.served_dtype"),
    )
    for what, theirs, ours, remedy in pairs:
        if theirs != ours:
            return _differs(claim, what, theirs, ours, remedy)
    return too_short(claim, run.needed_tokens)


def too_short(claim: Claim, needed_tokens: int) -> str:
    """Why the replica's context is too short for the run; empty when it fits."""
    if claim.max_model_len >= needed_tokens:
        return ""
    return (
        f"replica {claim.replica_id}: max_model_len is {claim.max_model_len}, but this run needs {needed_tokens} tokens "
        f"(longest prompt + max_new_tokens); start the replica with max_model_len={needed_tokens} or more"
    )


def _differs(claim: Claim, what: str, theirs: str, ours: str, remedy: str) -> str:
    return f"replica {claim.replica_id}: its {what} is {theirs or 'empty'}, this run's is {ours or 'empty'}; {remedy}"
