"""Buckets of changes: compared on a device they are the ones that the host makes. What may not be sent at all."""

import pytest
import torch

from miles_disagg.domain.errors import NonFiniteWeights
from miles_disagg.publish.changes import changed_bucket
from miles_disagg.publish.finite import refuse_non_finite

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
METAS = (
    ("scale", torch.uint8, (3,)),  # what follows it is at an odd offset
    ("a", torch.bfloat16, (40, 50)),
    ("dense", torch.float32, (30,)),
    ("same", torch.bfloat16, (7,)),
    ("scalar", torch.float32, ()),
)


def pair():
    size = sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in METAS)
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    new = old.clone()
    new[3 : 3 + 4000 : 101] += 1
    new[4003 : 4003 + 120] += 1
    return old, new


@pytest.mark.gpu
@pytest.mark.parametrize("changed", [True, False])
def test_a_bucket_made_on_the_gpu_is_the_one_made_on_the_host(changed):
    old, new = pair()
    new = new if changed else old.clone()
    flat, metas, count = changed_bucket(old, new, METAS)
    there, there_metas, there_count = changed_bucket(old.cuda(), new.cuda(), METAS)
    assert there.is_cuda
    assert (there.cpu().tolist(), there_metas, there_count) == (flat.tolist(), metas, count)


def test_only_changes_are_sent_and_a_dense_tensor_as_itself():
    old, new = pair()
    flat, metas, count = changed_bucket(old, new, METAS)
    assert [name for name, _, _ in metas] == ["a:positions", "a:values", "dense"]
    assert metas[2][1:] == (torch.float32, (30,))
    found = metas[0][2][0]
    assert count == found + 30
    positions = flat[: 4 * found].view(torch.int32).long()
    values = flat[4 * found : 6 * found].clone().view(torch.int16)
    after = old[3:4003].clone().view(torch.int16)
    after[positions] = values
    assert torch.equal(after, new[3:4003].clone().view(torch.int16))
    assert torch.equal(flat[6 * found :], new[4003:4123])


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_fp8_code_is_refused_exactly_where_torch_calls_it_nan_or_infinite(dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    sound = codes.float().isfinite()
    refuse_non_finite([("good", codes.view(torch.uint8)[sound].view(dtype))])
    for code in codes.view(torch.uint8)[~sound].view(dtype):
        with pytest.raises(NonFiniteWeights, match="'bad'"):
            refuse_non_finite([("bad", torch.stack([code.view(torch.uint8)] * 2).view(dtype))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused_by_name_in_every_type(dtype, value):
    good = [("a", torch.randn(3, 5).to(dtype)), ("empty", torch.empty(0, dtype=dtype)), ("ids", torch.arange(4))]
    refuse_non_finite([*good, ("scalar", torch.tensor(1.0).to(dtype))])
    bad = torch.zeros(7, 3)
    bad[2, 1] = bad[6, 0] = float("nan") if dtype == torch.float8_e4m3fn else value  # e4m3 has no infinity
    with pytest.raises(NonFiniteWeights, match="2 non-finite values in 'b'"):
        refuse_non_finite([*good, ("b", bad.to(dtype).t()), ("c", bad.to(dtype))])
