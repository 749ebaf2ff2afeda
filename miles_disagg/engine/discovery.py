"""What a running engine says of itself, and which differences from what a run needs make it unusable.

`discover` asks; `differences` is pure. Waiting for an engine, and what follows from a difference, is the owner's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_disagg.domain.errors import CheckpointError, EngineError
from miles_disagg.engine.base import Engine
from miles_disagg.engine.inplace import HOOK

WorkerType = Literal["regular", "prefill", "decode"]
TESTED_SGLANG = "0.5.17"

_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "num_experts", "tie_word_embeddings",
)  # fmt: skip
_SHORT = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint's `config.json` as far as it decides which engines can serve it. dtype: torch name."""

    architectures: tuple[str, ...]
    model_type: str
    dtype: str
    sizes: Mapping[str, Any]

    @classmethod
    def read(cls, checkpoint: Path) -> ModelFacts:
        """Of a checkpoint directory. CheckpointError if there is no readable config.json."""
        try:
            body = json.loads((checkpoint / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read the model's configuration: {error}", file="config.json") from None
        return cls(
            tuple(body.get("architectures") or ()),
            str(body.get("model_type")),
            _dtype(body.get("dtype") or body.get("torch_dtype") or "float32"),
            {name: body[name] for name in _SIZES if body.get(name) is not None},
        )


@dataclass(frozen=True)
class Discovered:
    """A running engine. dtype: torch name or `auto`; context_length: tokens, None where the model's own applies.

    ranks: of an update group, in SGLang's numbering (tensor-parallel ranks only).
    """

    url: str
    embedded: bool
    version: str
    model_path: str
    architectures: tuple[str, ...]
    model_type: str | None
    generates: bool
    dtype: str
    quantization: str | None
    worker_type: WorkerType
    tp: int
    pp: int
    dp: int
    dp_attention: bool
    on_gpu: bool
    context_length: int | None
    weight_version: str
    bootstrap_port: int | None = None  # of a prefill worker
    loads_hook: bool = False
    """Started with this package's `--custom-weight-loader`."""

    @property
    def gpus(self) -> int:
        """GPUs that it runs on; 0 on a CPU."""
        return self.tp * self.pp * (1 if self.dp_attention else self.dp) if self.on_gpu else 0

    @property
    def ranks(self) -> int:
        """Its ranks in an update group."""
        return self.tp

    def describe(self) -> str:
        """One line for people."""
        server = f"embedded engine {self.version}" if self.embedded else f"SGLang {self.version}"
        where = f"{self.gpus} GPU(s)" if self.on_gpu else "CPU"
        model = ", ".join(self.architectures) or self.model_type or "unknown model"
        shape = f"tp {self.tp}, pp {self.pp}, dp {self.dp}"
        return f"{server} on {where} ({shape}), {self.worker_type}, {model} in {self.dtype}, at {self.weight_version}"

    def to_json(self) -> dict[str, Any]:
        """For a status page."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "gpus": self.gpus, "ranks": self.ranks}
        return {"url": self.url, "worker_type": self.worker_type, **sizes, "description": self.describe()}


@dataclass(frozen=True)
class Wanted:
    """What a run needs of an engine. dtype: torch name; tokens: longest prompt with its answer."""

    model: ModelFacts
    dtype: str
    transport: Literal["broadcast", "disk", "p2p"]
    tokens: int


async def discover(engine: Engine) -> Discovered:
    """Ask a running engine. EngineUnavailable if it does not answer, EngineError if what answers is no engine."""
    info = await engine.server_info()
    if not isinstance(info, Mapping) or "weight_version" not in info:
        raise EngineError(f"{engine.url} answers, but not as an SGLang server (no weight_version in /server_info)")
    return discovered(engine.url, info, await engine.model_info())


def discovered(url: str, info: Mapping[str, Any], model: Mapping[str, Any]) -> Discovered:
    """From the bodies of `/server_info` and `/model_info`."""
    mode = info.get("disaggregation_mode")
    return Discovered(
        url=url,
        embedded=info.get("engine") == "miles-disagg-embedded",
        version=str(info.get("version") or "of an unknown version"),
        model_path=str(model.get("model_path") or info.get("model_path")),
        architectures=tuple(model.get("architectures") or ()),
        model_type=model.get("model_type"),
        generates=bool(model.get("is_generation", True)),
        dtype=_dtype(info.get("dtype") or "auto"),
        quantization=info.get("quantization"),
        worker_type=mode if mode in ("prefill", "decode") else "regular",
        tp=int(info.get("tp_size") or 1),
        pp=int(info.get("pp_size") or 1),
        dp=int(info.get("dp_size") or 1),
        dp_attention=bool(info.get("enable_dp_attention")),
        on_gpu=not str(info.get("device") or "cuda").startswith("cpu"),
        context_length=int(info["context_length"]) if info.get("context_length") else None,
        weight_version=str(info.get("weight_version")),
        bootstrap_port=info.get("disaggregation_bootstrap_port") if mode == "prefill" else None,
        loads_hook=HOOK in (info.get("custom_weight_loader") or ()),
    )


def differences(found: Discovered, wanted: Wanted, *, routed: bool = False) -> list[str]:
    """What makes the engine unusable for the run, each by name with the remedy; empty if it can be used.

    routed: it is one of those behind a router. Not among the differences: the version it serves now (it is given the
    run's), its tokenizer, sizes of caches and batches.
    """
    return list(_differences(found, wanted, routed))


def group_differences(found: Sequence[Discovered]) -> list[str]:
    """What keeps engines behind one router from being used as one; empty if they can be."""
    by_kind: dict[str, list[str]] = {}
    for member in found:
        by_kind.setdefault(member.worker_type, []).append(member.url)
    problems = []
    if "regular" in by_kind and len(by_kind) > 1:
        others = ", ".join(url for kind in ("prefill", "decode") for url in by_kind.get(kind, ()))
        problems.append(f"regular workers ({', '.join(by_kind['regular'])}) beside prefill/decode workers ({others})")
    for kind, other in (("prefill", "decode"), ("decode", "prefill")):
        if kind in by_kind and other not in by_kind:
            problems.append(f"{kind} workers ({', '.join(by_kind[kind])}) without any {other} worker: add its address")
    if len({member.quantization for member in found}) > 1:
        problems.append("quantization differs: " + ", ".join(f"{m.url} has {m.quantization}" for m in found))
    return problems


def _differences(found: Discovered, wanted: Wanted, routed: bool) -> Iterator[str]:
    model = wanted.model
    if found.worker_type != "regular" and not routed:
        yield (
            f"worker type is {found.worker_type}: it cannot answer alone; give the address of all its prefill and "
            "decode workers, and the router in front of them with --sglang-router-ip and --sglang-router-port"
        )
    if not found.generates:
        yield "it does not generate (is_generation false): start it with a causal language model"
    if found.architectures and model.architectures and set(found.architectures).isdisjoint(model.architectures):
        yield f"architectures are {_names(found.architectures)}, the checkpoint's are {_names(model.architectures)}"
    elif found.model_type is not None and found.model_type != model.model_type:
        yield f"model_type is {found.model_type}, the checkpoint's is {model.model_type}"
    else:
        yield from _sizes(found, model)
    served = _served_dtype(found, model)
    if served != wanted.dtype and not found.quantization:
        yield (
            f"dtype is {served}{' (auto)' if found.dtype == 'auto' else ''}, the run's is {wanted.dtype}: start it "
            f"with --dtype {wanted.dtype}, or accept it with --rollout-dtype"
        )
    if found.context_length is not None and found.context_length < wanted.tokens:
        yield (
            f"context_length is {found.context_length}, the run needs {wanted.tokens} tokens: raise its "
            "--context-length, or lower --rollout-max-prompt-len and --rollout-max-response-len"
        )
    if wanted.transport == "broadcast":
        if found.pp > 1:
            yield f"pp_size is {found.pp}: SGLang's update groups number tensor-parallel ranks only; use disk transport"
        if found.dp > 1 and not found.dp_attention:
            yield f"dp_size is {found.dp} without dp attention: SGLang refuses update groups; use disk transport"
        if found.quantization:
            yield f"quantization is {found.quantization}: it cannot take tensors by broadcast; use disk transport"
    if wanted.transport == "p2p":
        yield from _peer(found)


def _peer(found: Discovered) -> Iterator[str]:
    """What keeps trainer ranks from writing into its weights."""
    other = "use --update-weight-transfer-mode disk-delta (or disk-full)"
    if not found.loads_hook:
        yield (
            f"it was not started with --custom-weight-loader {HOOK} (its package on the server's PYTHONPATH), which "
            f"tells trainer ranks where its weights lie: start it so, or {other}"
        )
    for name, size in (("pp_size", found.pp), ("dp_size", found.dp)):
        if size > 1:
            yield f"{name} is {size}: weights go peer to peer to tensor-parallel ranks only; {other}"
    if found.quantization:
        yield (
            f"quantization is {found.quantization}: its loader computes, so nothing can be written where the "
            f"checkpoint's elements lie; {other}"
        )


def _sizes(found: Discovered, model: ModelFacts) -> Iterator[str]:
    """Sizes of the model that it was started from, where that directory can be read from here."""
    try:
        other = ModelFacts.read(Path(found.model_path))
    except CheckpointError:
        return
    for name, ours in model.sizes.items():
        theirs = other.sizes.get(name, ours)
        if theirs != ours:
            yield f"{name} is {theirs} in its model {found.model_path}, the checkpoint's is {ours}"


def _served_dtype(found: Discovered, model: ModelFacts) -> str:
    """What `auto` comes to. SGLang serves float32 checkpoints in float16, Gemma's in bfloat16."""
    if found.dtype != "auto":
        return found.dtype
    if found.embedded or model.dtype != "float32":
        return model.dtype
    return "bfloat16" if model.model_type.startswith("gemma") else "float16"


def _dtype(name: Any) -> str:
    short = str(name).removeprefix("torch.")
    return _SHORT.get(short, short)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)
