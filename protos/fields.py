"""protobuf's encoding around bytes that are encoded already.

A message that is put into another one is encoded and parsed by protobuf for Python, and then encoded again with the whole. Where only
bytes are wanted in the end, the field's key goes before them and they are copied once.
"""

from __future__ import annotations


def key(number: int, num_bytes: int) -> bytes:
    """What goes before a length-delimited field (bytes, string, embedded message): tag and length as varints. number: below 16."""
    if num_bytes < 0x80:
        return bytes((number << 3 | 2, num_bytes))
    if num_bytes < 0x4000:
        return bytes((number << 3 | 2, num_bytes & 0x7F | 0x80, num_bytes >> 7))
    result = bytearray((number << 3 | 2,))
    while num_bytes > 0x7F:
        result.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    result.append(num_bytes)
    return bytes(result)
