from google.protobuf import struct_pb2 as _struct_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("id", "scorer", "prompt", "completion", "fields", "priority")
    ID_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    id: str
    scorer: str
    prompt: str
    completion: str
    fields: _struct_pb2.Struct
    priority: int
    def __init__(self, id: _Optional[str] = ..., scorer: _Optional[str] = ..., prompt: _Optional[str] = ..., completion: _Optional[str] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("id", "reward", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    reward: _trajectory_pb2.Reward
    seconds: float
    def __init__(self, id: _Optional[str] = ..., reward: _Optional[_Union[_trajectory_pb2.Reward, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class ScoreBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ScoreRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ScoreRequest, _Mapping]]] = ...) -> None: ...

class ScoreBatchResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[ScoreResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[ScoreResponse, _Mapping]]] = ...) -> None: ...

class ScoreGroupRequest(_message.Message):
    __slots__ = ("scorer", "prompt", "completions", "fields", "priority")
    SCORER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    scorer: str
    prompt: str
    completions: _containers.RepeatedScalarFieldContainer[str]
    fields: _struct_pb2.Struct
    priority: int
    def __init__(self, scorer: _Optional[str] = ..., prompt: _Optional[str] = ..., completions: _Optional[_Iterable[str]] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class ScoreGroupResponse(_message.Message):
    __slots__ = ("rewards", "seconds")
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rewards: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Reward]
    seconds: float
    def __init__(self, rewards: _Optional[_Iterable[_Union[_trajectory_pb2.Reward, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListScorersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListScorersResponse(_message.Message):
    __slots__ = ("scorers", "default_scorer", "num_refused")
    class Scorer(_message.Message):
        __slots__ = ("name", "description", "limit_s", "num_answered", "num_unscored", "num_unscored_by_reason", "kind", "num_cached", "endpoint", "compares")
        class NumUnscoredByReasonEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
        LIMIT_S_FIELD_NUMBER: _ClassVar[int]
        NUM_ANSWERED_FIELD_NUMBER: _ClassVar[int]
        NUM_UNSCORED_FIELD_NUMBER: _ClassVar[int]
        NUM_UNSCORED_BY_REASON_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
        ENDPOINT_FIELD_NUMBER: _ClassVar[int]
        COMPARES_FIELD_NUMBER: _ClassVar[int]
        name: str
        description: str
        limit_s: float
        num_answered: int
        num_unscored: int
        num_unscored_by_reason: _containers.ScalarMap[str, int]
        kind: str
        num_cached: int
        endpoint: ListScorersResponse.Endpoint
        compares: bool
        def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., limit_s: _Optional[float] = ..., num_answered: _Optional[int] = ..., num_unscored: _Optional[int] = ..., num_unscored_by_reason: _Optional[_Mapping[str, int]] = ..., kind: _Optional[str] = ..., num_cached: _Optional[int] = ..., endpoint: _Optional[_Union[ListScorersResponse.Endpoint, _Mapping]] = ..., compares: _Optional[bool] = ...) -> None: ...
    class Endpoint(_message.Message):
        __slots__ = ("num_attempts", "num_retries", "num_hedges", "num_hedges_won", "num_overloaded", "num_waiting", "num_running", "upstreams")
        NUM_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
        NUM_RETRIES_FIELD_NUMBER: _ClassVar[int]
        NUM_HEDGES_FIELD_NUMBER: _ClassVar[int]
        NUM_HEDGES_WON_FIELD_NUMBER: _ClassVar[int]
        NUM_OVERLOADED_FIELD_NUMBER: _ClassVar[int]
        NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
        NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
        UPSTREAMS_FIELD_NUMBER: _ClassVar[int]
        num_attempts: int
        num_retries: int
        num_hedges: int
        num_hedges_won: int
        num_overloaded: int
        num_waiting: int
        num_running: int
        upstreams: _containers.RepeatedCompositeFieldContainer[ListScorersResponse.Upstream]
        def __init__(self, num_attempts: _Optional[int] = ..., num_retries: _Optional[int] = ..., num_hedges: _Optional[int] = ..., num_hedges_won: _Optional[int] = ..., num_overloaded: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., upstreams: _Optional[_Iterable[_Union[ListScorersResponse.Upstream, _Mapping]]] = ...) -> None: ...
    class Upstream(_message.Message):
        __slots__ = ("address", "breaker", "num_opened", "health", "latency_s", "num_attempts", "num_failures")
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        BREAKER_FIELD_NUMBER: _ClassVar[int]
        NUM_OPENED_FIELD_NUMBER: _ClassVar[int]
        HEALTH_FIELD_NUMBER: _ClassVar[int]
        LATENCY_S_FIELD_NUMBER: _ClassVar[int]
        NUM_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
        NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
        address: str
        breaker: str
        num_opened: int
        health: float
        latency_s: float
        num_attempts: int
        num_failures: int
        def __init__(self, address: _Optional[str] = ..., breaker: _Optional[str] = ..., num_opened: _Optional[int] = ..., health: _Optional[float] = ..., latency_s: _Optional[float] = ..., num_attempts: _Optional[int] = ..., num_failures: _Optional[int] = ...) -> None: ...
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SCORER_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[ListScorersResponse.Scorer]
    default_scorer: str
    num_refused: int
    def __init__(self, scorers: _Optional[_Iterable[_Union[ListScorersResponse.Scorer, _Mapping]]] = ..., default_scorer: _Optional[str] = ..., num_refused: _Optional[int] = ...) -> None: ...
