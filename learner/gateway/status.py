"""The account, the replicas and the versions in one message, for the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from learner.config import LearnerConfig
from learner.gateway.attendance import Attendance
from learner.gateway.catalog import Catalog
from learner.gateway.evaluation_desk import EvaluationDesk
from learner.gateway.ledger import Ledger
from learner.gateway.lookout import Bulletin
from learner.gateway.replicas import Replica, holder_of
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2


def status(*, config: LearnerConfig, run_id: str, ledger: Ledger, attendance: Attendance, evaluation: EvaluationDesk | None = None, finished: bool, alarm: str, num_refused: int = 0, num_unusable: Mapping[str, int] = {}, progress: Mapping[str, int] = {}, stopped: Mapping[str, int] = {}, catalog: Catalog | None = None, bulletin: Bulletin | None = None) -> pb.GetStatusResponse:
    """What is known now; looks at everything and changes nothing."""
    counts = ledger.counts()
    return pb.GetStatusResponse(
        run_id=run_id,
        newest_version=ledger.account.versions.last_number,
        lineage=ledger.lineage,
        policy_step=ledger.step,
        replicas=[_replica(replica, _num_leases(holder_of(*replica.member), ledger, evaluation)) for _, replica in sorted(attendance.replicas.items())],
        num_leased=counts.leased,
        num_trained=counts.trained,
        num_open=counts.open,
        num_dropped=counts.dropped,
        max_open=ledger.max_open,
        max_staleness=ledger.bound,
        trained_tokens_by_staleness=ledger.trained_tokens_by_staleness(),
        num_waiting=counts.waiting,
        run_dir=str(config.run_dir),
        finished=finished,
        alarm=alarm,
        evaluation=evaluation.status() if evaluation else None,
        data_sets=_data_sets(ledger, catalog) if catalog else [],
        num_kept_flat=ledger.account.num_kept_flat,
        num_refused=num_refused,
        num_unusable=num_unusable,
        num_stopped=stopped,
        num_progress_reports=progress.get("reports", 0),
        num_continued_samples=progress.get("samples", 0),
        num_continued_tokens=progress.get("tokens", 0),
        alarms=[pb.GetStatusResponse.Alarm(name=fire.alarm.name, severity=fire.alarm.severity, words=fire.words, since_s=bulletin.now_s - fire.since_s) for fire in bulletin.firing] if bulletin else [],
        diagnosis_dir=bulletin.folder if bulletin else "",
        verdict=bulletin.verdict if bulletin else "",
    )


def _data_sets(ledger: Ledger, catalog: Catalog) -> list[pb.GetStatusResponse.DataSet]:
    history = ledger.account.history
    return [
        pb.GetStatusResponse.DataSet(
            name=name,
            num_prompts=chooser.num_prompts,
            num_given=history.look(name).given,
            ended=history.look(name).ended or chooser.next(history.look(name), ledger.step) is None,
            prompts_by_class=chooser.counts(history.look(name)),
            counters=history.look(name).counters if history.look(name).rules.tracked else {},
        )
        for name, chooser in catalog.picker.choosers.items()
    ]


def _num_leases(holder: str, ledger: Ledger, evaluation: EvaluationDesk | None) -> int:
    return ledger.num_leases(holder) + (evaluation.num_leases(holder) if evaluation else 0)


Status = Callable[[], pb.GetStatusResponse]


def _replica(replica: Replica, num_leases: int) -> pb.GetStatusResponse.Replica:
    return pb.GetStatusResponse.Replica(
        replica_id=replica.claim.replica_id,
        address=replica.claim.address,
        state=cast(rollout_pb2.ReplicaState, replica.state),
        loaded_version=replica.loaded_version,
        num_running=replica.num_running,
        num_leases=num_leases,
        silent_s=max(0.0, asyncio.get_running_loop().time() - replica.heard_s),
        attending=replica.attending,
        detail=replica.detail,
        num_tokens=replica.num_tokens,
        quarantined=replica.left_out,
        failures_in_row=replica.failures_in_row,
    )
