"""Token arrays on the wire: raw little-endian bytes with a declared element type.

`put_*` fills a field of a message that is being made; `pack_*` makes a message of its own. protobuf copies a message that is given to
another one's constructor by encoding and parsing it, so what is large is put.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos.trajectory.v1alpha1 import trajectory_pb2 as pb

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_DTYPES: dict[int, np.dtype[np.generic]] = {pb.PACKED_DTYPE_INT32: _INT32, pb.PACKED_DTYPE_FLOAT32: _FLOAT32, pb.PACKED_DTYPE_UINT8: np.dtype("u1")}


def put_ids(field: pb.PackedArray, ids: npt.ArrayLike) -> None:
    """int32 ids, any length. Raises ValueError for an id that int32 cannot hold."""
    values = ids if isinstance(ids, np.ndarray) and ids.dtype == _INT32 else _narrowed(ids)
    if values.size and values.item(values.argmin()) < 0:  # a quarter of the time of min()
        raise ValueError(f"token ids must lie in [0, 2**31), got {values.min()} to {values.max()}")
    field.dtype = pb.PACKED_DTYPE_INT32
    field.data = values.tobytes()


def put_floats(field: pb.PackedArray, values: npt.ArrayLike) -> None:
    """float32 values, any length."""
    field.dtype = pb.PACKED_DTYPE_FLOAT32
    field.data = np.asarray(values, dtype=_FLOAT32).tobytes()


def pack_ids(ids: npt.ArrayLike) -> pb.PackedArray:
    """As `put_ids`."""
    made = pb.PackedArray()
    put_ids(made, ids)
    return made


def pack_floats(values: npt.ArrayLike) -> pb.PackedArray:
    """As `put_floats`."""
    made = pb.PackedArray()
    put_floats(made, values)
    return made


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
