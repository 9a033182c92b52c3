from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PackedDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PACKED_DTYPE_UNSPECIFIED: _ClassVar[PackedDtype]
    PACKED_DTYPE_INT32: _ClassVar[PackedDtype]
    PACKED_DTYPE_FLOAT32: _ClassVar[PackedDtype]
    PACKED_DTYPE_UINT8: _ClassVar[PackedDtype]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class UnscoredReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSCORED_REASON_UNSPECIFIED: _ClassVar[UnscoredReason]
    UNSCORED_REASON_TIMEOUT: _ClassVar[UnscoredReason]
    UNSCORED_REASON_ERROR: _ClassVar[UnscoredReason]
    UNSCORED_REASON_NON_FINITE: _ClassVar[UnscoredReason]
    UNSCORED_REASON_UNAVAILABLE: _ClassVar[UnscoredReason]
    UNSCORED_REASON_REFUSED: _ClassVar[UnscoredReason]
    UNSCORED_REASON_BAD_REFERENCE: _ClassVar[UnscoredReason]
    UNSCORED_REASON_OVERLOADED: _ClassVar[UnscoredReason]
    UNSCORED_REASON_BREAKER_OPEN: _ClassVar[UnscoredReason]
PACKED_DTYPE_UNSPECIFIED: PackedDtype
PACKED_DTYPE_INT32: PackedDtype
PACKED_DTYPE_FLOAT32: PackedDtype
PACKED_DTYPE_UINT8: PackedDtype
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
UNSCORED_REASON_UNSPECIFIED: UnscoredReason
UNSCORED_REASON_TIMEOUT: UnscoredReason
UNSCORED_REASON_ERROR: UnscoredReason
UNSCORED_REASON_NON_FINITE: UnscoredReason
UNSCORED_REASON_UNAVAILABLE: UnscoredReason
UNSCORED_REASON_REFUSED: UnscoredReason
UNSCORED_REASON_BAD_REFERENCE: UnscoredReason
UNSCORED_REASON_OVERLOADED: UnscoredReason
UNSCORED_REASON_BREAKER_OPEN: UnscoredReason

class PackedArray(_message.Message):
    __slots__ = ("dtype", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: PackedDtype
    data: bytes
    def __init__(self, dtype: _Optional[_Union[PackedDtype, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids", "seed", "bad_words", "regex", "json_schema")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    regex: str
    json_schema: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., regex: _Optional[str] = ..., json_schema: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("value", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    value: float
    parts: _containers.ScalarMap[str, float]
    def __init__(self, value: _Optional[float] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Unscored(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: UnscoredReason
    detail: str
    def __init__(self, reason: _Optional[_Union[UnscoredReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("score", "unscored", "scorer")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    score: Score
    unscored: Unscored
    scorer: str
    def __init__(self, score: _Optional[_Union[Score, _Mapping]] = ..., unscored: _Optional[_Union[Unscored, _Mapping]] = ..., scorer: _Optional[str] = ...) -> None: ...

class Strand(_message.Message):
    __slots__ = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "spans")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: PackedArray
    completion_ids: PackedArray
    logprobs: PackedArray
    loss_mask: PackedArray
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    def __init__(self, prompt_ids: _Optional[_Union[PackedArray, _Mapping]] = ..., completion_ids: _Optional[_Union[PackedArray, _Mapping]] = ..., logprobs: _Optional[_Union[PackedArray, _Mapping]] = ..., loss_mask: _Optional[_Union[PackedArray, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("strand", "start", "end", "reward")
    STRAND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    strand: int
    start: int
    end: int
    reward: float
    def __init__(self, strand: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("group_id", "sample_index", "prompt_ids", "completion_ids", "logprobs", "loss_mask", "spans", "finish_reason", "reward", "unusable_reason", "replica_id", "text", "generate_s", "score_s", "more_strands", "turns", "own_prompt")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_S_FIELD_NUMBER: _ClassVar[int]
    MORE_STRANDS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    OWN_PROMPT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample_index: int
    prompt_ids: PackedArray
    completion_ids: PackedArray
    logprobs: PackedArray
    loss_mask: PackedArray
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: FinishReason
    reward: Reward
    unusable_reason: str
    replica_id: str
    text: str
    generate_s: float
    score_s: float
    more_strands: _containers.RepeatedCompositeFieldContainer[Strand]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    own_prompt: bool
    def __init__(self, group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., prompt_ids: _Optional[_Union[PackedArray, _Mapping]] = ..., completion_ids: _Optional[_Union[PackedArray, _Mapping]] = ..., logprobs: _Optional[_Union[PackedArray, _Mapping]] = ..., loss_mask: _Optional[_Union[PackedArray, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., reward: _Optional[_Union[Reward, _Mapping]] = ..., unusable_reason: _Optional[str] = ..., replica_id: _Optional[str] = ..., text: _Optional[str] = ..., generate_s: _Optional[float] = ..., score_s: _Optional[float] = ..., more_strands: _Optional[_Iterable[_Union[Strand, _Mapping]]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., own_prompt: _Optional[bool] = ...) -> None: ...
