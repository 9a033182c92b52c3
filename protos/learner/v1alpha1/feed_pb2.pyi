from protos.learner.v1alpha1 import learner_pb2 as _learner_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("incarnation", "rank", "world_size")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    rank: int
    world_size: int
    def __init__(self, incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("run_id", "cut_dir", "policy_step", "lineage")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CUT_DIR_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    cut_dir: str
    policy_step: int
    lineage: int
    def __init__(self, run_id: _Optional[str] = ..., cut_dir: _Optional[str] = ..., policy_step: _Optional[int] = ..., lineage: _Optional[int] = ...) -> None: ...

class TakeBatchRequest(_message.Message):
    __slots__ = ("incarnation", "rank", "policy_step", "leaving", "rows_bytes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ROWS_BYTES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    rank: int
    policy_step: int
    leaving: bool
    rows_bytes: int
    def __init__(self, incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., policy_step: _Optional[int] = ..., leaving: _Optional[bool] = ..., rows_bytes: _Optional[int] = ...) -> None: ...

class TableRow(_message.Message):
    __slots__ = ("group_id", "sample_index", "reward", "usable", "unusable_reason", "num_prompt_tokens", "num_completion_tokens", "num_trained_tokens", "staleness", "owner", "truncated", "num_versions", "reward_parts", "data_set", "baseline", "num_strands", "num_turns")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NUM_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    NUM_STRANDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample_index: int
    reward: float
    usable: bool
    unusable_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    num_trained_tokens: int
    staleness: int
    owner: int
    truncated: bool
    num_versions: int
    reward_parts: _containers.ScalarMap[str, float]
    data_set: str
    baseline: bool
    num_strands: int
    num_turns: int
    def __init__(self, group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., reward: _Optional[float] = ..., usable: _Optional[bool] = ..., unusable_reason: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., num_trained_tokens: _Optional[int] = ..., staleness: _Optional[int] = ..., owner: _Optional[int] = ..., truncated: _Optional[bool] = ..., num_versions: _Optional[int] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., data_set: _Optional[str] = ..., baseline: _Optional[bool] = ..., num_strands: _Optional[int] = ..., num_turns: _Optional[int] = ...) -> None: ...

class FeedStats(_message.Message):
    __slots__ = ("trainer_wait_s", "replica_idle_share", "num_open", "num_waiting", "oldest_open_s", "num_dropped", "num_leased", "num_trained", "num_generated_tokens", "num_replicas", "tokens_by_staleness", "staleness_bound")
    class NumDroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TokensByStalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TRAINER_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_OPEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BY_STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_BOUND_FIELD_NUMBER: _ClassVar[int]
    trainer_wait_s: float
    replica_idle_share: float
    num_open: int
    num_waiting: int
    oldest_open_s: float
    num_dropped: _containers.ScalarMap[str, int]
    num_leased: int
    num_trained: int
    num_generated_tokens: int
    num_replicas: int
    tokens_by_staleness: _containers.ScalarMap[int, int]
    staleness_bound: int
    def __init__(self, trainer_wait_s: _Optional[float] = ..., replica_idle_share: _Optional[float] = ..., num_open: _Optional[int] = ..., num_waiting: _Optional[int] = ..., oldest_open_s: _Optional[float] = ..., num_dropped: _Optional[_Mapping[str, int]] = ..., num_leased: _Optional[int] = ..., num_trained: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_replicas: _Optional[int] = ..., tokens_by_staleness: _Optional[_Mapping[int, int]] = ..., staleness_bound: _Optional[int] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("policy_step", "table", "end_of_run", "stats", "num_rows", "save_first", "leave")
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    END_OF_RUN_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIRST_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    policy_step: int
    table: _containers.RepeatedCompositeFieldContainer[TableRow]
    end_of_run: bool
    stats: FeedStats
    num_rows: int
    save_first: bool
    leave: bool
    def __init__(self, policy_step: _Optional[int] = ..., table: _Optional[_Iterable[_Union[TableRow, _Mapping]]] = ..., end_of_run: _Optional[bool] = ..., stats: _Optional[_Union[FeedStats, _Mapping]] = ..., num_rows: _Optional[int] = ..., save_first: _Optional[bool] = ..., leave: _Optional[bool] = ...) -> None: ...

class TakeBatchResponse(_message.Message):
    __slots__ = ("header", "row", "rows")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    header: BatchHeader
    row: _trajectory_pb2.Trajectory
    rows: Rows
    def __init__(self, header: _Optional[_Union[BatchHeader, _Mapping]] = ..., row: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ..., rows: _Optional[_Union[Rows, _Mapping]] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    def __init__(self, rows: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ...) -> None: ...

class CloseBatchRequest(_message.Message):
    __slots__ = ("incarnation", "policy_step", "snapshot_dir", "will_save", "mismatch")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DIR_FIELD_NUMBER: _ClassVar[int]
    WILL_SAVE_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    policy_step: int
    snapshot_dir: str
    will_save: bool
    mismatch: float
    def __init__(self, incarnation: _Optional[int] = ..., policy_step: _Optional[int] = ..., snapshot_dir: _Optional[str] = ..., will_save: _Optional[bool] = ..., mismatch: _Optional[float] = ...) -> None: ...

class CloseBatchResponse(_message.Message):
    __slots__ = ("version", "lineage")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    version: int
    lineage: int
    def __init__(self, version: _Optional[int] = ..., lineage: _Optional[int] = ...) -> None: ...

class BeginUpdateRequest(_message.Message):
    __slots__ = ("incarnation", "rank", "version", "attempt", "store_host", "store_port", "device_uuid")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    rank: int
    version: int
    attempt: int
    store_host: str
    store_port: int
    device_uuid: str
    def __init__(self, incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("epoch", "members", "group", "other_groups")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OTHER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedScalarFieldContainer[str]
    group: _learner_pb2.GroupSpec
    other_groups: _containers.RepeatedCompositeFieldContainer[_learner_pb2.GroupSpec]
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., group: _Optional[_Union[_learner_pb2.GroupSpec, _Mapping]] = ..., other_groups: _Optional[_Iterable[_Union[_learner_pb2.GroupSpec, _Mapping]]] = ...) -> None: ...

class EndUpdateRequest(_message.Message):
    __slots__ = ("incarnation", "rank", "epoch", "ok", "error", "bytes_rooted", "peak_bytes", "seconds")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BYTES_ROOTED_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    rank: int
    epoch: int
    ok: bool
    error: str
    bytes_rooted: int
    peak_bytes: int
    seconds: float
    def __init__(self, incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., epoch: _Optional[int] = ..., ok: _Optional[bool] = ..., error: _Optional[str] = ..., bytes_rooted: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class MemberOutcome(_message.Message):
    __slots__ = ("replica_id", "phase", "detail")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    phase: _learner_pb2.UpdatePhase
    detail: str
    def __init__(self, replica_id: _Optional[str] = ..., phase: _Optional[_Union[_learner_pb2.UpdatePhase, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class EndUpdateResponse(_message.Message):
    __slots__ = ("outcomes", "retry")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[MemberOutcome]
    retry: bool
    def __init__(self, outcomes: _Optional[_Iterable[_Union[MemberOutcome, _Mapping]]] = ..., retry: _Optional[bool] = ...) -> None: ...

class SaveCutRequest(_message.Message):
    __slots__ = ("incarnation", "policy_step", "cut_dir", "error")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    CUT_DIR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    policy_step: int
    cut_dir: str
    error: str
    def __init__(self, incarnation: _Optional[int] = ..., policy_step: _Optional[int] = ..., cut_dir: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class SaveCutResponse(_message.Message):
    __slots__ = ("cut_dir",)
    CUT_DIR_FIELD_NUMBER: _ClassVar[int]
    cut_dir: str
    def __init__(self, cut_dir: _Optional[str] = ...) -> None: ...

class FinishRunRequest(_message.Message):
    __slots__ = ("incarnation", "error")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    error: str
    def __init__(self, incarnation: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class FinishRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
