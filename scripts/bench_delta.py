"""Delta encodings against xor + zstd-1 as miles and slime do it: bytes on the wire, encode speed, apply speed.

    python scripts/bench_delta.py --json
    python scripts/bench_delta.py --record build/recorded --json
    python scripts/bench_delta.py --chain runs/quickstart/store/RUN --base runs/quickstart/base --json

One thread, bf16. `synthetic`: weights of scale 0.02 under Adam-like steps, the step size tuned to each density.
`recorded`: successive versions of a delta chain on disk (`--chain`: a run's directory of weight_v*; `--base`: its base
checkpoint; `--record DIR` first trains the quickstart in bf16 to make one in DIR, and uses it as it is when it is
there). Encode includes the digest of the target, apply the verification of the complete target. Every ratio is to
the baseline in this file, above 1 is better; each time is the best of `--repeat`, in processor
seconds of the one thread, baseline and codec interleaved, so that neighbours on the machine matter little.
`load_average`: of one minute, before and after.
`bound_ratio`: baseline bytes over an order-0 entropy bound (which positions, then which differences, both independent
of everything else); `sparse-max` can beat it because it conditions on the old value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from miles_disagg.domain.versions import version_directory
from miles_disagg.weights.chain import apply_chain
from miles_disagg.weights.checkpoint import open_checkpoint, write_checkpoint
from miles_disagg.weights.codecs import DELTA_ENCODINGS, apply_frame, codec_hasher, encode_frame, get_codec
from miles_disagg.weights.delta import open_delta
from miles_disagg.weights.dtypes import unsigned

DENSITIES = (0.001, 0.01, 0.05, 0.5)
Case = tuple[str, str, np.ndarray, np.ndarray]  # source, dtype, old bytes, new bytes


def baseline_encode(old: np.ndarray, new: np.ndarray) -> bytes:
    """miles `diff_and_compress`: xor, count, zstd-1, checksum of the new state."""
    difference = new ^ old
    np.count_nonzero(difference)
    frame = zstandard.ZstdCompressor(level=1).compress(difference.data)
    xxhash.xxh3_128(new).hexdigest()
    return frame


def baseline_apply(frame: bytes, region: np.ndarray) -> str:
    """Their receiver's `apply_xor`: 2 MiB chunks through decompress, xor, checksum."""
    hasher, position = xxhash.xxh3_128(), 0
    reader = zstandard.ZstdDecompressor().stream_reader(memoryview(frame))
    while position < region.size:
        chunk = np.frombuffer(reader.read(min(2 << 20, region.size - position)), np.uint8)
        region[position : position + chunk.size] ^= chunk
        hasher.update(region[position : position + chunk.size])
        position += chunk.size
    return hasher.hexdigest()


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, round to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def synthetic(density: float, megabytes: int, seed: int = 0) -> Case:
    """An Adam step (direction m/sqrt(v) in [-1, 1]) on fp32 masters, seen in bf16; step size found by bisection."""
    rng = np.random.default_rng(seed)
    elements = megabytes << 19
    master = rng.standard_normal(elements, dtype=np.float32) * np.float32(0.02)
    direction = np.clip(rng.standard_normal(elements, dtype=np.float32), -1, 1)
    old, sample = bf16(master), slice(0, 1 << 20)
    low, high = 1e-10, 1.0
    for _ in range(40):
        rate = (low * high) ** 0.5
        share = np.mean(bf16(master[sample] + np.float32(rate) * direction[sample]) != old[sample])
        low, high = (rate, high) if share < density else (low, rate)
    new = bf16(master + np.float32(rate) * direction)
    return "synthetic", "BF16", old.view(np.uint8), new.view(np.uint8)


def record(directory: Path, versions: int, hidden: int, layers: int, flags: list[str]) -> tuple[Path, Path]:
    """(chain, base checkpoint) of a quickstart run in bf16 that publishes deltas to `directory`; made once.

    hidden, layers: of its model. flags: more flags of `miles-disagg train`.
    """
    from miles_disagg.prompts.quickstart import Recipe, make_quickstart

    root, recipe = Path(__file__).resolve().parent.parent, Recipe(hidden_size=hidden, layers=layers)
    base, chain = Path(make_quickstart(directory / "base", recipe).path), directory / "store" / "recorded"
    if not (chain / version_directory(versions)).is_dir():
        command = [sys.executable, str(root / "train_async.py"), "--config", str(root / "configs/quickstart.yaml")]
        command += ["--hf-checkpoint", str(base), "--ray-address", "local", "--train-dtype", "bf16"]
        command += ["--num-rollout", str(versions), "--run-id", "recorded", "--run-dir", str(directory / "run")]
        command += ["--update-weight-disk-dir", str(directory / "store")]
        subprocess.run([*command, *flags], check=True, stdout=sys.stderr)
    return chain, base


def recorded(chain: Path, base: Path, scratch: Path) -> Iterator[Case]:
    """Successive states of a recorded chain: the changed 2-byte tensors of each version, concatenated."""
    versions = sorted(p for p in chain.glob("weight_v*") if p.is_dir())
    with open_checkpoint(base) as source:
        write_checkpoint(scratch, [(t.name, t.dtype, t.shape, source.bytes(t.name)) for t in source.tensors.values()])
    with open_checkpoint(scratch, writable=True) as state:
        for version in range(1, len(versions) + 1):
            delta = open_delta(chain / version_directory(version))
            names = [n for n in delta.names if state.tensors[n].dtype == "BF16"]
            old = np.concatenate([state.bytes(n) for n in names]) if names else np.empty(0, np.uint8)
            apply_chain(state, [delta], workers=1)
            if names:
                yield "recorded", "BF16", old, np.concatenate([state.bytes(n) for n in names])


