from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("tensor", "tensor_offset", "num_bytes", "owner", "bucket", "bucket_offset", "digest")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TENSOR_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    BUCKET_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    tensor_offset: int
    num_bytes: int
    owner: int
    bucket: int
    bucket_offset: int
    digest: int
    def __init__(self, tensor: _Optional[int] = ..., tensor_offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., owner: _Optional[int] = ..., bucket: _Optional[int] = ..., bucket_offset: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("owner", "num_bytes", "file_offset")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    owner: int
    num_bytes: int
    file_offset: int
    def __init__(self, owner: _Optional[int] = ..., num_bytes: _Optional[int] = ..., file_offset: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "lineage", "policy_step", "tensors", "slices", "buckets")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    version: int
    lineage: int
    policy_step: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    def __init__(self, version: _Optional[int] = ..., lineage: _Optional[int] = ..., policy_step: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ...) -> None: ...
