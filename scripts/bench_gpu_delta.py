"""Comparing two copies of a model's weights on one GPU: which elements changed, where, and their values.

    python scripts/bench_gpu_delta.py --json

An 8B-parameter model in bf16 (16 GB; two copies and the scratch need 36 GB), cut into tensors as a 32-layer
transformer has them, 1 % of the elements changed. `diff` is what happens before anything leaves the GPU: compare and
compact, positions and both values left on the device. `to_host` adds the differences and the transfer. Seconds are wall
clock with the device synchronised, the best of `--repeat`; the result is checked against `torch.nonzero` on one tensor.
`read_once_ms` is what reading both copies once takes (a sum of each).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

from miles_disagg.weights.device_diff import as_integers, changes_of


def shapes(hidden: int, layers: int, feed_forward: int, vocabulary: int, kv: int) -> list[tuple[int, ...]]:
    """Tensors of a dense transformer with untied embeddings."""
    layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    layer += [(feed_forward, hidden), (feed_forward, hidden), (hidden, feed_forward), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *(layer * layers), (hidden,), (vocabulary, hidden)]


def make(sizes: list[tuple[int, ...]], density: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(old, new): new differs by one unit in the last place in about `density` of the elements."""
    old, new = [], []
    for shape in sizes:
        tensor = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02
        moved = torch.rand(tensor.numel(), device="cuda", dtype=torch.float32) < density
        old.append(tensor)
        new.append((tensor.view(torch.int16).reshape(-1) + moved.to(torch.int16)).view(torch.bfloat16).view(shape))
    return old, new


def best(repeat: int, work: Callable[[], object]) -> float:
    """Least seconds of `work`, the device idle before and after; once unmeasured."""
    seconds = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--layers", type=int, default=32, help="fewer for a smaller GPU")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu_delta: needs a CUDA device")
    old, new = make(shapes(4096, arguments.layers, 14336, 128256, 1024), arguments.density)
    pairs = [(as_integers(a, 2), as_integers(b, 2)) for a, b in zip(old, new, strict=True)]
    nbytes = sum(a.nbytes for a, _ in pairs)

    def diff() -> list:
        return changes_of(pairs)

    def to_host() -> None:
        for found in changes_of(pairs):
            found.positions.cpu(), (found.after - found.before).cpu()

    def nonzero() -> None:
        for a, b in pairs:
            torch.nonzero(a != b)

    found = diff()
    assert torch.equal(found[1].positions.long(), torch.nonzero(pairs[1][0] != pairs[1][1]).reshape(-1))
    changed = sum(f.positions.numel() for f in found)
    del found
    result = {
        "device": torch.cuda.get_device_name(),
        "bytes": nbytes,
        "tensors": len(pairs),
        "density": round(changed * 2 / nbytes, 5),
        "diff_ms": round(1e3 * best(arguments.repeat, diff), 3),
        "to_host_ms": round(1e3 * best(arguments.repeat, to_host), 3),
        "torch_nonzero_ms": round(1e3 * best(arguments.repeat, nonzero), 3),
        "read_once_ms": round(1e3 * best(arguments.repeat, lambda: [x.sum() for pair in pairs for x in pair]), 3),
    }
    print(
        f"{nbytes / 1e9:.1f} GB in {len(pairs)} tensors, {result['density']:.2%} changed: diff and compaction "
        f"{result['diff_ms']:.1f} ms ({2 * nbytes / result['diff_ms'] / 1e9:.2f} TB/s of both copies), with transfer "
        f"{result['to_host_ms']:.1f} ms; torch.nonzero {result['torch_nonzero_ms']:.1f} ms"
    )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
