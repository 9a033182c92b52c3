from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verify(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_UNSPECIFIED: _ClassVar[Verify]
    VERIFY_OFF: _ClassVar[Verify]
    VERIFY_DIGEST: _ClassVar[Verify]
    VERIFY_LOGPROBS: _ClassVar[Verify]
VERIFY_UNSPECIFIED: Verify
VERIFY_OFF: Verify
VERIFY_DIGEST: Verify
VERIFY_LOGPROBS: Verify

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("tensor", "tensor_offset", "num_bytes", "owner", "bucket", "bucket_offset", "digest", "num_runs", "stride_bytes")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TENSOR_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    BUCKET_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    tensor_offset: int
    num_bytes: int
    owner: int
    bucket: int
    bucket_offset: int
    digest: int
    num_runs: int
    stride_bytes: int
    def __init__(self, tensor: _Optional[int] = ..., tensor_offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., owner: _Optional[int] = ..., bucket: _Optional[int] = ..., bucket_offset: _Optional[int] = ..., digest: _Optional[int] = ..., num_runs: _Optional[int] = ..., stride_bytes: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("owner", "num_bytes", "file_offset", "root")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    owner: int
    num_bytes: int
    file_offset: int
    root: int
    def __init__(self, owner: _Optional[int] = ..., num_bytes: _Optional[int] = ..., file_offset: _Optional[int] = ..., root: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("token_ids", "logprobs", "tolerance")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    tolerance: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., tolerance: _Optional[float] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "lineage", "policy_step", "tensors", "slices", "buckets", "verify", "probe", "adapter")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    version: int
    lineage: int
    policy_step: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    verify: Verify
    probe: Probe
    adapter: Adapter
    def __init__(self, version: _Optional[int] = ..., lineage: _Optional[int] = ..., policy_step: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., verify: _Optional[_Union[Verify, str]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("scaling", "served_dtype")
    class ScalingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SCALING_FIELD_NUMBER: _ClassVar[int]
    SERVED_DTYPE_FIELD_NUMBER: _ClassVar[int]
    scaling: _containers.ScalarMap[str, float]
    served_dtype: str
    def __init__(self, scaling: _Optional[_Mapping[str, float]] = ..., served_dtype: _Optional[str] = ...) -> None: ...

class DeltaPlan(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[DeltaStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[DeltaStep, _Mapping]]] = ...) -> None: ...

class DeltaStep(_message.Message):
    __slots__ = ("from_version", "to_version", "num_parts")
    FROM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TO_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    from_version: int
    to_version: int
    num_parts: int
    def __init__(self, from_version: _Optional[int] = ..., to_version: _Optional[int] = ..., num_parts: _Optional[int] = ...) -> None: ...

class DeltaPart(_message.Message):
    __slots__ = ("bucket", "offset", "num_bytes", "word_bytes", "num_changed", "data", "digest")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANGED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    offset: int
    num_bytes: int
    word_bytes: int
    num_changed: int
    data: bytes
    digest: int
    def __init__(self, bucket: _Optional[int] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., word_bytes: _Optional[int] = ..., num_changed: _Optional[int] = ..., data: _Optional[bytes] = ..., digest: _Optional[int] = ...) -> None: ...
