"""Delta encodings by name."""

from __future__ import annotations

from functools import cache

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs.base import BLOCK_BYTES, Codec, Decoder, EncodeStats, apply_frame, encode_frame
from miles_disagg.weights.digest import DEFAULT_CHECKSUM, Hasher, new_hasher

DELTA_ENCODINGS = ("xor", "overwrite", "sparse", "sparse-max")

__all__ = [
    "BLOCK_BYTES",
    "DELTA_ENCODINGS",
    "Codec",
    "Decoder",
    "EncodeStats",
    "apply_frame",
    "codec_hasher",
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


@cache
def _kernel_hasher() -> type[Hasher]:
    from miles_disagg.weights.codecs.xxh3 import Xxh3

    return Xxh3


def codec_hasher(checksum_format: str = DEFAULT_CHECKSUM) -> Hasher:
    """`digest.new_hasher` for bytes that pass through a codec: if there is one, a hasher that works in its loops."""
    if checksum_format == "xxh3-128":
        return _kernel_hasher()()
    return new_hasher(checksum_format)
