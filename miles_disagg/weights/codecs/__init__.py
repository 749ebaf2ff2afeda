"""Delta encodings by name."""

from __future__ import annotations

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs.base import BLOCK_BYTES, Codec, Decoder, EncodeStats, apply_frame, encode_frame

DELTA_ENCODINGS = ("xor", "overwrite", "sparse", "sparse-max")

__all__ = [
    "BLOCK_BYTES",
    "DELTA_ENCODINGS",
    "Codec",
    "Decoder",
    "EncodeStats",
    "apply_frame",
    "encode_frame",
    "get_codec",
]


def get_codec(encoding: str) -> Codec:
    """The codec of a `delta_encoding`; CheckpointError for an unknown one."""
    if encoding == "xor":
        from miles_disagg.weights.codecs.xor import XorCodec

        return XorCodec()
    if encoding == "overwrite":
        from miles_disagg.weights.codecs.overwrite import OverwriteCodec

        return OverwriteCodec()
    if encoding in ("sparse", "sparse-max"):
        from miles_disagg.weights.codecs.sparse import SparseCodec

        return SparseCodec(encoding)
    raise CheckpointError(f"unknown delta_encoding {encoding!r}; known: {', '.join(DELTA_ENCODINGS)}")
