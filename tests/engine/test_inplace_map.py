"""A patch that is mapped and scattered is the model loaded anew: tensors cut, turned and stacked in every way."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from miles_disagg.engine.inplace.miles_inplace import patch as patch_module
from miles_disagg.engine.inplace.miles_inplace.patch import POSITIONS, VALUES
from miles_disagg.engine.inplace.miles_inplace.weights import LiveWeights

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Cut:
    """How a checkpoint tensor of `shape` is loaded: a block of it, perhaps turned, into a place of its own."""

    shape: tuple[int, int]
    begin: tuple[int, int]
    end: tuple[int, int]
    turned: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        block = tensor[self.begin[0] : self.end[0], self.begin[1] : self.end[1]]
        return block.t() if self.turned else block


class Model(torch.nn.Module):
    """Every cut has its place in one padded, stacked parameter; one vector is loaded whole."""

    def __init__(self, cuts: list[Cut], dtype: torch.dtype):
        super().__init__()
        self.cuts = cuts
        self.stacked = torch.nn.Parameter(torch.zeros(len(cuts), 9, 9, dtype=dtype), requires_grad=False)
        self.vector = torch.nn.Parameter(torch.zeros(7, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "vector":
                self.vector.data.copy_(tensor)
                continue
            number = int(name)
            block = self.cuts[number].of(tensor)
            self.stacked.data[number, 1 : 1 + block.shape[0], : block.shape[1]].copy_(block)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    shape = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    begin = tuple(draw(st.integers(0, size - 1)) for size in shape)
    end = tuple(draw(st.integers(at + 1, size)) for at, size in zip(begin, shape, strict=True))
    return Cut(shape, (begin[0], begin[1]), (end[0], end[1]), draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(cuts(), min_size=1, max_size=8),
    st.sampled_from(list(DTYPES)),
    st.integers(0, 2**31),
    st.floats(0, 1),
    st.integers(1, 60),
)
def test_a_scattered_patch_is_the_model_loaded_anew(
    chosen: list[Cut], dtype: str, seed: int, density: float, window: int
) -> None:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(DTYPES[dtype])

    before = {str(n): random(*cut.shape) for n, cut in enumerate(chosen)} | {"vector": random(7)}
    after, patch = {}, {}
    for name, tensor in before.items():
        positions = (torch.rand(tensor.numel(), generator=draw) < density).nonzero().flatten()
        values = random(positions.numel())
        after[name] = tensor.clone()
        after[name].view(-1)[positions] = values
        patch |= {name + POSITIONS: positions.to(torch.int32), name + VALUES: values}
    live, anew = (Model(chosen, DTYPES[dtype]) for _ in range(2))
    live.load_weights(before.items())
    anew.load_weights(after.items())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as small:
        small.setattr(patch_module, "_WINDOW", window)
        save_file(before, Path(folder) / "model.safetensors")
        save_file(patch, Path(folder) / "patch")
        weights = LiveWeights(live, folder)
        fingerprint = weights.fingerprint()
        staged = weights.stage(str(Path(folder) / "patch"))
        weights.scatter(staged)
    assert torch.equal(live.stacked, anew.stacked)
    assert torch.equal(live.vector, anew.vector)
    assert weights.fingerprint() == (fingerprint + staged.added) % 2**64


@pytest.mark.parametrize("position", [-1, 7, 2**31 - 1])
def test_a_position_outside_its_tensor_is_refused(position: int, tmp_path: Path) -> None:
    model = Model([], torch.float32)
    save_file({"vector": torch.arange(7.0)}, tmp_path / "model.safetensors")
    patch = {"vector" + POSITIONS: torch.tensor([3, position], dtype=torch.int32), "vector" + VALUES: torch.ones(2)}
    save_file(patch, tmp_path / "patch")
    with pytest.raises(ValueError, match="positions outside of their tensors"):
        LiveWeights(model, str(tmp_path)).stage(str(tmp_path / "patch"))
