"""How long an engine is paused for a new version: reloading its checkpoint, or taking all weights through CUDA IPC,
against scattering the changes in place.

Starts stock SGLang on a random Qwen3-shaped model, keeps requests in flight through a replica, and activates versions
whose patch is on this host already. Prints one JSON object, last line of stdout:
{"results": [{"model", "mode", "density", "pause_ms_p50", "pause_ms_p95", "publish_to_first_token_s", ...}]}, where
`publish_to_first_token_s` counts from the verified patch (or checkpoint) on the host to the first token that the new
version wrote: p50. At the end the live weights are compared with the checkpoint, every element.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import shutil
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from miles_disagg.config.machine import free_port
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine import launch
from miles_disagg.engine.base import Engine
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.inplace import InPlaceLoader
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.replica.wire import parse_requests
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.indices import POSITIONS, VALUES

# hidden, intermediate, layers, heads, KV heads, head size, tied, vocabulary
SHAPES = {
    "tiny": (128, 256, 4, 4, 2, 64, True, 1024),
    "0.6B": (1024, 3072, 28, 16, 8, 128, True, 151936),
    "4B": (2560, 9728, 36, 32, 8, 128, True, 151936),
    "8B": (4096, 12288, 36, 32, 8, 128, False, 151936),
    "32B": (5120, 25600, 64, 64, 8, 128, False, 151936),
}
# the same of a mixture: intermediate is of one expert; experts, and how many of them a token has
MIXTURES = {
    "tiny-experts": ((128, 128, 4, 4, 2, 64, False, 1024), 8, 2),
    "6B-experts": ((2048, 1024, 24, 32, 4, 128, False, 151936), 32, 8),
}
MIXTURE_OF = {"tiny": "tiny-experts", "0.6B": "6B-experts", "4B": "6B-experts", "8B": "6B-experts"}
_SHARD = 4 << 30
_SPARE = 2 << 30  # bytes of the GPU that stay free beside a second copy of the weights


@dataclass(frozen=True)
class Options:
    """device of the engine, requests in flight, activations per mode, SGLang's python and further arguments."""

    device: str
    in_flight: int
    rounds: int
    python: str | None
    args: tuple[str, ...]


def sizes_of(name: str) -> tuple[tuple[int, int, int, int, int, int, bool, int], int, int]:
    """A model's shape, its experts, and how many of them a token has (0 and 0: dense)."""
    return MIXTURES[name] if name in MIXTURES else (SHAPES[name], 0, 0)


def make_model(name: str, directory: Path, device: str) -> None:
    """Write a random bf16 checkpoint of Qwen3's form, without a tokenizer."""
    sizes, experts, active = sizes_of(name)
    hidden, inner, layers, heads, kv, head, tied, vocab = sizes
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": (heads * head, hidden),
            at + "self_attn.k_proj.weight": (kv * head, hidden),
            at + "self_attn.v_proj.weight": (kv * head, hidden),
            at + "self_attn.o_proj.weight": (hidden, heads * head),
            at + "self_attn.q_norm.weight": (head,),
            at + "self_attn.k_norm.weight": (head,),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {at + "mlp.gate.weight": (experts, hidden)} if experts else {}
        for mlp in [f"{at}mlp.experts.{e}." for e in range(experts)] or [at + "mlp."]:
            shapes |= {mlp + "gate_proj.weight": (inner, hidden), mlp + "up_proj.weight": (inner, hidden)}
            shapes[mlp + "down_proj.weight"] = (hidden, inner)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head,
        "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "attention_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": False,
    }  # fmt: skip
    if experts:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": experts}
        config |= {"num_experts_per_tok": active, "moe_intermediate_size": inner, "norm_topk_prob": True}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map, size, number = {}, 0, 0
    for tensor_name, shape in shapes.items():
        shard[tensor_name] = torch.randn(shape, device=device).mul_(0.02).to(torch.bfloat16).cpu()
        if len(shape) == 1:
            shard[tensor_name] += 1
        weight_map[tensor_name] = f"model-{number:05d}.safetensors"
        size += shard[tensor_name].nbytes
        if size > _SHARD or tensor_name == list(shapes)[-1]:
            save_file(shard, directory / weight_map[tensor_name])
            shard, size, number = {}, 0, number + 1
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def make_patches(directory: Path, density: float, there: Path, back: Path, device: str) -> int:
    """Two patch files: one that flips the lowest bit of a share of all elements, and one that undoes it. Elements."""
    total = 0
    flipped: dict[str, torch.Tensor] = {}
    undone: dict[str, torch.Tensor] = {}
    with open_checkpoint(directory) as checkpoint:
        for name in checkpoint.tensors:
            whole = torch.from_numpy(checkpoint.bytes(name).view(np.int16).copy())
            count = max(1, int(whole.numel() * density))
            where = torch.randint(whole.numel(), (count,), device=device).unique().cpu()
            old = whole[where]
            for target, values in ((flipped, old ^ 1), (undone, old)):
                target[name + POSITIONS] = where.to(torch.int32)
                target[name + VALUES] = values.view(torch.bfloat16)
            total += where.numel()
    save_file(flipped, there)
    save_file(undone, back)
    return total


