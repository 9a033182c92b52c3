"""When a run's alarms fire: the one place that both the gateway and Prometheus' rules take these numbers from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from learner.section import Section

Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


class AlarmConfig(Section):
    """Alarms and the diagnosis that they begin (docs/operating.md)."""

    every_s: Positive = Field(5.0, description="the gateway looks at its own figures this often")
    patience: Positive = Field(1.0, description="factor on all times over which alarms look back or wait before they fire")
    no_step_minutes: Positive = Field(30.0, description="HeadraceNoStep: no version was published for so long")
    low_use: Share = Field(0.5, description="HeadraceLowGpuUse: a step with less mean use of the learner's GPUs counts as low")
    low_use_steps: Annotated[int, Field(ge=1)] = Field(5, description="HeadraceLowGpuUse: so many of them in a row")
    peer_share: Share = Field(0.5, description="HeadraceGpuBelowPeers: a GPU is used less than this share of the median of its kind")
    stalled_s: Positive = Field(60.0, description="HeadraceReplicaStalled: a replica with requests drew no token, or was not heard of, for so long; patience does not apply")
    unscored_share: Share = Field(0.05, description="HeadraceRewardErrors: more samples than this share got no score")
    waiting_share: Share = Field(0.5, description="HeadraceRewardSlow: the trainer waits for batches more than this share of the time; HeadraceStalenessAtBound: less")
    kl_floor: Positive = Field(0.01, description="HeadraceKlJump: below this (nats) nothing is a jump")
    kl_times: Annotated[float, Field(gt=1)] = Field(5.0, description="HeadraceKlJump: so many times the mean of the hour before")
    idle_share: Share = Field(0.2, description="HeadraceStalenessAtBound, HeadraceRewardSlow: replicas had nothing to draw for more than this share of the time")
    sync_s: Positive = Field(0.5, description="HeadraceDiskSlow: a sync of the journal takes longer than this in the mean")
    disk_free_share: Share = Field(0.05, description="HeadraceDiskNearlyFull: less than this share of the run folder's disk is free")
    diagnose: bool = Field(True, description="an alarm begins a diagnosis: run_dir/diagnosis")
    diagnose_every_s: Positive = Field(600.0, description="at most one diagnosis of the same alarm in this time")
    diagnoses_kept: Annotated[int, Field(ge=1)] = Field(20, description="newest diagnoses that stay")
    diagnosis_bytes: Annotated[int, Field(ge=1 << 16)] = Field(32 << 20, description="bytes of all diagnoses together; older ones go first")
