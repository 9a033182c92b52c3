"""Between the gateway's own types and the messages of learner.proto and feed.proto."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from learner.config import LearnerConfig
from learner.gateway.batches import Decision
from learner.gateway.epochs import Finish, Phase
from learner.gateway.evaluation_desk import EvaluationLoan
from learner.gateway.leases import Loan
from learner.gateway.meter import Stats
from learner.gateway.parts import Part
from learner.gateway.progress import FINISHES
from learner.gateway.snapshots import Chunk
from learner.gateway.submissions import Receipt
from learner.gateway.terms import Row
from learner.gateway.updates import Settlement
from protos.fields import key as field_key
from protos.identity import group_seed
from protos.learner.v1alpha1 import feed_pb2, learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2

_ROW, _ROWS, _ROWS_ROWS = feed_pb2.TakeBatchResponse.ROW_FIELD_NUMBER, feed_pb2.TakeBatchResponse.ROWS_FIELD_NUMBER, feed_pb2.Rows.ROWS_FIELD_NUMBER
_STATUSES = {
    "accepted": learner_pb2.RECEIPT_STATUS_ACCEPTED,
    "duplicate": learner_pb2.RECEIPT_STATUS_DUPLICATE,
    "unwanted": learner_pb2.RECEIPT_STATUS_UNWANTED,
}
_PHASES = {
    Phase.RECEIVED: learner_pb2.UPDATE_PHASE_RECEIVED,
    Phase.LOADED: learner_pb2.UPDATE_PHASE_LOADED,
    Phase.FAILED: learner_pb2.UPDATE_PHASE_FAILED,
}


def lease_encoder(config: LearnerConfig) -> Callable[[Loan | EvaluationLoan], learner_pb2.Lease]:
    """Encodes loans of one run."""

    def encode(loan: Loan | EvaluationLoan) -> learner_pb2.Lease:
        if isinstance(loan, EvaluationLoan):
            return _evaluation_lease(loan, config)
        catalog, row, group = loan.catalog, loan.row, loan.group
        lease = learner_pb2.Lease(
            lease_id=loan.lease_id,
            group_id=group.group_id,
            seq=group.seq,
            attempt=group.attempts,
            prompt_id=group.prompt_id,
            prompt_ids=trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_INT32, data=catalog.ids[row]),
            prompt_text=catalog.prompts[row].text,
            group_size=group.num_drawn,
            done=loan.done,
            sampling=trajectory_pb2.SamplingParams(
                temperature=config.sampling.temperature,
                top_p=config.sampling.top_p,
                top_k=config.sampling.top_k,
                max_new_tokens=catalog.max_new_tokens[row],
                stop_token_ids=catalog.stop_token_ids,
                seed=group_seed(config.seed, group.group_id),
            ),
            least_version=loan.least_version,
            lapse_s=config.lease.lapse_s,
            purpose=learner_pb2.LEASE_PURPOSE_TRAINING,
            greedy=() if group.baseline_index is None else (group.baseline_index,),
            parts=[partial(index, part) for index, part in sorted(group.parts.items())],
            report_every_tokens=config.lease.report_every_tokens,
        )
        lease.fields.update(catalog.prompts[row].fields)
        if group.data_set:
            lease.fields["data_set"] = group.data_set
        return lease

    return encode


def partial(sample_index: int, part: Part) -> learner_pb2.PartialSample:
    """A sample as far as it was reported."""
    spans, reached = [], 0
    for version, count in part.spans:
        spans.append(trajectory_pb2.VersionSpan(version=version, start=reached, end=reached + count))
        reached += count
    return learner_pb2.PartialSample(
        sample_index=sample_index,
        start=part.start,
        token_ids=trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_INT32, data=part.ids),
        logprobs=trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_FLOAT32, data=part.logprobs),
        spans=spans,
        finish_reason=FINISHES[part.finish],
    )


def _evaluation_lease(loan: EvaluationLoan, config: LearnerConfig) -> learner_pb2.Lease:
    """Seeds go by prompt, the same in every evaluation: what differs between two is the policy's doing as far as it can be."""
    assert config.evaluation is not None, "an evaluation lends prompts"
    catalog, row, temperature = loan.catalog, loan.group, config.evaluation.temperature
    prompt = catalog.prompts[row]
    lease = learner_pb2.Lease(
        lease_id=loan.lease_id,
        group_id=loan.group_id,
        seq=row,
        attempt=loan.attempt,
        prompt_id=prompt.prompt_id,
        prompt_ids=trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_INT32, data=catalog.ids[row]),
        prompt_text=prompt.text,
        group_size=loan.group_size,
        done=loan.done,
        sampling=trajectory_pb2.SamplingParams(
            temperature=config.sampling.temperature if temperature is None else temperature,
            top_p=1.0,
            max_new_tokens=catalog.max_new_tokens[row],
            stop_token_ids=catalog.stop_token_ids,
            seed=group_seed(config.seed, f"evaluation:{prompt.prompt_id}"),
        ),
        least_version=loan.least_version,
        lapse_s=config.lease.lapse_s,
        purpose=learner_pb2.LEASE_PURPOSE_EVALUATION,
        greedy=loan.greedy,
    )
    lease.fields.update(prompt.fields)
    return lease


