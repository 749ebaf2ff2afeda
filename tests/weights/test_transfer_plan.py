"""Transfer plans between random layouts: every element that an engine loads is sent once, to its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_disagg.weights.transfer.blocks import Block, RankLayout, Storage, blocks_of, cells, contiguous, split
from miles_disagg.weights.transfer.layouts import (
    EngineParallel,
    ModelSizes,
    TrainerParallel,
    embedded_layout,
    engine_layouts,
    trainer_layouts,
    weights,
)
from miles_disagg.weights.transfer.plan import PlanError, exactly_once, make_plan, runs
from miles_disagg.weights.transfer.report import Rates, expected, summary

HOLE = -1


def truth(model: ModelSizes) -> dict[str, np.ndarray]:
    """Every checkpoint tensor, each element a number of its own."""
    out, at = {}, 0
    for _, _, tensors in weights(model):
        for name, shape in tensors:
            count = int(np.prod(shape))
            out[name] = np.arange(at, at + count).reshape([s for s in shape if s != 1])
            at += count
    return out


def view(storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, [s * 8 for s in strides])


def filled(layout: RankLayout, tensors: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The rank's storages as the blocks say, holes elsewhere."""
    storages = [np.full(s.elements, HOLE) for s in layout.storages]
    for b in layout.blocks:
        box = tuple(slice(lo, hi) for lo, hi in zip(b.lo, b.hi, strict=True))
        view(storages[b.storage], b.offset, b.shape, b.strides)[...] = tensors[b.tensor][box]
    return storages


sizes = st.builds(
    lambda kv, per, head, layers, vocab, ffn, tied, bias, norm, experts: ModelSizes(
        vocab, 4 * kv, ffn * 4, layers * 2, kv * per, kv, head, tied, bias, norm, experts * 4, 4 * ffn if experts else 0
    ),
    st.sampled_from([4, 8]), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(60, 200),
    st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 1),
)  # fmt: skip
trainers = st.builds(
    lambda tp, pp, dp, ep: TrainerParallel(tp, pp, dp, min(ep, tp * dp)),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]),
)  # fmt: skip
engines = st.builds(
    lambda tp, ep: EngineParallel(tp, min(tp, ep)), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])
)


@settings(max_examples=60, deadline=None)
@given(sizes, trainers, st.lists(engines, min_size=1, max_size=2), st.integers(16, 4096))
def test_a_plan_puts_every_element_where_the_engine_loads_it_exactly_once(model, trainer, fleet, bucket):
    tensors = truth(model)
    sources = trainer_layouts(model, trainer)
    targets = [rank for i, e in enumerate(fleet) for rank in engine_layouts(model, e, name=f"engine-{i}")]
    plan = make_plan(sources, targets, bucket=bucket)
    held = [filled(layout, tensors) for layout in sources]
    got = [[np.full(s.elements, HOLE) for s in layout.storages] for layout in targets]
    written = [[np.zeros(s.elements, int) for s in layout.storages] for layout in targets]
    for p in plan.pieces:
        assert p.nbytes <= max(bucket, 2)
        piece = view(held[p.source][p.source_storage], p.source_offset, p.shape, p.source_strides)
        view(got[p.target][p.target_storage], p.target_offset, p.shape, p.target_strides)[...] = piece
        count = view(written[p.target][p.target_storage], p.target_offset, p.shape, p.target_strides)
        count += 1
    for layout, storages, counts in zip(targets, got, written, strict=True):
        for have, want, count in zip(storages, filled(layout, tensors), counts, strict=True):
            assert np.array_equal(have, want)
            assert np.array_equal(count, want != HOLE)


@settings(max_examples=30, deadline=None)
@given(sizes, trainers, engines, st.sampled_from([64, 256, 1024]))
def test_writes_and_runs_carry_the_same_bytes_as_the_pieces(model, trainer, engine, limit):
    plan = make_plan(trainer_layouts(model, trainer), engine_layouts(model, engine, name="e"), bucket=limit)
    staged = [np.zeros(n, int) for n in plan.staged_bytes]
    for w in plan.writes(limit):
        assert w.nbytes <= limit
        assert w.packed + w.nbytes <= plan.packed_bytes[w.source]
        staged[w.target][w.staged : w.staged + w.nbytes] += 1
    assert all((area == 1).all() for area in staged)
    for p in plan.pieces:
        storage = plan.targets[p.target].storages[p.target_storage]
        once = np.zeros(storage.elements, int)
        for at, there, n in runs(p):
            assert at % n == 0
            once[there : there + n] += 1
        wanted = np.zeros(storage.elements, int)
        view(wanted, p.target_offset, p.shape, p.target_strides)[...] = 1
        assert np.array_equal(once, wanted)
        assert once.sum() * storage.itemsize == p.nbytes


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.randoms())
def test_a_strided_piece_becomes_the_blocks_that_hold_its_elements(groups, inner, columns, random):
    """Rows cut into groups that lie apart, as a fused projection has them."""
    shape, step = (groups * inner, columns), inner * columns + random.randint(0, 3)
    dims = [(groups, inner * columns, step), (inner * columns, 1, 1)]
    random.shuffle(dims)
    storage = np.full(groups * step + 8, HOLE)
    for b in blocks_of("x", shape, dims, 0, 0, 5):
        box = np.arange(shape[0] * columns).reshape([s for s in shape if s != 1])
        view(storage, b.offset, b.shape, b.strides)[...] = box[tuple(map(slice, b.lo, b.hi))]
    for g in range(groups):
        part = storage[5 + g * step : 5 + g * step + inner * columns]
        assert part.tolist() == list(range(g * inner * columns, (g + 1) * inner * columns))


