"""NaN and Inf stop a publication by the tensor's name. Over a store, codecs count them on their way (`weights.delta`);
here is the check of what is sent over a process group or peer to peer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from miles_disagg.domain.errors import NonFiniteWeights


def refuse_non_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """NonFiniteWeights for the first of `(name, tensor)` that holds NaN or Inf. Reads each tensor once, where it is."""
    checked = [(name, tensor) for name, tensor in named if tensor.numel() and tensor.is_floating_point()]
    sound = [_extremes(tensor).isfinite().all() for _, tensor in checked]
    if not sound or bool(torch.stack([flag.to(sound[0].device) for flag in sound]).all()):
        return
    for (name, tensor), flag in zip(checked, sound, strict=True):
        if not bool(flag):
            raise NonFiniteWeights(name, int((~tensor.float().isfinite()).sum()))


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    """Least and greatest element, float [2]; NaN if there is one."""
    if tensor.itemsize == 1:
        tensor = tensor.float()  # no arithmetic on fp8
    return torch.stack(list(torch.aminmax(tensor)))