def entropy_bound(old: np.ndarray, new: np.ndarray, dtype: str) -> tuple[float, float]:
    """(density, bytes): positions as independent coin flips, then the order-0 entropy of the integer differences."""
    a, b = old.view(unsigned(dtype)), new.view(unsigned(dtype))
    changed = a != b
    p = float(changed.mean())
    if p == 0:
        return 0.0, 0.0
    _, counts = np.unique(b[changed] - a[changed], return_counts=True)
    share = counts / counts.sum()
    position_bits = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) if p < 1 else 0.0
    return p, a.size * (position_bits + p * -float(np.sum(share * np.log2(share)))) / 8


def best_of(repeat: int, *works: Callable[[], float]) -> list[float]:
    """Least seconds of each work, taken in turns so that all see the same neighbours on the machine."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeat):
        for work, seen in zip(works, times, strict=True):
            seen.append(work())
    return [min(seen) for seen in times]


def timed(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def measure(case: Case, repeat: int) -> list[dict[str, float | str]]:
    """One row per encoding for one (old, new) pair."""
    source, dtype, old, new = case
    density, bound = entropy_bound(old, new, dtype)
    base = baseline_encode(old, new)
    expected = xxhash.xxh3_128(new).hexdigest()
    region = np.empty_like(old)

    def base_apply() -> float:
        region[:] = old
        seconds = timed(lambda: baseline_apply(base, region))
        assert np.array_equal(region, new)
        return seconds

    rows = []
    for encoding in DELTA_ENCODINGS:
        codec = get_codec(encoding)
        frame, _ = encode_frame(codec, old, new, dtype, codec_hasher())

        def apply(codec=codec, frame=frame) -> float:
            region[:] = old
            hasher = codec_hasher()
            seconds = timed(lambda: apply_frame(codec, frame, region, dtype, hasher))
            assert hasher.hexdigest() == expected
            return seconds

        def encode(codec=codec) -> float:
            return timed(lambda: encode_frame(codec, old, new, dtype, codec_hasher())[0])

        base_seconds, seconds, base_apply_seconds, apply_seconds = best_of(
            repeat, lambda: timed(lambda: baseline_encode(old, new)), encode, base_apply, apply
        )
        rows.append(
            {
                "source": source,
                "density": round(density, 6),
                "encoding": encoding,
                "wire_over_raw": round(len(frame) / new.size, 6),
                "wire_ratio_vs_xor": round(len(base) / len(frame), 3),
                "encode_ratio_vs_xor": round(base_seconds / seconds, 3),
                "apply_ratio_vs_xor": round(base_apply_seconds / apply_seconds, 3),
                "bound_ratio": round(len(base) / bound, 3) if bound else 0.0,
                "encode_gb_s": round(new.size / seconds / 1e9, 3),
                "apply_gb_s": round(new.size / apply_seconds / 1e9, 3),
            }
        )
    return rows


def print_rows(rows: list[dict[str, float | str]]) -> None:
    for row in rows:
        print(
            f"{row['source']:10} {row['density']:8.4%} {row['encoding']:10} wire {row['wire_over_raw']:8.5f} of raw, "
            f"{row['wire_ratio_vs_xor']:5.2f}x (bound {row['bound_ratio']:5.2f}x)   "
            f"encode {row['encode_gb_s']:6.2f} GB/s {row['encode_ratio_vs_xor']:5.2f}x   "
            f"apply {row['apply_gb_s']:6.2f} GB/s {row['apply_ratio_vs_xor']:5.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--megabytes", type=int, default=128, help="size of the synthetic tensor, MiB")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each; the best counts")
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--chain", type=Path, help="directory with weight_v000001, ... of a recorded run")
    parser.add_argument("--base", type=Path, help="base checkpoint of that run")
    parser.add_argument("--scratch", type=Path, default=Path("build/bench_delta"), help="where --chain is replayed")
    parser.add_argument("--record", type=Path, help="make a recorded run in this directory, or use the one there")
    parser.add_argument("--versions", type=int, default=8, help="how many versions --record publishes")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model that --record trains")
    parser.add_argument("--layers", type=int, default=3, help="its layers")
    parser.add_argument("--flags", default="", help='more flags of the recorded run, say --flags="--lr 1e-6"')
    arguments = parser.parse_args()
    if arguments.record and not arguments.chain:
        arguments.chain, arguments.base = record(
            arguments.record.absolute(),
            arguments.versions,
            arguments.hidden,
            arguments.layers,
            arguments.flags.split(),
        )
    if bool(arguments.chain) != bool(arguments.base):
        sys.exit("bench_delta: --chain needs --base (the run's base checkpoint), and the other way round")
    results: list[dict[str, float | str]] = []
    load = os.getloadavg()[0]
    cases: Iterator[Case] = (synthetic(density, arguments.megabytes) for density in arguments.densities)
    for case in cases:
        results += (rows := measure(case, arguments.repeat))
        print_rows(rows)
    if arguments.chain:
        for case in recorded(arguments.chain, arguments.base, arguments.scratch):
            results += (rows := measure(case, arguments.repeat))
            print_rows(rows)
    if arguments.json:
        print(json.dumps({"results": results, "load_average": [round(load, 2), round(os.getloadavg()[0], 2)]}))


if __name__ == "__main__":
    main()
