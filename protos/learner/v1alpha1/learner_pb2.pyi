from google.protobuf import struct_pb2 as _struct_pb2
from protos.manifest.v1alpha1 import manifest_pb2 as _manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2 as _rollout_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_GLOO: _ClassVar[Transport]
    TRANSPORT_NCCL: _ClassVar[Transport]
    TRANSPORT_GRPC: _ClassVar[Transport]
    TRANSPORT_IPC: _ClassVar[Transport]
    TRANSPORT_FOLDER: _ClassVar[Transport]

class UpdatePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_PHASE_UNSPECIFIED: _ClassVar[UpdatePhase]
    UPDATE_PHASE_READY: _ClassVar[UpdatePhase]
    UPDATE_PHASE_DECLINED: _ClassVar[UpdatePhase]
    UPDATE_PHASE_RECEIVED: _ClassVar[UpdatePhase]
    UPDATE_PHASE_LOADED: _ClassVar[UpdatePhase]
    UPDATE_PHASE_FAILED: _ClassVar[UpdatePhase]

class LeasePurpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_PURPOSE_UNSPECIFIED: _ClassVar[LeasePurpose]
    LEASE_PURPOSE_TRAINING: _ClassVar[LeasePurpose]
    LEASE_PURPOSE_EVALUATION: _ClassVar[LeasePurpose]

class ProgressStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROGRESS_STATUS_UNSPECIFIED: _ClassVar[ProgressStatus]
    PROGRESS_STATUS_ACCEPTED: _ClassVar[ProgressStatus]
    PROGRESS_STATUS_ELSEWHERE: _ClassVar[ProgressStatus]
    PROGRESS_STATUS_FOREIGN: _ClassVar[ProgressStatus]
    PROGRESS_STATUS_UNWANTED: _ClassVar[ProgressStatus]
    PROGRESS_STATUS_FULL: _ClassVar[ProgressStatus]

class ReceiptStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECEIPT_STATUS_UNSPECIFIED: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_ACCEPTED: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_DUPLICATE: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_UNWANTED: _ClassVar[ReceiptStatus]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_GLOO: Transport
TRANSPORT_NCCL: Transport
TRANSPORT_GRPC: Transport
TRANSPORT_IPC: Transport
TRANSPORT_FOLDER: Transport
UPDATE_PHASE_UNSPECIFIED: UpdatePhase
UPDATE_PHASE_READY: UpdatePhase
UPDATE_PHASE_DECLINED: UpdatePhase
UPDATE_PHASE_RECEIVED: UpdatePhase
UPDATE_PHASE_LOADED: UpdatePhase
UPDATE_PHASE_FAILED: UpdatePhase
LEASE_PURPOSE_UNSPECIFIED: LeasePurpose
LEASE_PURPOSE_TRAINING: LeasePurpose
LEASE_PURPOSE_EVALUATION: LeasePurpose
PROGRESS_STATUS_UNSPECIFIED: ProgressStatus
PROGRESS_STATUS_ACCEPTED: ProgressStatus
PROGRESS_STATUS_ELSEWHERE: ProgressStatus
PROGRESS_STATUS_FOREIGN: ProgressStatus
PROGRESS_STATUS_UNWANTED: ProgressStatus
PROGRESS_STATUS_FULL: ProgressStatus
RECEIPT_STATUS_UNSPECIFIED: ReceiptStatus
RECEIPT_STATUS_ACCEPTED: ReceiptStatus
RECEIPT_STATUS_DUPLICATE: ReceiptStatus
RECEIPT_STATUS_UNWANTED: ReceiptStatus

class AttendRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "update_report", "goodbye", "diagnosis")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_REPORT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    DIAGNOSIS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    update_report: UpdateReport
    goodbye: Goodbye
    diagnosis: Diagnosis
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., update_report: _Optional[_Union[UpdateReport, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., diagnosis: _Optional[_Union[Diagnosis, _Mapping]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("welcome", "published", "prepare_update", "begin_transfer", "abort_update", "drain", "run_finished", "commit_update", "diagnose")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    PREPARE_UPDATE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ABORT_UPDATE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_UPDATE_FIELD_NUMBER: _ClassVar[int]
    DIAGNOSE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    published: Published
    prepare_update: PrepareUpdate
    begin_transfer: BeginTransfer
    abort_update: AbortUpdate
    drain: DrainOrder
    run_finished: RunFinished
    commit_update: CommitUpdate
    diagnose: DiagnoseOrder
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., prepare_update: _Optional[_Union[PrepareUpdate, _Mapping]] = ..., begin_transfer: _Optional[_Union[BeginTransfer, _Mapping]] = ..., abort_update: _Optional[_Union[AbortUpdate, _Mapping]] = ..., drain: _Optional[_Union[DrainOrder, _Mapping]] = ..., run_finished: _Optional[_Union[RunFinished, _Mapping]] = ..., commit_update: _Optional[_Union[CommitUpdate, _Mapping]] = ..., diagnose: _Optional[_Union[DiagnoseOrder, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("replica_id", "incarnation", "run_id", "contract", "base_weights_digest", "tokenizer_digest", "template_digest", "address", "transports", "served_dtype", "max_model_len", "engine", "device_uuid", "num_workers", "worker_device_uuids", "visible_device_uuids", "serves_weights")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    BASE_WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SERVED_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_DEVICE_UUIDS_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_DEVICE_UUIDS_FIELD_NUMBER: _ClassVar[int]
    SERVES_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: int
    run_id: str
    contract: str
    base_weights_digest: str
    tokenizer_digest: str
    template_digest: str
    address: str
    transports: _containers.RepeatedScalarFieldContainer[Transport]
    served_dtype: str
    max_model_len: int
    engine: str
    device_uuid: str
    num_workers: int
    worker_device_uuids: _containers.RepeatedScalarFieldContainer[str]
    visible_device_uuids: _containers.RepeatedScalarFieldContainer[str]
    serves_weights: bool
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., run_id: _Optional[str] = ..., contract: _Optional[str] = ..., base_weights_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., address: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, str]]] = ..., served_dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., engine: _Optional[str] = ..., device_uuid: _Optional[str] = ..., num_workers: _Optional[int] = ..., worker_device_uuids: _Optional[_Iterable[str]] = ..., visible_device_uuids: _Optional[_Iterable[str]] = ..., serves_weights: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("state", "loaded_version", "num_running", "num_free", "num_tokens", "idle_s", "num_scoring", "drawing_s", "scoring_s", "num_scored", "num_unscored", "num_drawn", "gpus")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOADED_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORING_FIELD_NUMBER: _ClassVar[int]
    DRAWING_S_FIELD_NUMBER: _ClassVar[int]
    SCORING_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAWN_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    state: _rollout_pb2.ReplicaState
    loaded_version: int
    num_running: int
    num_free: int
    num_tokens: int
    idle_s: float
    num_scoring: int
    drawing_s: float
    scoring_s: float
    num_scored: int
    num_unscored: int
    num_drawn: int
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    def __init__(self, state: _Optional[_Union[_rollout_pb2.ReplicaState, str]] = ..., loaded_version: _Optional[int] = ..., num_running: _Optional[int] = ..., num_free: _Optional[int] = ..., num_tokens: _Optional[int] = ..., idle_s: _Optional[float] = ..., num_scoring: _Optional[int] = ..., drawing_s: _Optional[float] = ..., scoring_s: _Optional[float] = ..., num_scored: _Optional[int] = ..., num_unscored: _Optional[int] = ..., num_drawn: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("index", "uuid", "use", "used_bytes", "size_bytes", "power_w")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    index: str
    uuid: str
    use: float
    used_bytes: int
    size_bytes: int
    power_w: float
    def __init__(self, index: _Optional[str] = ..., uuid: _Optional[str] = ..., use: _Optional[float] = ..., used_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., power_w: _Optional[float] = ...) -> None: ...

class Diagnosis(_message.Message):
    __slots__ = ("number", "processes", "machine")
    class Process(_message.Message):
        __slots__ = ("name", "pid", "text")
        NAME_FIELD_NUMBER: _ClassVar[int]
        PID_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        name: str
        pid: int
        text: str
        def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    number: int
    processes: _containers.RepeatedCompositeFieldContainer[Diagnosis.Process]
    machine: str
    def __init__(self, number: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[Diagnosis.Process, _Mapping]]] = ..., machine: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "newest_version", "heartbeat_s", "silence_s", "scorer", "push_deadline_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    PUSH_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    newest_version: int
    heartbeat_s: float
    silence_s: float
    scorer: str
    push_deadline_s: float
    def __init__(self, run_id: _Optional[str] = ..., newest_version: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., silence_s: _Optional[float] = ..., scorer: _Optional[str] = ..., push_deadline_s: _Optional[float] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class PrepareUpdate(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("transport", "store_host", "store_port", "group_key", "num_owners", "num_receivers", "receiver_rank", "collective_timeout_s", "receivers")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    GROUP_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_OWNERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_RANK_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    transport: Transport
    store_host: str
    store_port: int
    group_key: str
    num_owners: int
    num_receivers: int
    receiver_rank: int
    collective_timeout_s: float
    receivers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transport: _Optional[_Union[Transport, str]] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., group_key: _Optional[str] = ..., num_owners: _Optional[int] = ..., num_receivers: _Optional[int] = ..., receiver_rank: _Optional[int] = ..., collective_timeout_s: _Optional[float] = ..., receivers: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginTransfer(_message.Message):
    __slots__ = ("epoch", "group", "manifest", "hold")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    group: GroupSpec
    manifest: _manifest_pb2.Manifest
    hold: bool
    def __init__(self, epoch: _Optional[int] = ..., group: _Optional[_Union[GroupSpec, _Mapping]] = ..., manifest: _Optional[_Union[_manifest_pb2.Manifest, _Mapping]] = ..., hold: _Optional[bool] = ...) -> None: ...

class CommitUpdate(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class AbortUpdate(_message.Message):
    __slots__ = ("epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class RunFinished(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DiagnoseOrder(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateReport(_message.Message):
    __slots__ = ("epoch", "version", "phase", "detail", "state", "transfer_s", "pause_s", "pieces_s")
    class PiecesSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    PIECES_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    phase: UpdatePhase
    detail: str
    state: _rollout_pb2.ReplicaState
    transfer_s: float
    pause_s: float
    pieces_s: _containers.ScalarMap[str, float]
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., phase: _Optional[_Union[UpdatePhase, str]] = ..., detail: _Optional[str] = ..., state: _Optional[_Union[_rollout_pb2.ReplicaState, str]] = ..., transfer_s: _Optional[float] = ..., pause_s: _Optional[float] = ..., pieces_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LeaseGroupsRequest(_message.Message):
    __slots__ = ("replica_id", "incarnation", "max_groups", "wait_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: int
    max_groups: int
    wait_s: float
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., max_groups: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "group_id", "seq", "attempt", "prompt_id", "prompt_ids", "prompt_text", "fields", "group_size", "done", "sampling", "least_version", "lapse_s", "purpose", "greedy", "parts", "report_every_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LEAST_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAPSE_S_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_EVERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    group_id: str
    seq: int
    attempt: int
    prompt_id: str
    prompt_ids: _trajectory_pb2.PackedArray
    prompt_text: str
    fields: _struct_pb2.Struct
    group_size: int
    done: _containers.RepeatedScalarFieldContainer[int]
    sampling: _trajectory_pb2.SamplingParams
    least_version: int
    lapse_s: float
    purpose: LeasePurpose
    greedy: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[PartialSample]
    report_every_tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., group_id: _Optional[str] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_id: _Optional[str] = ..., prompt_ids: _Optional[_Union[_trajectory_pb2.PackedArray, _Mapping]] = ..., prompt_text: _Optional[str] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., group_size: _Optional[int] = ..., done: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., least_version: _Optional[int] = ..., lapse_s: _Optional[float] = ..., purpose: _Optional[_Union[LeasePurpose, str]] = ..., greedy: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[PartialSample, _Mapping]]] = ..., report_every_tokens: _Optional[int] = ...) -> None: ...

class PartialSample(_message.Message):
    __slots__ = ("sample_index", "start", "token_ids", "logprobs", "spans", "finish_reason")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    start: int
    token_ids: _trajectory_pb2.PackedArray
    logprobs: _trajectory_pb2.PackedArray
    spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    finish_reason: _trajectory_pb2.FinishReason
    def __init__(self, sample_index: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[_Union[_trajectory_pb2.PackedArray, _Mapping]] = ..., logprobs: _Optional[_Union[_trajectory_pb2.PackedArray, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[_trajectory_pb2.FinishReason, str]] = ...) -> None: ...

class ReportProgressRequest(_message.Message):
    __slots__ = ("run_id", "lease_id", "group_id", "part", "digest_before")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lease_id: str
    group_id: str
    part: PartialSample
    digest_before: int
    def __init__(self, run_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., group_id: _Optional[str] = ..., part: _Optional[_Union[PartialSample, _Mapping]] = ..., digest_before: _Optional[int] = ...) -> None: ...

class ReportProgressResponse(_message.Message):
    __slots__ = ("group_id", "sample_index", "status", "num_tokens")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample_index: int
    status: ProgressStatus
    num_tokens: int
    def __init__(self, group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., status: _Optional[_Union[ProgressStatus, str]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class LeaseGroupsResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class SubmitTrajectoriesRequest(_message.Message):
    __slots__ = ("run_id", "lease_id", "trajectory", "trajectories")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lease_id: str
    trajectory: _trajectory_pb2.Trajectory
    trajectories: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    def __init__(self, run_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ..., trajectories: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ...) -> None: ...

class SubmitTrajectoriesResponse(_message.Message):
    __slots__ = ("group_id", "sample_index", "status", "detail", "group_is_over", "receipts")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GROUP_IS_OVER_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample_index: int
    status: ReceiptStatus
    detail: str
    group_is_over: bool
    receipts: _containers.RepeatedCompositeFieldContainer[SubmitTrajectoriesResponse]
    def __init__(self, group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., status: _Optional[_Union[ReceiptStatus, str]] = ..., detail: _Optional[str] = ..., group_is_over: _Optional[bool] = ..., receipts: _Optional[_Iterable[_Union[SubmitTrajectoriesResponse, _Mapping]]] = ...) -> None: ...

class FetchWeightsRequest(_message.Message):
    __slots__ = ("have_version", "have_layout", "peers")
    HAVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    have_version: int
    have_layout: int
    peers: bool
    def __init__(self, have_version: _Optional[int] = ..., have_layout: _Optional[int] = ..., peers: _Optional[bool] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class FetchWeightsResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "delta_plan", "delta_part", "peers")
    class Chunk(_message.Message):
        __slots__ = ("bucket", "offset", "data")
        BUCKET_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        bucket: int
        offset: int
        data: bytes
        def __init__(self, bucket: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DELTA_PLAN_FIELD_NUMBER: _ClassVar[int]
    DELTA_PART_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    manifest: _manifest_pb2.Manifest
    chunk: FetchWeightsResponse.Chunk
    delta_plan: _manifest_pb2.DeltaPlan
    delta_part: _manifest_pb2.DeltaPart
    peers: Peers
    def __init__(self, manifest: _Optional[_Union[_manifest_pb2.Manifest, _Mapping]] = ..., chunk: _Optional[_Union[FetchWeightsResponse.Chunk, _Mapping]] = ..., delta_plan: _Optional[_Union[_manifest_pb2.DeltaPlan, _Mapping]] = ..., delta_part: _Optional[_Union[_manifest_pb2.DeltaPart, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("run_id", "newest_version", "lineage", "policy_step", "replicas", "num_leased", "num_trained", "num_open", "num_dropped", "max_open", "max_staleness", "trained_tokens_by_staleness", "num_waiting", "num_refused", "num_unusable", "run_dir", "finished", "alarm", "data_sets", "num_kept_flat", "alarms", "diagnosis_dir", "verdict", "evaluation", "num_progress_reports", "num_continued_samples", "num_continued_tokens", "num_stopped")
    class Replica(_message.Message):
        __slots__ = ("replica_id", "address", "state", "loaded_version", "num_running", "num_leases", "silent_s", "attending", "detail", "num_tokens", "quarantined", "failures_in_row")
        REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        LOADED_VERSION_FIELD_NUMBER: _ClassVar[int]
        NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
        NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
        SILENT_S_FIELD_NUMBER: _ClassVar[int]
        ATTENDING_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
        QUARANTINED_FIELD_NUMBER: _ClassVar[int]
        FAILURES_IN_ROW_FIELD_NUMBER: _ClassVar[int]
        replica_id: str
        address: str
        state: _rollout_pb2.ReplicaState
        loaded_version: int
        num_running: int
        num_leases: int
        silent_s: float
        attending: bool
        detail: str
        num_tokens: int
        quarantined: bool
        failures_in_row: int
        def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[_rollout_pb2.ReplicaState, str]] = ..., loaded_version: _Optional[int] = ..., num_running: _Optional[int] = ..., num_leases: _Optional[int] = ..., silent_s: _Optional[float] = ..., attending: _Optional[bool] = ..., detail: _Optional[str] = ..., num_tokens: _Optional[int] = ..., quarantined: _Optional[bool] = ..., failures_in_row: _Optional[int] = ...) -> None: ...
    class NumDroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TrainedTokensByStalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class NumUnusableEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DataSet(_message.Message):
        __slots__ = ("name", "num_prompts", "num_given", "ended", "prompts_by_class", "counters")
        class PromptsByClassEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        class CountersEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
        NUM_GIVEN_FIELD_NUMBER: _ClassVar[int]
        ENDED_FIELD_NUMBER: _ClassVar[int]
        PROMPTS_BY_CLASS_FIELD_NUMBER: _ClassVar[int]
        COUNTERS_FIELD_NUMBER: _ClassVar[int]
        name: str
        num_prompts: int
        num_given: int
        ended: bool
        prompts_by_class: _containers.ScalarMap[str, int]
        counters: _containers.ScalarMap[str, int]
        def __init__(self, name: _Optional[str] = ..., num_prompts: _Optional[int] = ..., num_given: _Optional[int] = ..., ended: _Optional[bool] = ..., prompts_by_class: _Optional[_Mapping[str, int]] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
    class Alarm(_message.Message):
        __slots__ = ("name", "severity", "words", "since_s")
        NAME_FIELD_NUMBER: _ClassVar[int]
        SEVERITY_FIELD_NUMBER: _ClassVar[int]
        WORDS_FIELD_NUMBER: _ClassVar[int]
        SINCE_S_FIELD_NUMBER: _ClassVar[int]
        name: str
        severity: str
        words: str
        since_s: float
        def __init__(self, name: _Optional[str] = ..., severity: _Optional[str] = ..., words: _Optional[str] = ..., since_s: _Optional[float] = ...) -> None: ...
    class Evaluation(_message.Message):
        __slots__ = ("running", "policy_step", "version", "num_wanted", "num_leased", "num_scored", "num_unscored", "num_lost", "num_open", "num_postponed", "last", "last_step")
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
        NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
        NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
        NUM_UNSCORED_FIELD_NUMBER: _ClassVar[int]
        NUM_LOST_FIELD_NUMBER: _ClassVar[int]
        NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
        NUM_POSTPONED_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        LAST_STEP_FIELD_NUMBER: _ClassVar[int]
        running: bool
        policy_step: int
        version: int
        num_wanted: int
        num_leased: int
        num_scored: int
        num_unscored: int
        num_lost: int
        num_open: int
        num_postponed: int
        last: str
        last_step: int
        def __init__(self, running: _Optional[bool] = ..., policy_step: _Optional[int] = ..., version: _Optional[int] = ..., num_wanted: _Optional[int] = ..., num_leased: _Optional[int] = ..., num_scored: _Optional[int] = ..., num_unscored: _Optional[int] = ..., num_lost: _Optional[int] = ..., num_open: _Optional[int] = ..., num_postponed: _Optional[int] = ..., last: _Optional[str] = ..., last_step: _Optional[int] = ...) -> None: ...
    class NumStoppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_BY_STALENESS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNUSABLE_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    DATA_SETS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FLAT_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    DIAGNOSIS_DIR_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROGRESS_REPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTINUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTINUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STOPPED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    newest_version: int
    lineage: int
    policy_step: int
    replicas: _containers.RepeatedCompositeFieldContainer[GetStatusResponse.Replica]
    num_leased: int
    num_trained: int
    num_open: int
    num_dropped: _containers.ScalarMap[str, int]
    max_open: int
    max_staleness: int
    trained_tokens_by_staleness: _containers.ScalarMap[int, int]
    num_waiting: int
    num_refused: int
    num_unusable: _containers.ScalarMap[str, int]
    run_dir: str
    finished: bool
    alarm: str
    data_sets: _containers.RepeatedCompositeFieldContainer[GetStatusResponse.DataSet]
    num_kept_flat: int
    alarms: _containers.RepeatedCompositeFieldContainer[GetStatusResponse.Alarm]
    diagnosis_dir: str
    verdict: str
    evaluation: GetStatusResponse.Evaluation
    num_progress_reports: int
    num_continued_samples: int
    num_continued_tokens: int
    num_stopped: _containers.ScalarMap[str, int]
    def __init__(self, run_id: _Optional[str] = ..., newest_version: _Optional[int] = ..., lineage: _Optional[int] = ..., policy_step: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[GetStatusResponse.Replica, _Mapping]]] = ..., num_leased: _Optional[int] = ..., num_trained: _Optional[int] = ..., num_open: _Optional[int] = ..., num_dropped: _Optional[_Mapping[str, int]] = ..., max_open: _Optional[int] = ..., max_staleness: _Optional[int] = ..., trained_tokens_by_staleness: _Optional[_Mapping[int, int]] = ..., num_waiting: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_unusable: _Optional[_Mapping[str, int]] = ..., run_dir: _Optional[str] = ..., finished: _Optional[bool] = ..., alarm: _Optional[str] = ..., data_sets: _Optional[_Iterable[_Union[GetStatusResponse.DataSet, _Mapping]]] = ..., num_kept_flat: _Optional[int] = ..., alarms: _Optional[_Iterable[_Union[GetStatusResponse.Alarm, _Mapping]]] = ..., diagnosis_dir: _Optional[str] = ..., verdict: _Optional[str] = ..., evaluation: _Optional[_Union[GetStatusResponse.Evaluation, _Mapping]] = ..., num_progress_reports: _Optional[int] = ..., num_continued_samples: _Optional[int] = ..., num_continued_tokens: _Optional[int] = ..., num_stopped: _Optional[_Mapping[str, int]] = ...) -> None: ...