def receipts(values: Sequence[Receipt]) -> learner_pb2.SubmitTrajectoriesResponse:
    """The answer to one sample, or to several, of one message or more."""
    made = learner_pb2.SubmitTrajectoriesResponse()
    add = made.receipts.add
    for value in values if len(values) > 1 else ():
        add(group_id=value.group_id, sample_index=value.sample_index, status=_STATUSES[value.status], detail=value.detail, group_is_over=value.group_is_over)
    return made if len(values) > 1 else receipt(values[0])


def receipt(value: Receipt) -> learner_pb2.SubmitTrajectoriesResponse:
    return learner_pb2.SubmitTrajectoriesResponse(group_id=value.group_id, sample_index=value.sample_index, status=_STATUSES[value.status], detail=value.detail, group_is_over=value.group_is_over)


def weights(value: manifest_pb2.Manifest | Chunk) -> learner_pb2.FetchWeightsResponse:
    if isinstance(value, Chunk):
        return learner_pb2.FetchWeightsResponse(chunk=learner_pb2.FetchWeightsResponse.Chunk(bucket=value.bucket, offset=value.offset, data=value.data))
    return learner_pb2.FetchWeightsResponse(manifest=value)


def header(decision: Decision, num_rows: int) -> feed_pb2.TakeBatchResponse:
    table = [_table_row(row, owner) for row, owner in decision.table]
    value = feed_pb2.BatchHeader(
        policy_step=decision.policy_step, table=table, end_of_run=decision.end_of_run, stats=_stats(decision.stats), num_rows=num_rows,
        save_first=decision.save_first, leave=decision.leave,
    )  # fmt: skip
    return feed_pb2.TakeBatchResponse(header=value)


def batch_rows(payloads: Sequence[bytes | memoryview], *, together: bool) -> list[bytes]:
    """Encoded TakeBatchResponses that bring serialized trajectories, all in one (`rows`) or one each (`row`).

    A payload is copied as it is, once: parsing and encoding it again would cost more than sending it.
    """
    if not together:
        return [b"".join((field_key(_ROW, len(payload)), payload)) for payload in payloads]
    parts: list[bytes | memoryview] = [b""]
    num_bytes = 0
    for payload in payloads:
        key = field_key(_ROWS_ROWS, len(payload))
        num_bytes += len(key) + len(payload)
        parts += (key, payload)
    parts[0] = field_key(_ROWS, num_bytes)
    return [b"".join(parts)]


def encoded(message: feed_pb2.TakeBatchResponse | bytes) -> bytes:
    """Serializer of TakeBatch: what is encoded already passes."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def settlement(value: Settlement) -> feed_pb2.BeginUpdateResponse:
    return feed_pb2.BeginUpdateResponse(epoch=value.epoch, members=[name for name, _ in value.members], group=value.groups[0] if value.groups else None, other_groups=value.groups[1:])


def sent(request: feed_pb2.EndUpdateRequest) -> dict[str, Any]:
    """What a rank says of its sending."""
    return {"bytes_rooted": request.bytes_rooted, "peak_bytes": request.peak_bytes, "seconds": request.seconds}


def finish(value: Finish) -> feed_pb2.EndUpdateResponse:
    outcomes = [
        feed_pb2.MemberOutcome(
            replica_id=name,
            phase=_PHASES.get(phase, learner_pb2.UPDATE_PHASE_UNSPECIFIED),
            detail=detail or ("" if phase in _PHASES else phase.value),
        )
        for (name, _), phase, detail in value.outcomes
    ]
    return feed_pb2.EndUpdateResponse(outcomes=outcomes, retry=value.retry)


def _table_row(row: Row, owner: int) -> feed_pb2.TableRow:
    facts = row.facts
    return feed_pb2.TableRow(
        group_id=row.group_id,
        sample_index=row.sample_index,
        reward=math.nan if facts.reward is None else facts.reward,  # unscored is never read as 0
        usable=facts.usable,
        unusable_reason=facts.unusable_reason,
        num_prompt_tokens=facts.num_prompt_tokens,
        num_completion_tokens=facts.num_completion_tokens,
        num_trained_tokens=facts.num_trained_tokens,
        staleness=row.staleness,
        owner=owner,
        truncated=facts.truncated,
        num_versions=len({version for version, _ in facts.spans}),
        reward_parts=facts.reward_parts,
        data_set=row.data_set,
        baseline=row.baseline,
        num_strands=facts.num_strands,
        num_turns=facts.num_turns,
    )


def _stats(stats: Stats) -> feed_pb2.FeedStats:
    return feed_pb2.FeedStats(
        trainer_wait_s=stats.trainer_wait_s,
        replica_idle_share=stats.replica_idle_share,
        num_open=stats.num_open,
        num_waiting=stats.num_waiting,
        oldest_open_s=stats.oldest_open_s,
        num_dropped=stats.num_dropped,
        num_leased=stats.num_leased,
        num_trained=stats.num_trained,
        num_generated_tokens=stats.num_generated_tokens,
        num_replicas=stats.num_replicas,
        tokens_by_staleness=stats.tokens_by_staleness,
        staleness_bound=stats.staleness_bound,
    )
