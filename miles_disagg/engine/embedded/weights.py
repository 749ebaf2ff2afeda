"""The weights the embedded engine serves: checked completely, then replaced; read back; digested.

An update is two steps. `check` compares names and shapes with the live model and touches nothing; `apply` copies.
So a refused update changes nothing. Where the tensors come from (disk, process group, pickle) ends in one dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_disagg.domain.errors import CheckpointError, InvalidRequest, UpdateFailed
from miles_disagg.engine import process_group
from miles_disagg.engine.tensors import (
    INDICES,
    deserialize,
    from_safetensors,
    nbytes,
    parse_dtype,
    raw_bytes,
    unflatten,
)
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.digest import digest
from miles_disagg.weights.indices import POSITIONS, VALUES

_STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


@dataclass(frozen=True)
class Changes:
    """Elements of one tensor to overwrite: positions (int64 [n]) in its flat form, values [n]."""

    positions: torch.Tensor
    values: torch.Tensor


Tensors = dict[str, torch.Tensor]
Staged = Mapping[str, "torch.Tensor | Changes"]


class ServedWeights:
    """Names of the live tensors as they stand in a Hugging Face checkpoint. Tied tensors have one name.

    Stacked experts are those of Qwen3's mixtures: gate above up, each [out, in].
    """

    def __init__(self, model: torch.nn.Module):
        self.live: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.live.update((n, b) for n, b in model.named_buffers() if n in model.state_dict())
        # names of tied copies: legal in an update, and then must carry the bytes of their twin
        self.tied = {
            name: next(twin for twin, p in self.live.items() if p is value)
            for name, value in model.state_dict(keep_vars=True).items()
            if name not in self.live
        }
        for name in [n for n in self.live if n.endswith(_STACKED) and self.live[n].dim() == 3]:
            self.live |= _unstacked(name, self.live.pop(name))

    def check(self, staged: Mapping[str, torch.Tensor], *, complete: bool) -> Tensors:
        """The tensors to copy, by live name. UpdateFailed naming the tensor unless every one fits; touches nothing.

        complete: every live tensor must be there, as in a checkpoint.
        """
        out: Tensors = {}
        for name, tensor in staged.items():
            target = self.tied.get(name, name)
            if target not in self.live:
                raise UpdateFailed(f"tensor {name!r} is not part of the served model", status=400)
            if tensor.shape != self.live[target].shape:
                want, got = tuple(self.live[target].shape), tuple(tensor.shape)
                raise UpdateFailed(f"tensor {name!r} has shape {got}, the served model's is {want}", status=400)
            if target in out and not torch.equal(out[target], tensor):
                raise UpdateFailed(f"tensor {name!r} is tied to {target!r} in this model, but differs", status=400)
            if not tensor.is_floating_point() and self.live[target].is_floating_point():
                raise UpdateFailed(f"tensor {name!r} has dtype {tensor.dtype}, wanted a float", status=400)
            out[target] = tensor
        if complete and (missing := sorted(set(self.live) - set(out))):
            raise UpdateFailed(f"{len(missing)} tensor(s) missing, first {missing[0]!r}", status=400)
        return out

    @torch.no_grad()
    def apply(self, checked: Staged) -> None:
        """Copy what `check` returned into the live tensors, converting dtype where it differs; scatter changes."""
        for name, tensor in checked.items():
            if isinstance(tensor, Changes):
                self.live[name].view(-1)[tensor.positions] = tensor.values.to(self.live[name].dtype)
            else:
                self.live[name].copy_(tensor)

    def check_changes(self, received: Mapping[str, torch.Tensor]) -> Staged:
        """As `check`, for a bucket of changed elements; UpdateFailed for positions that are not the tensor's."""
        out: dict[str, torch.Tensor | Changes] = {}
        whole = self.check({n: t for n, t in received.items() if not n.endswith((POSITIONS, VALUES))}, complete=False)
        out.update(whole)
        for name in [n.removesuffix(POSITIONS) for n in received if n.endswith(POSITIONS)]:
            positions, values = received[name + POSITIONS].long(), received.get(name + VALUES)
            live = self.get(name)
            if live is None:
                raise UpdateFailed(f"tensor {name!r} is not part of the served model", status=400)
            if (
                values is None
                or values.shape != positions.shape
                or values.is_floating_point() != live.is_floating_point()
            ):
                raise UpdateFailed(f"tensor {name!r}: its values do not fit its positions", status=400)
            if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < live.numel():
                raise UpdateFailed(f"tensor {name!r}: a position is outside its {live.numel()} elements", status=400)
            out[self.tied.get(name, name)] = Changes(positions, values)
        return out

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors by HF name, one at a time, as SGLang's models do: what `engine.inplace` watches."""
        for name, tensor in named:
            if name in self.live:
                self.live[name].data.copy_(tensor)

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The live tensors."""
        return self.live.items()

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """None: `named_parameters` has them."""
        return ()

    def get(self, name: str) -> torch.Tensor | None:
        """A live tensor by its HF name (also a tied one), or None."""
        return self.live.get(self.tied.get(name, name))

    def digests(self) -> dict[str, str]:
        """HF name -> xxh3-128 of the bytes being served."""
        return {name: digest(raw_bytes(tensor), "xxh3-128") for name, tensor in self.live.items()}


def _unstacked(name: str, stacked: torch.Tensor) -> Tensors:
    """The experts of a layer, which transformers keeps in one tensor [experts, rows, columns], as the checkpoint has
    them: views by HF name."""
    at, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return {f"{at}.{e}.down_proj.weight": expert for e, expert in enumerate(stacked.detach())}
    return {
        f"{at}.{e}.{half}_proj.weight": part
        for e, fused in enumerate(stacked.detach())
        for half, part in zip(("gate", "up"), fused.chunk(2), strict=True)
    }


# --- where staged tensors come from -----------------------------------------------------------------


def read_checkpoint(path: str | Path) -> Tensors:
    """All tensors of a checkpoint directory, memory-mapped. CheckpointError names file and tensor."""
    checkpoint = open_checkpoint(path)
    return {
        name: from_safetensors(checkpoint.bytes(name), info.dtype, info.shape)
        for name, info in checkpoint.tensors.items()
    }


def stage_from_disk(path: str, weights: ServedWeights) -> Staged:
    """Read and check a complete checkpoint; UpdateFailed says why not. Pages are read here, not under the pause."""
    try:
        checked = weights.check(read_checkpoint(path), complete=True)
    except (CheckpointError, InvalidRequest, OSError) as e:
        raise UpdateFailed(f"{path}: {e}", status=400) from None
    return {name: tensor.clone() for name, tensor in checked.items()}


def stage_from_pickle(payloads: Sequence[str], load_format: str | None, weights: ServedWeights) -> Staged:
    """Tensors of `/update_weights_from_tensor` (one payload: there is one rank)."""
    if len(payloads) != 1:
        raise UpdateFailed(f"{len(payloads)} payloads for 1 rank: send one per tensor-parallel rank", status=400)
    content = deserialize(payloads[0])
    try:
        if load_format == "flattened_bucket":
            metas = [(m.name, m.dtype, tuple(m.shape)) for m in content["metadata"]]
            named = unflatten(content["flattened_tensor"], metas)
        elif load_format in (None, "direct"):
            named = [(name, tensor) for name, tensor in content]
        else:
            raise UpdateFailed(f"load_format {load_format!r} is not known to the embedded engine", status=400)
    except (TypeError, KeyError, ValueError, AttributeError) as e:
        raise UpdateFailed(
            f"serialized_named_tensors: not {load_format or 'named tensors'}: {e!r}", status=400
        ) from None
    return weights.check(_unique(named), complete=False)


class UpdateGroups:
    """Process groups this engine receives weights through, by name."""

    def __init__(self, device: torch.device, timeout: float):
        self.device, self.timeout = device, timeout
        self._groups: dict[str, Any] = {}

    def join(self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Join (blocking, up to the timeout). A name that is in use is UpdateFailed."""
        if name in self._groups:
            raise UpdateFailed(f"group {name!r} exists already; destroy it or use a fresh name", status=400)
        self._groups[name] = process_group.join(
            master_address=address,
            master_port=port,
            rank=rank,
            world_size=world_size,
            name=name,
            backend=backend,
            timeout=self.timeout,
        )

    def leave(self, name: str) -> bool:
        """Destroy the group; False if there is none of that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            process_group.leave(group)
        return group is not None

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        name: str,
        load_format: str | None,
        weights: ServedWeights,
    ) -> Staged:
        """Receive a broadcast of rank 0 into new tensors and check them.

        What was announced is received even if it does not fit the model: the sender is in the collective already.
        """
        if name not in self._groups:
            raise UpdateFailed(
                f"group {name!r} not in {sorted(self._groups)}: call init_weights_update_group first", status=400
            )
        if not len(names) == len(dtypes) == len(shapes):
            raise UpdateFailed("names, dtypes and shapes differ in length", status=400)
        delta = (load_format or "").startswith(f"{INDICES}:")
        if load_format not in (None, "flattened_bucket") and not delta:
            raise UpdateFailed(f"load_format {load_format!r} is not known to the embedded engine", status=400)
        group = self._groups[name]
        metas = [(n, parse_dtype(d), tuple(s)) for n, d, s in zip(names, dtypes, shapes, strict=True)]
        try:
            if load_format is not None:
                flat = torch.empty(sum(nbytes(d, s) for _, d, s in metas), dtype=torch.uint8, device=self.device)
                dist.broadcast(flat, src=0, group=group)
                named = unflatten(flat, metas)
            else:
                named = [(n, torch.empty(s, dtype=d, device=self.device)) for n, d, s in metas]
                for work in [dist.broadcast(t, src=0, group=group, async_op=True) for _, t in named]:
                    if work is not None:
                        work.wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as e:
            raise UpdateFailed(f"broadcast in group {name!r} failed: {e}", status=400) from None
        return weights.check_changes(_unique(named)) if delta else weights.check(_unique(named), complete=False)


def _unique(named: Sequence[tuple[str, torch.Tensor]]) -> Tensors:
    out: Tensors = {}
    for name, tensor in named:
        if name in out:
            raise UpdateFailed(f"tensor {name!r} is in the update twice", status=400)
        out[name] = tensor
    return out
