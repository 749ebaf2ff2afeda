"""The model of the embedded engine: loaded from a Hugging Face directory, run over rows of the KV cache.

Forward passes only. Which request sits in which row, and what is sampled, is `scheduler`; replacing weights while
serving is `weights`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from miles_disagg.domain.errors import CheckpointError, EngineStartError, UpdateFailed
from miles_disagg.engine.embedded import kv
from miles_disagg.engine.embedded.weights import ServedWeights, read_checkpoint
from miles_disagg.engine.tensors import parse_dtype

_CPU_CACHE_BYTES = 1 << 30
_CUDA_CACHE_FRACTION = 0.3


class ModelRunner:
    """A causal language model with its cache. Not thread-safe: owned by the scheduler's thread.

    Raises CheckpointError for a missing, truncated or incomplete checkpoint, EngineStartError for an architecture
    that cannot be served.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        max_running_requests: int = 64,
        context_length: int | None = None,
        max_total_tokens: int | None = None,
        max_prefill_tokens: int = 8192,
    ):
        self.path = Path(path)
        self.device = torch.device(device)
        self.max_prefill_tokens = max_prefill_tokens
        self.config = _read_config(self.path)
        staged = read_checkpoint(self.path)
        self.dtype = _pick_dtype(dtype, staged)
        self.model = _build(self.config, self.dtype, self.device)
        self.weights = ServedWeights(self.model)
        try:
            self.weights.apply(self.weights.check(staged, complete=True))
        except UpdateFailed as e:
            raise CheckpointError(f"checkpoint does not fit its config.json: {e}", file=str(self.path)) from None
        self.decoder = self.model.get_decoder()
        self.head = self.model.get_output_embeddings()
        text = self.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        trained = int(getattr(text, "max_position_embeddings", 4096))
        if context_length is not None and context_length > trained:
            raise EngineStartError(f"--context-length {context_length} exceeds the model's {trained} positions")
        kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        per_token = 2 * text.num_hidden_layers * kv_heads * head_dim * self.dtype.itemsize
        budget = max_total_tokens or _cache_bytes(self.device) // per_token
        self.context_length = min(context_length or trained, budget)
        self.cache = kv.KVCache(
            text.num_hidden_layers,
            max_running_requests,
            kv_heads,
            head_dim,
            budget,
            dtype=self.dtype,
            device=self.device,
        )
        self._probe()

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Run one token in each of rows [0, n); logits [n, vocab]. `positions`: where each token stands in its row."""
        longest = max(positions)
        self.cache.reserve(longest + 1)
        place = torch.tensor(positions, device=self.device)
        step = kv.Decode.at(self.cache, place, longest, self.dtype)
        hidden = self._forward(torch.tensor(tokens, device=self.device)[:, None], place[:, None], step)
        return self.head(hidden[:, 0])

    @torch.inference_mode()
    def prefill(
        self, first: int, prompts: Sequence[Sequence[int]], want: Sequence[int | None]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Fill rows [first, first + n) with `prompts`, in chunks of at most about `max_prefill_tokens` tokens.

        want[i]: from which position on all logprobs of prompt i's own tokens are wanted, or None. Returns (logits of
        each prompt's last token [n, vocab], for each prompt the logprobs [len - 1 - want] of tokens want+1 ..., fp32).
        """
        n, longest = len(prompts), max(map(len, prompts))
        self.cache.reserve(longest)
        padded = torch.zeros((n, longest), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = torch.tensor(prompt)
        padded = padded.to(self.device)
        last: list[Any] = [None] * n
        scored: list[list[torch.Tensor]] = [[] for _ in prompts]
        chunk = max(1, self.max_prefill_tokens // n)
        for start in range(0, longest, chunk):
            end = min(start + chunk, longest)
            place = torch.arange(start, end, device=self.device)[None].expand(n, -1)
            hidden = self._forward(padded[:, start:end], place, kv.Prefill(self.cache, first, start))
            for i, prompt in enumerate(prompts):
                if start < len(prompt) <= end:
                    last[i] = hidden[i, len(prompt) - 1 - start]
                begin = want[i]
                if begin is not None:
                    a, b = max(begin, start), min(end, len(prompt) - 1)
                    if a < b:
                        scored[i].append(self._score(hidden[i, a - start : b - start], padded[i, a + 1 : b + 1]))
        logprobs = [
            None if w is None else torch.cat(s) if s else torch.empty(0) for w, s in zip(want, scored, strict=True)
        ]
        return self.head(torch.stack(last)), logprobs

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden).float()
        return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0].cpu()

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        return self.decoder(input_ids=tokens, position_ids=positions, use_cache=False, kv_step=step).last_hidden_state

    def _probe(self) -> None:
        """Refuse a model whose decoder does not go through our attention, or scales its logits after the head."""
        ids = [[1 % self.vocab_size, 2 % self.vocab_size, 3 % self.vocab_size]]
        try:
            with torch.inference_mode():
                logits, _ = self.prefill(0, ids, [None])
                step = kv.Prefill(self.cache, 0, 0)
                place = torch.arange(3, device=self.device)[None]
                whole = self.model(
                    input_ids=torch.tensor(ids, device=self.device), position_ids=place, use_cache=False, kv_step=step
                ).logits[:, -1]
        except Exception as e:
            raise EngineStartError(f"{self._name} cannot be run by the embedded engine: {e!r}") from e
        written = bool(self.cache.keys[:, 0, :, :3].abs().sum(dim=(1, 2, 3)).min() > 0)
        if not written or not torch.allclose(logits.float(), whole.float(), rtol=1e-3, atol=1e-3):
            raise EngineStartError(
                f"{self._name} computes its attention or its logits in a way the embedded engine does not know; "
                "serve it with SGLang (--rollout-engine sglang)"
            )

    @property
    def _name(self) -> str:
        return "/".join(self.config.architectures or [self.config.model_type])


def _read_config(path: Path) -> Any:
    if not path.is_dir():
        raise CheckpointError(f"--model-path {path} is not a directory")
    try:
        json.loads((path / "config.json").read_text())
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no config.json: give a Hugging Face checkpoint directory") from None
    except Exception as e:
        raise CheckpointError(f"cannot be read: {e}", file=str(path / "config.json")) from None
    text = config.get_text_config()
    if "sliding_attention" in (getattr(text, "layer_types", None) or []):
        raise EngineStartError("sliding-window attention is not served by the embedded engine; use SGLang")
    if getattr(config, "quantization_config", None):
        raise EngineStartError("quantized checkpoints are not served by the embedded engine; use SGLang")
    return config


def _build(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    kv.register()
    try:
        with no_init_weights(), torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kv.IMPLEMENTATION)
    except (ValueError, KeyError, ImportError) as e:
        raise EngineStartError(f"architecture {config.architectures} cannot be built: {e}") from None
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _pick_dtype(name: str, staged: dict[str, torch.Tensor]) -> torch.dtype:
    """`auto`: the dtype that most of the checkpoint's bytes have."""
    if name != "auto":
        return parse_dtype(name)
    sizes: dict[torch.dtype, int] = {}
    for tensor in staged.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        raise CheckpointError("no floating-point tensors in the checkpoint")
    return max(sizes, key=lambda d: sizes[d])


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_CACHE_FRACTION)
    return _CPU_CACHE_BYTES
