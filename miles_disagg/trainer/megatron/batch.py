"""Turns samples into tensors: one flat column per response-token quantity, and packed micro-batches that slice them.

Which sample goes where is decided in `trainer/batching.py`; what is done with the columns is `step.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_disagg.trainer.base import TrainSample
from miles_disagg.trainer.batching import sample_weights
from miles_disagg.trainer.megatron.attention import PackedSequences, pack_lengths


@dataclass(frozen=True)
class Columns:
    """Response tokens of all samples of a batch, one after another in sample order: fp32 [n] by name, on the CPU.

    offsets: int [samples + 1], where each sample's tokens begin.
    """

    offsets: tuple[int, ...]
    values: dict[str, Tensor]

    def with_column(self, name: str, value: Tensor) -> Columns:
        """The same columns and one more."""
        return Columns(self.offsets, self.values | {name: value})

    def samples(self, begin: int, end: int) -> Columns:
        """Columns of samples [begin, end) only."""
        first, last = self.offsets[begin], self.offsets[end]
        offsets = tuple(o - first for o in self.offsets[begin : end + 1])
        return Columns(offsets, {name: value[first:last] for name, value in self.values.items()})

    def of_sample(self, index: int) -> dict[str, Tensor]:
        """One sample's part of every column."""
        return {name: value[self.offsets[index] : self.offsets[index + 1]] for name, value in self.values.items()}


def response_offsets(batch: Sequence[TrainSample]) -> tuple[int, ...]:
    """Running total of response lengths, [samples + 1]."""
    offsets = [0]
    for sample in batch:
        offsets.append(offsets[-1] + sample.response_len)
    return tuple(offsets)


def policy_columns(batch: Sequence[TrainSample], version: int | None) -> Columns:
    """Columns `mask`, `advantage`, `behaviour`, `teacher`, `reference`; `on_policy`: 1 where `version` wrote it.

    Without `behaviour`, `teacher` or `reference` if any sample lacks its logprobs: a loss that needs them says so.
    """
    mask, advantage, on_policy = [], [], []
    for sample in batch:
        n = sample.response_len
        mask.extend([1.0] * n if sample.loss_mask is None else [float(bool(m)) for m in sample.loss_mask])
        advantage.extend([sample.advantage] * n if isinstance(sample.advantage, int | float) else sample.advantage)
        versions = sample.token_versions if version is not None else None
        on_policy.extend([0.0] * n if versions is None else [float(v == version) for v in versions])
    named = {"mask": mask, "advantage": advantage, "on_policy": on_policy}
    for column in ("behaviour", "teacher", "reference"):
        logprobs = [getattr(sample, f"{column}_logprobs") for sample in batch]
        if all(values is not None for values in logprobs):
            named[column] = [value for values in logprobs for value in values]
    return Columns(response_offsets(batch), {k: torch.tensor(v, dtype=torch.float32) for k, v in named.items()})


def with_teacher_baseline(columns: Columns, coef: float) -> Columns:
    """Advantages plus coef times the batch's mean of behaviour minus teacher logprobs over the trained tokens.

    Together with `losses.distilled` the teacher's part has a mean near 0. A constant leaves the expected gradient as it
    is, but without it every sampled token would be pushed down, and the noise of that hides what is better.
    """
    values = columns.values
    mask, behaviour = values["mask"], values.get("behaviour")
    if behaviour is None or not mask.any():
        return columns
    mean = ((behaviour - values["teacher"]) * mask).sum() / mask.sum()
    return columns.with_column("advantage", values["advantage"] + coef * mean)


def with_weights(
    columns: Columns, batch: Sequence[TrainSample], aggregate: str, constant_length: int | None = None
) -> Columns:
    """Adds `weight` (the loss's, see `sample_weights`) and `share` (mask / trained tokens, for means of metrics)."""
    mask = columns.values["mask"]
    lengths = torch.tensor([s.response_len for s in batch])
    per_token = torch.tensor(sample_weights(batch, aggregate, constant_length), dtype=torch.float32)
    per_token = per_token.repeat_interleave(lengths)
    return columns.with_column("weight", mask * per_token).with_column("share", mask / mask.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples of one forward pass, on the device.

    indices: the samples, in packing order (ascending length). tokens, positions: int64 [1, t]. predictors: int64 [n],
    the packed position whose logits predict each response token. targets: int64 [n]. segments: int64 [n], the sample
    (by position in `indices`) of each response token. columns: fp32 [n] by name.
    """

    indices: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    packed: PackedSequences
    predictors: Tensor
    targets: Tensor
    segments: Tensor
    columns: dict[str, Tensor]


def pack(batch: Sequence[TrainSample], indices: Sequence[int], columns: Columns, device: torch.device) -> MicroBatch:
    """Pack `batch[i] for i in indices`. No samples: one token that predicts nothing, so that ranks stay in step."""
    order = sorted(indices, key=lambda i: (len(batch[i].tokens), i))
    ids, positions, predictors, targets, segments = [], [], [], [], []
    for place, i in enumerate(order):
        sample = batch[i]
        start = len(ids)
        ids.extend(sample.tokens)
        positions.extend(range(len(sample.tokens)))
        predictors.extend(range(start + sample.prompt_len - 1, start + len(sample.tokens) - 1))
        targets.extend(sample.tokens[sample.prompt_len :])
        segments.extend([place] * sample.response_len)
    lengths = [len(batch[i].tokens) for i in order] or [1]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    parts = [columns.of_sample(i) for i in order]
    empty = torch.zeros(0)
    return MicroBatch(
        indices=tuple(order),
        tokens=on_device(ids or [0])[None],
        positions=on_device(positions or [0])[None],
        packed=pack_lengths(lengths, device),
        predictors=on_device(predictors),
        targets=on_device(targets),
        segments=on_device(segments),
        columns={k: torch.cat([p[k] for p in parts] or [empty]).to(device) for k in columns.values},
    )
