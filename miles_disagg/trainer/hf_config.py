"""Reads a Hugging Face `config.json` into the few numbers the trainer builds its model from, and refuses the rest.

No torch here, so that a dry run can say what is wrong with a model before anything heavy is imported. How the numbers
become a Megatron model is `megatron/model.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.transfer.layouts import ModelSizes

MIXTURES = ("Qwen3MoeForCausalLM",)
SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", *MIXTURES)
_QWEN3 = ("Qwen3ForCausalLM", *MIXTURES)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base period and, for `linear` and `llama3`, its scaling parameters."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """head_dim / 2 inverse frequencies (radians per position), as transformers' `modeling_rope_utils` has them."""
        base = [self.theta ** -(i / head_dim) for i in range(0, head_dim, 2)]
        if self.kind == "default":
            return base
        if self.kind == "linear":
            return [f / self.factor for f in base]
        return [self._llama3(f) for f in base]

    def _llama3(self, freq: float) -> float:
        """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
        wavelength, context = 2 * math.pi / freq, self.original_max_position_embeddings
        if wavelength < context / self.high_freq_factor:
            return freq
        if wavelength > context / self.low_freq_factor:
            return freq / self.factor
        smooth = (context / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * freq / self.factor + smooth * freq


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in the place of every MLP. active: experts of a token; ffn_size: of one expert.

    normalised: the weights of a token's experts are scaled to add up to 1.
    """

    count: int
    active: int
    ffn_size: int
    normalised: bool


@dataclass(frozen=True)
class HfModelConfig:
    """A decoder: grouped-query attention, RMSNorm, SwiGLU or experts of it, rotary embedding. Sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: ExpertsConfig | None = None

    def layout_problems(self, tensor_parallel: int, pipeline_parallel: int, expert_parallel: int = 1) -> list[str]:
        """Why this model cannot be split TP x PP ways, and its experts EP ways; empty if it can."""
        sizes = {"num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads}
        if self.experts is None:
            sizes |= {"intermediate_size": self.ffn_size}
        problems = [
            f"--tensor-model-parallel-size {tensor_parallel} does not divide the model's {name} {size}"
            for name, size in sizes.items()
            if size % tensor_parallel
        ]
        if self.num_layers % pipeline_parallel:
            problems.append(
                f"--pipeline-model-parallel-size {pipeline_parallel} does not divide the model's "
                f"num_hidden_layers {self.num_layers}"
            )
        return problems + self._expert_problems(tensor_parallel, expert_parallel)

    def _expert_problems(self, tensor_parallel: int, expert_parallel: int) -> list[str]:
        if self.experts is None:
            if expert_parallel > 1:
                return [f"--expert-model-parallel-size {expert_parallel}: {self.architecture} has no experts"]
            return []
        problems = []
        if tensor_parallel > 1:
            problems.append(
                f"--tensor-model-parallel-size {tensor_parallel}: a mixture of experts is trained without tensor "
                "parallelism (Megatron-core wants sequence parallelism with it): use --expert-model-parallel-size, "
                "--pipeline-model-parallel-size and data parallel ranks"
            )
        if self.experts.count % expert_parallel:
            problems.append(
                f"--expert-model-parallel-size {expert_parallel} does not divide the model's "
                f"num_experts {self.experts.count}"
            )
        return problems

    def sizes(self) -> ModelSizes:
        """What shards and engine layouts are computed from."""
        return ModelSizes(
            vocab=self.vocab_size,
            hidden=self.hidden_size,
            ffn=self.ffn_size,
            layers=self.num_layers,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tied=self.tied,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            experts=self.experts.count if self.experts else 0,
            expert_ffn=self.experts.ffn_size if self.experts else 0,
        )

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding in the trainer: the next multiple of the tensor parallel size."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def read_hf_config(checkpoint: str | Path) -> HfModelConfig:
    """Parse `<checkpoint>/config.json`. CheckpointError names the file, the field and what is supported."""
    file = Path(checkpoint) / "config.json"
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError("is not a Hugging Face checkpoint directory: no config.json", file=str(file)) from None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"cannot be read: {e}", file=str(file)) from e
    if not isinstance(raw, dict):
        raise CheckpointError("is not a JSON object", file=str(file))
    return parse_hf_config(raw, str(file))


def parse_hf_config(raw: Mapping[str, Any], file: str = "config.json") -> HfModelConfig:
    """Validate a parsed `config.json`; `file` is for messages."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"architecture {architecture!r} cannot be trained; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
            file=file,
        )
    _refuse_unsupported(raw, file)

    def positive(field: str, default: int | None = None) -> int:
        value = raw.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{field} must be a positive integer, got {value!r}", file=file)
        return value

    hidden, heads = positive("hidden_size"), positive("num_attention_heads")
    kv_heads = positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}", file=file)
    experts = _parse_experts(raw, positive, file) if architecture in MIXTURES else None
    return HfModelConfig(
        architecture=architecture,
        vocab_size=positive("vocab_size"),
        hidden_size=hidden,
        ffn_size=experts.ffn_size if experts else positive("intermediate_size"),
        num_layers=positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=positive("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=positive("max_position_embeddings"),
        rope=_parse_rope(raw, file),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture in _QWEN3,
        experts=experts,
    )


def _parse_experts(raw: Mapping[str, Any], positive: Callable[[str], int], file: str) -> ExpertsConfig:
    """Qwen3's mixture: experts in every layer, softmax routing, none shared."""
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        fields = (
            f"mlp_only_layers {raw.get('mlp_only_layers')!r}, decoder_sparse_step {raw.get('decoder_sparse_step')!r}"
        )
        raise CheckpointError(f"{fields} cannot be trained; supported: experts in every layer", file=file)
    count = positive("num_experts" if "num_experts" in raw else "num_local_experts")
    active = positive("num_experts_per_tok")
    if active > count:
        raise CheckpointError(f"num_experts_per_tok {active} is more than num_experts {count}", file=file)
    normalised = bool(raw.get("norm_topk_prob", False))
    if normalised and active == 1:
        message = "norm_topk_prob with num_experts_per_tok 1 cannot be trained: its router has no gradient"
        raise CheckpointError(message, file=file)
    return ExpertsConfig(count, active, positive("moe_intermediate_size"), normalised)


def _refuse_unsupported(raw: Mapping[str, Any], file: str) -> None:
    wanted = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "quantization_config": None}
    wanted |= {"attention_bias": False, "attention_dropout": 0.0}
    for field, only in wanted.items():
        value = raw.get(field, only)
        if value != only and value is not None:
            raise CheckpointError(f"{field} {value!r} cannot be trained; supported: {only!r}", file=file)
    layers = set(raw.get("layer_types") or ["full_attention"])
    if layers != {"full_attention"}:
        raise CheckpointError(f"layer_types {sorted(layers)} cannot be trained; supported: full_attention", file=file)


def _parse_rope(raw: Mapping[str, Any], file: str) -> RopeConfig:
    """Both forms: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(
            f"rope type {kind!r} cannot be trained; supported: {', '.join(SUPPORTED_ROPE_TYPES)}", file=file
        )
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1.0 cannot be trained", file=file)
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    scaling = {}
    if kind != "default":
        fields = ("factor",) if kind == "linear" else tuple(RopeConfig.__dataclass_fields__)[2:]
        missing = [f for f in fields if rope.get(f) is None]
        if missing:
            raise CheckpointError(f"rope type {kind!r} needs {', '.join(missing)}", file=file)
        scaling = {f: rope[f] for f in fields}
    return RopeConfig(theta=float(theta), kind=kind, **scaling)
