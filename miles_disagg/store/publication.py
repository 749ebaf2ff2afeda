"""From the receipts of the source ranks to one index: every check that stands between uploaded files and a version.

Who uploads is `publish.disk`; the commit itself (index, then pointer) is `versions`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from miles_disagg.domain.errors import CheckpointError, ChecksumMismatch, PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.base import ObjectNotFound, ObjectStore
from miles_disagg.store.claims import json_field, load_json_object
from miles_disagg.weights.checkpoint import INDEX_FILE
from miles_disagg.weights.delta import DeltaIndex
from miles_disagg.weights.digest import DEFAULT_CHECKSUM, new_hasher

_BLOCK = 16 << 20


@dataclass(frozen=True)
class Receipt:
    """What one source rank uploaded for one version.

    file, nbytes, digest: its shard (None: it had nothing to write), the shard's size, the xxh3-128 of the whole file.
    checksums: tensors in it (delta: the changed ones) -> checksum of the complete target state.
    total_bytes: raw bytes of the tensors in it. density: share of this source's elements that changed.
    metrics: seconds and bytes by their names in PROTOCOL section 4.
    """

    file: str | None
    nbytes: int = 0
    digest: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict, repr=False)
    total_bytes: int = 0
    changed_elements: int = 0
    total_elements: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """How a version is written. encoding None: a full version. base_version: what a delta applies on."""

    encoding: str | None = None
    base_version: int | None = None
    checksum_format: str = DEFAULT_CHECKSUM

    def metadata(self, ref: VersionRef, receipts: Sequence[Receipt]) -> dict[str, Any]:
        """The index's metadata object (PROTOCOL.md section 1)."""
        if self.encoding is None:
            return {
                "total_size": sum(r.total_bytes for r in receipts),
                "version": f"{ref.version:06d}",
                "checksum_format": self.checksum_format,
            }
        if self.base_version is None:
            raise PublicationFailed(f"{ref}: a delta version must say what it applies on")
        return DeltaIndex(ref.version, self.base_version, self.encoding, self.checksum_format, {}).metadata()


def merge_receipts(ref: VersionRef, description: Description, receipts: Sequence[Receipt]) -> bytes:
    """The index of `ref`; PublicationFailed unless the shards are numbered without gaps and no tensor is twice."""
    written = [r for r in receipts if r.file is not None]
    names = sorted(str(r.file) for r in written)
    wanted = [f"model-{i:05d}-of-{len(written):05d}.safetensors" for i in range(len(written))]
    if names != wanted:
        raise PublicationFailed(f"{ref}: source ranks gave the files {names}, expected {wanted}")
    weight_map: dict[str, str] = {}
    for receipt in written:
        for name in receipt.checksums:
            if name in weight_map:
                raise PublicationFailed(
                    f"{ref}: tensor {name!r} is in {weight_map[name]} and {receipt.file}: it would be applied twice"
                )
            weight_map[name] = str(receipt.file)
    if description.encoding is None and not weight_map:
        raise PublicationFailed(f"{ref}: a full version without a tensor")
    metadata = description.metadata(ref, receipts)
    files = {str(r.file): {"bytes": r.nbytes, DEFAULT_CHECKSUM: r.digest} for r in written}
    body = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items())), "files": dict(sorted(files.items()))}
    return json.dumps(body, indent=1).encode()


@dataclass(frozen=True)
class FileProof:
    """What the index says of a payload file: its size in bytes and the xxh3-128 of all of it."""

    nbytes: int
    digest: str


def file_proofs(raw: bytes) -> dict[str, FileProof]:
    """Proofs by file name from an index; empty for one that miles or slime wrote, which has none."""
    proofs = {}
    for name, entry in load_json_object(raw, INDEX_FILE).get("files", {}).items():
        where = f"{INDEX_FILE}: files: {name[:200]}"
        if not isinstance(entry, dict):
            raise CheckpointError("must be an object", file=where)
        size, digest = json_field(entry, "bytes", int, where), json_field(entry, DEFAULT_CHECKSUM, str, where)
        proofs[name] = FileProof(size, digest)
    return proofs


@contextmanager
def told_when_full(ref: VersionRef, where: str) -> Iterator[None]:
    """PublicationFailed that names `ref` and `where` instead of a bare OSError when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise PublicationFailed(
            f"no space left in {where} for {ref}: it is not published, the version before it stays. Make room there "
            "(miles-disagg store gc removes versions that nobody needs)"
        ) from error


def verify_files(objects: ObjectStore, prefix: str, receipts: Sequence[Receipt], *, read_back: bool) -> None:
    """Raise PublicationFailed or ChecksumMismatch unless every shard is in the store as its receipt says.

    read_back: also read every byte and compare digests (costs one read of the version).
    """
    for receipt in receipts:
        if receipt.file is None:
            continue
        key = f"{prefix}/{receipt.file}"
        try:
            size = objects.size(key)
        except ObjectNotFound as error:
            raise PublicationFailed(f"{key} was reported as uploaded but is not in {objects.url}") from error
        if size != receipt.nbytes:
            raise PublicationFailed(f"{key} has {size} bytes in {objects.url}, its source rank wrote {receipt.nbytes}")
        if read_back:
            found = object_digest(objects, key, size)
            if found != receipt.digest:
                raise ChecksumMismatch(receipt.digest, found, file=key)


def object_digest(objects: ObjectStore, key: str, size: int) -> str:
    """xxh3-128 of an object, read in blocks."""
    hasher = new_hasher(DEFAULT_CHECKSUM)
    for begin in range(0, size, _BLOCK):
        hasher.update(objects.get_range(key, begin, min(size, begin + _BLOCK)))
    return hasher.hexdigest()
