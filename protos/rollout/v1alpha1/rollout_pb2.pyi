from protos.manifest.v1alpha1 import manifest_pb2 as _manifest_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_WAITING: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_STALE: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_WAITING: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_STALE: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    class Message(_message.Message):
        __slots__ = ("role", "content")
        ROLE_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        role: str
        content: str
        def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatPrompt.Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatPrompt.Message, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt_ids", "text", "chat", "sampling", "detokenize", "whole")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _trajectory_pb2.PackedArray
    text: str
    chat: ChatPrompt
    sampling: _trajectory_pb2.SamplingParams
    detokenize: bool
    whole: bool
    def __init__(self, prompt_ids: _Optional[_Union[_trajectory_pb2.PackedArray, _Mapping]] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., detokenize: _Optional[bool] = ..., whole: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "logprobs", "text", "finish_reason", "spans", "effective_sampling", "prompt_ids", "unusable_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _trajectory_pb2.PackedArray
    logprobs: _trajectory_pb2.PackedArray
    text: str
    finish_reason: _trajectory_pb2.FinishReason
    spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    effective_sampling: _trajectory_pb2.SamplingParams
    prompt_ids: _trajectory_pb2.PackedArray
    unusable_reason: str
    def __init__(self, token_ids: _Optional[_Union[_trajectory_pb2.PackedArray, _Mapping]] = ..., logprobs: _Optional[_Union[_trajectory_pb2.PackedArray, _Mapping]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[_trajectory_pb2.FinishReason, str]] = ..., spans: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ..., effective_sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., prompt_ids: _Optional[_Union[_trajectory_pb2.PackedArray, _Mapping]] = ..., unusable_reason: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("replica_id", "state", "loaded_version", "num_running", "model", "num_refused", "engine", "max_model_len", "detail", "num_tokens", "learner")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOADED_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    state: ReplicaState
    loaded_version: int
    num_running: int
    model: str
    num_refused: int
    engine: str
    max_model_len: int
    detail: str
    num_tokens: int
    learner: str
    def __init__(self, replica_id: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., loaded_version: _Optional[int] = ..., num_running: _Optional[int] = ..., model: _Optional[str] = ..., num_refused: _Optional[int] = ..., engine: _Optional[str] = ..., max_model_len: _Optional[int] = ..., detail: _Optional[str] = ..., num_tokens: _Optional[int] = ..., learner: _Optional[str] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class LoadWeightsResponse(_message.Message):
    __slots__ = ("pause_s",)
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    pause_s: float
    def __init__(self, pause_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class FetchWeightsRequest(_message.Message):
    __slots__ = ("have_version", "have_layout")
    HAVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    have_version: int
    have_layout: int
    def __init__(self, have_version: _Optional[int] = ..., have_layout: _Optional[int] = ...) -> None: ...

class FetchWeightsResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "delta_plan", "delta_part")
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
    manifest: _manifest_pb2.Manifest
    chunk: FetchWeightsResponse.Chunk
    delta_plan: _manifest_pb2.DeltaPlan
    delta_part: _manifest_pb2.DeltaPart
    def __init__(self, manifest: _Optional[_Union[_manifest_pb2.Manifest, _Mapping]] = ..., chunk: _Optional[_Union[FetchWeightsResponse.Chunk, _Mapping]] = ..., delta_plan: _Optional[_Union[_manifest_pb2.DeltaPlan, _Mapping]] = ..., delta_part: _Optional[_Union[_manifest_pb2.DeltaPart, _Mapping]] = ...) -> None: ...
