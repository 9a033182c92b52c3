"""Token arrays on the wire: raw little-endian bytes with a declared element type.

`pack_*` makes a message of one array. A whole trajectory is made by `encoded`: protobuf for Python would copy each array four times.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos.fields import key
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb

# Numbers of fields; protobuf looks them up anew each time that they are asked for.
_PROMPT_IDS, _COMPLETION_IDS = pb.Trajectory.PROMPT_IDS_FIELD_NUMBER, pb.Trajectory.COMPLETION_IDS_FIELD_NUMBER
_LOGPROBS, _TEXT = pb.Trajectory.LOGPROBS_FIELD_NUMBER, pb.Trajectory.TEXT_FIELD_NUMBER
_DTYPE_TAG, _DATA = pb.PackedArray.DTYPE_FIELD_NUMBER << 3, pb.PackedArray.DATA_FIELD_NUMBER
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_DTYPES: dict[int, np.dtype[np.generic]] = {pb.PACKED_DTYPE_INT32: _INT32, pb.PACKED_DTYPE_FLOAT32: _FLOAT32, pb.PACKED_DTYPE_UINT8: np.dtype("u1")}


def encoded(rest: pb.Trajectory, *, prompt_ids: npt.ArrayLike, completion_ids: npt.ArrayLike, logprobs: npt.ArrayLike, text: str = "") -> bytes:
    """A whole Trajectory in protobuf's encoding: `rest`, which has neither of them, and what is large, copied once.

    prompt_ids, completion_ids: [n] ids below 2**31; logprobs: [n]. Fields of a message may come in any order.
    Raises ValueError for an id that int32 cannot hold.
    """
    words = text.encode()
    return b"".join(
        (
            rest.SerializeToString(),
            *_field(_PROMPT_IDS, pb.PACKED_DTYPE_INT32, _ids(prompt_ids)),
            *_field(_COMPLETION_IDS, pb.PACKED_DTYPE_INT32, _ids(completion_ids)),
            *_field(_LOGPROBS, pb.PACKED_DTYPE_FLOAT32, _floats(logprobs)),
            key(_TEXT, len(words)),
            words,
        )
    )


def _field(number: int, dtype: int, values: npt.NDArray[np.generic]) -> tuple[bytes, memoryview]:
    """A PackedArray as a field: what goes before its bytes, and they."""
    num_bytes = values.nbytes
    inner = bytes((_DTYPE_TAG, dtype)) + key(_DATA, num_bytes)
    return key(number, len(inner) + num_bytes) + inner, values.data


def _ids(ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """[n] checked and contiguous."""
    values = ids if isinstance(ids, np.ndarray) and ids.dtype == _INT32 else _narrowed(ids)
    if values.size and values.item(values.argmin()) < 0:  # a quarter of the time of min()
        raise ValueError(f"token ids must lie in [0, 2**31), got {values.min()} to {values.max()}")
    return np.ascontiguousarray(values)


def _floats(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=_FLOAT32)


def pack_ids(ids: npt.ArrayLike) -> pb.PackedArray:
    """int32 ids, any length. Raises ValueError for an id that int32 cannot hold."""
    return pb.PackedArray(dtype=pb.PACKED_DTYPE_INT32, data=_ids(ids).tobytes())


def pack_floats(values: npt.ArrayLike) -> pb.PackedArray:
    """float32 values, any length."""
    return pb.PackedArray(dtype=pb.PACKED_DTYPE_FLOAT32, data=_floats(values).tobytes())


def pack_mask(values: npt.ArrayLike) -> pb.PackedArray:
    """Zeros and ones, any length."""
    return pb.PackedArray(dtype=pb.PACKED_DTYPE_UINT8, data=np.asarray(values, dtype=np.uint8).tobytes())


def _narrowed(ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    wide = np.asarray(ids, dtype=np.int64)
    if wide.size and (wide.min() < 0 or wide.max() > np.iinfo(np.int32).max):
        raise ValueError(f"token ids must lie in [0, 2**31), got {wide.min()} to {wide.max()}")
    return wide.astype(_INT32)


def unpack(array: pb.PackedArray) -> npt.NDArray[np.generic]:
    """The array as a read-only view of its bytes, [n].

    Raises ValueError when the dtype is not declared or the bytes are not whole elements.
    """
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"packed array declares no known dtype: {array.dtype}")
    data = array.data
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        raise ValueError(f"packed array of {dtype} has {len(data)} bytes, not a multiple of {dtype.itemsize}") from None