def layout(name: str, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> RankLayout:
    blocks = []
    for i, (lo, hi) in enumerate(boxes):
        strides = contiguous([h - a for a, h in zip(lo, hi, strict=True)])
        blocks.append(Block("w", lo, hi, i, 0, strides))
    return RankLayout(name, tuple(Storage(b.numel, 2, "bfloat16") for b in blocks), tuple(blocks))


corners = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=0, max_size=3)


@given(corners, st.lists(corners, max_size=4), st.integers(1, 30), st.randoms())
def test_a_box_is_covered_once_by_its_cells_and_by_nothing_less_or_more(sides, cuts, limit, random):
    box = tuple(lo for lo, _ in sides), tuple(lo + n for lo, n in sides)
    others = [(tuple(lo for lo, _ in cut), tuple(lo + n for lo, n in cut)) for cut in cuts if len(cut) == len(sides)]
    parts = [part for cell in cells(box, others) for part in split(cell, limit)]
    random.shuffle(parts)
    assert exactly_once(box, parts)
    at = random.randrange(len(parts))
    assert not exactly_once(box, [*parts, parts[at]])
    assert not exactly_once(box, parts[:at] + parts[at + 1 :])
    assert not exactly_once(box, [*parts[:at], box, *parts[at + 1 :]]) or parts == [box]
    for d in range(len(sides)):
        moved = tuple(tuple(c + (i == d) for i, c in enumerate(corner)) for corner in parts[at])
        assert not exactly_once(box, [*parts[:at], moved, *parts[at + 1 :]])


def test_a_hole_that_another_box_makes_up_for_in_size_is_seen():
    assert not exactly_once(((0, 0), (2, 2)), [((0, 0), (1, 2)), ((0, 1), (2, 2))])  # (1, 0) missing, (0, 1) twice
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 3)), ((2, 1), (3, 3)), ((1, 0), (3, 1))]
    assert not exactly_once(((0, 0), (3, 3)), pinwheel)


def test_copies_share_the_work():
    sources = [layout(f"trainer rank {i}", ((0, 0), (64, 8))) for i in range(4)]
    targets = [layout(f"engine-{i} rank 0", ((0, 0), (64, 8))) for i in range(2)]
    plan = make_plan(sources, targets, bucket=128)
    assert plan.sent() == [512] * 4


def test_what_no_trainer_rank_holds_is_named():
    half = [layout("trainer rank 0", ((0, 0), (32, 8)))]
    with pytest.raises(PlanError, match=r"engine-0 rank 0 loads w from \(32, 0\) to \(64, 8\): no trainer rank holds"):
        make_plan(half, [layout("engine-0 rank 0", ((0, 0), (64, 8)))], bucket=1 << 20)
    with pytest.raises(PlanError, match="loads w, which no trainer rank holds"):
        make_plan([RankLayout("trainer rank 0", (), ())], [layout("engine-0 rank 0", ((0,), (4,)))], bucket=64)


def test_equal_layouts_go_in_one_write_and_the_report_says_what_it_costs():
    model = ModelSizes(256, 32, 64, 2, 4, 2, 8)
    plan = make_plan(trainer_layouts(model, TrainerParallel()), [embedded_layout(model, name="e")], bucket=1 << 30)
    assert len(plan.writes(1 << 30)) == 1
    lines = summary(plan, 1 << 20, Rates(send=10.0, receive=5.0))
    assert "every element once" in lines[0]
    assert lines[-1].endswith("waiting for e rank 0")
    found = expected(plan, Rates(send=10.0, receive=5.0, per_write=0.0), 1 << 30)
    assert found.seconds == pytest.approx(model.parameters() * 2 / 5e9)