class IpcLoader:
    """`activation.Loader` of the comparison: every tensor lies on the engine's GPU and is handed over by CUDA IPC."""

    def __init__(self, directory: Path):
        self._tensors, self._payload = [], ""
        with open_checkpoint(directory) as checkpoint:
            for name, info in checkpoint.tensors.items():
                raw = torch.from_numpy(checkpoint.bytes(name).copy())
                self._tensors.append((name, raw.cuda().view(torch.bfloat16).view(tuple(info.shape))))

    @staticmethod
    def fits(directory: Path) -> bool:
        """True if the GPU has room for a second copy of the checkpoint."""
        return torch.cuda.mem_get_info()[0] > sum(f.stat().st_size for f in directory.glob("*.safetensors")) + _SPARE

    async def stage(self, target: Materialized) -> None:
        """Handles are made before the pause."""
        stream = io.BytesIO()
        ForkingPickler(stream).dump(self._tensors)
        self._payload = base64.b64encode(stream.getvalue()).decode()

    async def load(self, engine: Engine, target: Materialized) -> None:
        """SGLang copies through its model's own loader."""
        await engine.update_from_tensor([self._payload], load_format=None, version=str(target.ref), flush_cache=False)


class Load:
    """Requests in flight through a replica: each that ends is started anew. tokens: of one answer."""

    def __init__(self, replica: Replica, vocab: int, tokens: int):
        self._replica, self._vocab, self._length, self._tasks = replica, vocab, tokens, []
        self.first_seen: dict[int, float] = {}
        self.tokens = 0

    async def _one(self, number: int) -> None:
        rng = np.random.default_rng(number)
        while True:
            body = {
                "input_ids": rng.integers(10, self._vocab, 32).tolist(),
                "rid": uuid.uuid4().hex,
                "sampling_params": {"max_new_tokens": self._length, "ignore_eos": True, "temperature": 1.0},
            }
            seen = 0
            async for chunk in self._replica.sessions.stream(parse_requests("/generate", body)[0][0]):
                now, meta = time.monotonic(), chunk["meta_info"]
                self.tokens += meta["completion_tokens"] - seen
                seen = meta["completion_tokens"]
                newest = max((v for _, v in meta.get("weight_version_spans") or ()), default=0)
                self.first_seen.setdefault(newest, now)

    async def start(self, count: int) -> None:
        """Start them and wait until all generate."""
        self._tasks = [asyncio.create_task(self._one(i)) for i in range(count)]
        while sum(f.tokens > 8 for f in self._replica.gate.flights()) < count:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _mode(
    name: str,
    directory: Path,
    replica: Replica,
    version: int,
    options: Options,
    *,
    mode: str,
    density: float = 0.0,
    loader: InPlaceLoader | None = None,
) -> dict[str, Any]:
    """Activations of one kind under load; density 0: all weights are loaded."""
    there, back = directory.parent / "there.safetensors", directory.parent / "back.safetensors"
    elements = make_patches(directory, density, there, back, options.device) if density else 0
    room = int((await replica.engine.server_info())["max_total_num_tokens"]) // options.in_flight  # KV of one request
    load = Load(replica, sizes_of(name)[0][-1], max(64, min(2048, room // 2)))
    await load.start(options.in_flight)
    begun, tokens = time.monotonic(), load.tokens
    await asyncio.sleep(3.0)
    undisturbed = (load.tokens - tokens) / (time.monotonic() - begun)
    pauses, firsts, stages, loads, scatters = [], [], [], [], []
    rounds = options.rounds if density else max(4, options.rounds // 3)
    for number in range(rounds - rounds % 2):
        version += 1
        patch = (back if number % 2 else there) if density else None
        handed = time.monotonic()
        target = Materialized(VersionRef("bench", version), directory, VersionRef("bench", version - 1), patch)
        report = await replica.activate(target)
        while version not in load.first_seen:
            await asyncio.sleep(0.001)
        pauses.append(report.pause_seconds * 1e3)
        stages.append(report.stage_seconds)
        loads.append(report.load_seconds * 1e3)
        if loader is not None:
            scatters.append((loader.scatter_seconds or 0.0) * 1e3)
        firsts.append(load.first_seen[version] - handed)
        await asyncio.sleep(0.3)
    await load.stop()
    p50 = float(np.percentile(pauses, 50))
    row = {
        "mode": mode,
        "density": density or None,
        "elements": elements,
        "pause_ms_p50": round(p50, 2),
        "pause_ms_p95": round(float(np.percentile(pauses, 95)), 2),
        "publish_to_first_token_s": round(float(np.percentile(firsts, 50)), 4),
        "stage_s_p50": round(float(np.percentile(stages, 50)), 4),
        "load_ms_p50": round(float(np.percentile(loads, 50)), 2),
        "scatter_ms_p50": round(float(np.percentile(scatters, 50)), 2) if scatters else None,
        "tokens_per_second": round(undisturbed),
        "tokens_lost_p50": round(undisturbed * p50 / 1e3),
        "activations": len(pauses),
    }
    print(json.dumps({"model": name, **row}), file=sys.stderr, flush=True)
    return row


async def measure(name: str, directory: Path, densities: list[float], options: Options) -> list[dict[str, Any]]:
    """All modes on one engine."""
    base = VersionRef("bench", 0)
    args = ["--skip-tokenizer-init", *options.args]
    python = options.python
    spec = launch.sglang(
        directory, port=free_port(), device=options.device, python=python, weight_version=str(base), args=args
    )
    process = launch.EngineProcess.start(spec, directory.parent / "engine.log")
    engine = SGLangEngine(spec.url)
    results: list[dict[str, Any]] = []
    try:
        await process.wait_ready(400.0)
        replica = Replica(ReplicaSettings("bench"), engine)
        await replica.attach("bench")
        results.append({"model": name, **await _mode(name, directory, replica, 0, options, mode="reload")})
        await replica.sessions.close()
        if options.device == "cuda" and not IpcLoader.fits(directory):
            print(f"{name}: a second copy of the weights does not fit on this GPU: no ipc", file=sys.stderr, flush=True)
        elif options.device == "cuda":
            version = results[-1]["activations"]
            replica = Replica(ReplicaSettings("bench"), engine, loader=IpcLoader(directory))
            await replica.attach("bench")
            results.append({"model": name, **await _mode(name, directory, replica, version, options, mode="ipc")})
            await replica.sessions.close()
        loader = InPlaceLoader(engine, directory, verify_every=0)
        served = replica.applied
        assert served is not None
        begun = time.monotonic()
        opened = await loader.open(served)
        print(f"{name}: opened in {time.monotonic() - begun:.2f} s: {opened}", file=sys.stderr, flush=True)
        replica = Replica(ReplicaSettings("bench"), engine, loader=loader)
        await replica.attach("bench")
        version = served.version
        for density in densities:
            row = await _mode(
                name, directory, replica, version, options, mode="in-place", density=density, loader=loader
            )
            results.append({"model": name, **row})
            version += results[-1]["activations"]
        await replica.sessions.close()
        (answer,) = await loader.plugin.call("compare", directory=str(directory))
        results[-1] |= {"elements_that_differ_at_the_end": sum(answer["wrong"].values()), **loader.describe()}
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        loader.plugin.close()
    except BaseException:
        print(process.log_tail(), file=sys.stderr)
        raise
    finally:
        await engine.close()
        await process.stop()
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object (always done)")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES | MIXTURES), default=["tiny"])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.001, 0.01, 0.05])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12, help="activations per density")
    parser.add_argument("--sglang-python", default=None)
    parser.add_argument("--scratch", default="/dev/shm", help="where checkpoints are made")
    parser.add_argument("server_args", nargs="*", help="after --: further arguments of the server")
    args = parser.parse_args()
    options = Options(args.device, args.in_flight, args.rounds, args.sglang_python, tuple(args.server_args))
    results: list[dict[str, Any]] = []
    for name in args.models:
        work = Path(tempfile.mkdtemp(prefix="bench-activation-", dir=args.scratch))
        try:
            make_model(name, work / "model", args.device)
            if args.device == "cuda":
                torch.cuda.empty_cache()
            results += asyncio.run(measure(name, work / "model", args.densities, options))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
