"""Writes the golden chain beside this file, in the format of miles and slime, with nothing of ours.

Run once: `python tests/weights/golden/make.py`. The result is committed; tests apply it and compare with `states.npz`.
"""

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from blake3 import blake3
from safetensors.numpy import save_file

HERE = Path(__file__).parent
SUMS = {
    "xxh3-128": lambda b: xxhash.xxh3_128(b).hexdigest(),
    "blake3": lambda b: blake3(b).hexdigest(),
    "adler32": lambda b: f"{zlib.adler32(b):08x}",
}


def main():
    rng = np.random.default_rng(7)
    base = {
        "model.embed_tokens.weight": rng.standard_normal((60, 16)).astype(np.float32),
        "model.layers.0.mlp.up_proj.weight": rng.standard_normal((32, 16)).astype(np.float16),
        "model.norm.weight": np.ones(16, np.float16),
        "scale": np.array(0.5, np.float32),
    }
    (HERE / "base").mkdir(exist_ok=True)
    save_file(base, HERE / "base" / "model.safetensors", metadata={"format": "pt"})
    states = [{k: np.frombuffer(v.tobytes(), np.uint8) for k, v in base.items()}]
    steps = [("xor", "xxh3-128"), ("overwrite", "blake3"), ("xor", "adler32"), ("overwrite", "xxh3-128")]
    for version, (encoding, algorithm) in enumerate(steps, 1):
        old, new = states[-1], {k: v.copy() for k, v in states[-1].items()}
        for name in list(base)[: 4 if version < 4 else 1]:
            at = rng.choice(new[name].size, max(1, new[name].size // 50), replace=False)
            new[name][at] ^= rng.integers(1, 255, at.size, dtype=np.uint8)
        payload, sums = {}, {}
        for name in old:
            mask = new[name] != old[name]
            if not mask.any():
                continue
            pos = np.flatnonzero(mask).astype("<u4")
            raw = {
                "xor": (new[name] ^ old[name]).tobytes(),
                "overwrite": np.uint32(pos.size).tobytes() + pos.tobytes() + new[name][mask].tobytes(),
            }[encoding]
            payload[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(raw), np.uint8)
            sums[name] = SUMS[algorithm](new[name].tobytes())
        folder = HERE / f"weight_v{version:06d}"
        folder.mkdir(exist_ok=True)
        names = [list(payload)[0::2], list(payload)[1::2]]
        files = [n for n in names if n]
        weight_map = {}
        for i, part in enumerate(files):
            file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
            save_file({n: payload[n] for n in part}, folder / file, metadata={n: sums[n] for n in part})
            weight_map |= dict.fromkeys(part, file)
        meta = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": algorithm,
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": meta, "weight_map": weight_map}))
        states.append(new)
    np.savez(HERE / "states.npz", **{f"{v}/{k}": a for v, s in enumerate(states) for k, a in s.items()})
    print(hashlib.sha256((HERE / "states.npz").read_bytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
