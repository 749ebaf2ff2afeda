"""Tensors on their way into an engine: dtype names, flattened buckets, and the pickled form.

The wire forms are SGLang's. A bucket is the tensors' bytes one after another; the pickled form is
`[(name, tensor), ...]`, read here with an unpickler that builds tensors and nothing else.
"""

from __future__ import annotations

import base64
import io
import pickle
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from miles_disagg.domain.errors import InvalidRequest

NamedTensors = list[tuple[str, torch.Tensor]]
INDICES = "indices"
"""`load_format` of ours, as `indices:<version>`: a flattened bucket of changed positions and values on that version."""

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS_DTYPES.values()}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`, the form SGLang's requests use."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`, with or without `torch.`; InvalidRequest for anything else."""
    try:
        return _NAMES[name.removeprefix("torch.")]
    except KeyError:
        raise InvalidRequest(f"dtypes: {name!r} is not one of {sorted(_NAMES)}") from None


def from_safetensors(raw: np.ndarray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over `raw` (uint8, not copied) of safetensors dtype `dtype`, e.g. `BF16`."""
    if dtype not in _SAFETENSORS_DTYPES:
        raise InvalidRequest(f"checkpoint dtype {dtype!r} cannot be loaded; known are {sorted(_SAFETENSORS_DTYPES)}")
    if not raw.size:
        return torch.empty(tuple(shape), dtype=_SAFETENSORS_DTYPES[dtype])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a read-only map; nobody writes to the tensor
        view = torch.from_numpy(raw)
    return view.view(_SAFETENSORS_DTYPES[dtype]).reshape(tuple(shape))


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of `tensor` in memory order, uint8 [nbytes], on the CPU (a view if it can be)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def flatten(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """One uint8 tensor [sum of nbytes], the payload of a `flattened_bucket` broadcast. All on one device."""
    return torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in tensors])


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor; `[]` is a scalar."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def unflatten(flat: torch.Tensor, metas: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> NamedTensors:
    """Tensors of a flattened bucket, in order. A piece that is not aligned for its dtype is copied."""
    out, at = [], 0
    for name, dtype, shape in metas:
        size = nbytes(dtype, shape)
        piece = flat[at : at + size]
        if piece.numel() != size:
            raise InvalidRequest(f"bucket ends inside tensor {name!r}")
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()
        out.append((name, piece.view(dtype).reshape(tuple(shape))))
        at += size
    if at != flat.numel():
        raise InvalidRequest(f"bucket has {flat.numel()} bytes, its tensors add up to {at}")
    return out


# --- the pickled form ---------------------------------------------------------------------------


def serialize(tensors: NamedTensors) -> str:
    """Base64 of a plain pickle of `[(name, CPU tensor), ...]`, as SGLang's `/update_weights_from_tensor` reads it.

    Works between unrelated processes and hosts, unlike shared-memory handles.
    """
    payload = [(name, t.detach().cpu().contiguous().clone()) for name, t in tensors]
    return base64.b64encode(pickle.dumps(payload, protocol=4)).decode()


def deserialize(text: str) -> Any:
    """What `serialize` wrote, or SGLang's flattened-bucket dict. Anything but plain tensors is InvalidRequest."""
    try:
        return _TensorUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except InvalidRequest:
        raise
    except Exception as e:
        raise InvalidRequest(f"serialized_named_tensors: cannot be read: {e!r}") from None


class _Meta:
    """Stands in for SGLang's FlattenedTensorMetadata: attributes only."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype


def _load_storage(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


class _TensorUnpickler(pickle.Unpickler):
    """Builds CPU tensors, shapes, dtypes and builtin containers. No other name is ever imported."""

    _SAFE_TORCH = frozenset(
        {
            ("torch._utils", "_rebuild_tensor_v2"),
            ("torch._utils", "_rebuild_parameter"),
            ("torch", "Size"),
            ("collections", "OrderedDict"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if module == "torch" and name in _NAMES:
            return _NAMES[name]
        if module == "sglang.srt.weight_sync.tensor_bucket" and name == "FlattenedTensorMetadata":
            return _Meta
        if (module, name) in self._SAFE_TORCH:
            return super().find_class(module, name)
        raise InvalidRequest(f"serialized_named_tensors: {module}.{name} may not be unpickled")
