from google.protobuf import struct_pb2 as _struct_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("id", "scorer", "prompt", "completion", "fields")
    ID_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    scorer: str
    prompt: str
    completion: str
    fields: _struct_pb2.Struct
    def __init__(self, id: _Optional[str] = ..., scorer: _Optional[str] = ..., prompt: _Optional[str] = ..., completion: _Optional[str] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

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

class ListScorersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListScorersResponse(_message.Message):
    __slots__ = ("scorers", "default_scorer")
    class Scorer(_message.Message):
        __slots__ = ("name", "description", "limit_s", "num_answered", "num_unscored")
        NAME_FIELD_NUMBER: _ClassVar[int]
        DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
        LIMIT_S_FIELD_NUMBER: _ClassVar[int]
        NUM_ANSWERED_FIELD_NUMBER: _ClassVar[int]
        NUM_UNSCORED_FIELD_NUMBER: _ClassVar[int]
        name: str
        description: str
        limit_s: float
        num_answered: int
        num_unscored: int
        def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., limit_s: _Optional[float] = ..., num_answered: _Optional[int] = ..., num_unscored: _Optional[int] = ...) -> None: ...
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SCORER_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[ListScorersResponse.Scorer]
    default_scorer: str
    def __init__(self, scorers: _Optional[_Iterable[_Union[ListScorersResponse.Scorer, _Mapping]]] = ..., default_scorer: _Optional[str] = ...) -> None: ...
