"""Where the elements of a checkpoint lie in the live model, learnt by watching the model's own loader.

The loader is run with tensors on the `meta` device, named and shaped like the checkpoint's, under a dispatch mode that
notes every `copy_` of a view of such a probe into a view of a live parameter, and skips it. Slices, transposes and
shards come out as strides and offsets. A loader that does anything but view and copy (dequantize, concatenate, compute
something from live weights) cannot be described that way: `Unmappable` says which operation on which tensor.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CONSTANTS = ("aten::fill_", "aten::zero_")  # padding; the same at every load


class Unmappable(Exception):
    """The loader does something that a scatter cannot repeat."""


@dataclass(frozen=True)
class TensorHeader:
    """A tensor in a safetensors file: absolute byte range, shape, dtype."""

    file: str
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Slot:
    """A live storage: data pointer, size in bytes, element type, device, one parameter that lies in it."""

    pointer: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    name: str


@dataclass(frozen=True)
class Row:
    """Elements of one checkpoint tensor that go into one slot: `dims` of (size, stride there, stride here), with
    adjacent dimensions merged, largest checkpoint stride first; offsets in elements."""

    slot: int
    dims: tuple[tuple[int, int, int], ...]
    source_offset: int
    slot_offset: int

    @property
    def numel(self) -> int:
        """Elements of this row."""
        out = 1
        for size, _, _ in self.dims:
            out *= size
        return out


def read_headers(directory: str) -> dict[str, TensorHeader]:
    """All tensors of a checkpoint directory, by name."""
    out: dict[str, TensorHeader] = {}
    for file in sorted(f for f in os.listdir(directory) if f.endswith(".safetensors")):
        out.update(read_header(os.path.join(directory, file)))
    return out


def read_header(path: str) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = 8 + size
    out = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        out[name] = TensorHeader(path, data + begin, data + end, tuple(tensor["shape"]), DTYPES[tensor["dtype"]])
    return out


def record(model: Any, headers: dict[str, TensorHeader]) -> tuple[list[Slot], dict[str, list[Row]]]:
    """Run `model.load_weights` on probes; the live storages and, by checkpoint tensor, its rows. Unmappable."""
    recorder = _Recorder(model)

    def probes() -> Iterator[tuple[str, torch.Tensor]]:
        for name, header in headers.items():
            yield name, recorder.probe(name, header)

    with torch.no_grad(), recorder:
        model.load_weights(probes())
    for slot, elements in recorder.covered.items():
        have = recorder.slots[slot].nbytes // recorder.slots[slot].dtype.itemsize
        if elements > have:
            raise Unmappable(f"{recorder.slots[slot].name}: {elements} elements are loaded into {have}")
    return recorder.slots, recorder.rows


class _Recorder(TorchDispatchMode):
    def __init__(self, model: Any):
        super().__init__()
        self.slots: list[Slot] = []
        self.rows: dict[str, list[Row]] = {}
        self.covered: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._keep: list[torch.Tensor] = []
        self._live: dict[int, int] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" or not storage.nbytes() or storage.data_ptr() in self._live:
                continue
            self._live[storage.data_ptr()] = len(self.slots)
            self.slots.append(Slot(storage.data_ptr(), storage.nbytes(), tensor.dtype, tensor.device, name))

    def probe(self, name: str, header: TensorHeader) -> torch.Tensor:
        tensor = torch.empty(header.shape, dtype=header.dtype, device="meta")
        self._keep.append(tensor)
        self._names[tensor.untyped_storage()._cdata] = name
        return tensor

    def _slot_of(self, tensor: torch.Tensor) -> int | None:
        if tensor.device.type == "meta":
            return None
        return self._live.get(tensor.untyped_storage().data_ptr())

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage()._cdata) if tensor.device.type == "meta" else None

    def _known(self, tensor: torch.Tensor) -> str | None:
        slot = self._slot_of(tensor)
        return self.slots[slot].name if slot is not None else self._name_of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        known = [name for t in tensors if (name := self._known(t)) is not None]
        if not known:
            return func(*args, **kwargs)
        target = self._slot_of(args[0]) if isinstance(args[0], torch.Tensor) else None
        if func is torch.ops.aten.copy_.default and target is not None and self._name_of(args[1]) is not None:
            self._copied(target, args[0], args[1])
            return args[0]
        if func._schema.name in _CONSTANTS and target is not None and len(known) == 1:
            return args[0]
        if func._schema.is_mutable:
            raise Unmappable(f"the loader does {func} on {' and '.join(known)}")
        out = func(*args, **kwargs)
        made = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        if not made or any(self._known(t) is None for t in made):
            raise Unmappable(f"the loader does {func} on {' and '.join(known)}, which is not a view")
        return out

    def _copied(self, slot: int, to: torch.Tensor, probe: torch.Tensor) -> None:
        name = self._names[probe.untyped_storage()._cdata]
        if to.shape != probe.shape:
            raise Unmappable(f"{name}: {tuple(probe.shape)} is broadcast to {tuple(to.shape)}")
        if to.dtype != self.slots[slot].dtype:
            raise Unmappable(f"{name}: loaded as {to.dtype} into {self.slots[slot].name} of {self.slots[slot].dtype}")
        dims = _merged(list(zip(probe.shape, probe.stride(), to.stride(), strict=True)))
        reach = 0
        for size, stride, _ in reversed(dims):
            if stride <= reach:
                raise Unmappable(f"{name}: its view overlaps itself")
            reach += (size - 1) * stride
        if probe.numel():
            row = Row(slot, tuple(dims), int(probe.storage_offset()), int(to.storage_offset()))
            self.rows.setdefault(name, []).append(row)
            self.covered[slot] = self.covered.get(slot, 0) + probe.numel()


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Drop dimensions of size one, order by checkpoint stride, merge neighbours that are contiguous on both sides."""
    out: list[tuple[int, int, int]] = []
    for size, source, slot in sorted((d for d in dims if d[0] != 1), key=lambda d: -d[1]):
        if out and out[-1][1] == size * source and out[-1][2] == size * slot:
            out[-1] = (out[-1][0] * size, source, slot)
        else:
            out.append((size, source, slot))
    return out
