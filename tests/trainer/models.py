"""Tiny Hugging Face checkpoints and batches, and the same training in transformers and plain torch, to compare with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from miles_disagg.trainer.base import LossSpec, OptimizerSpec, TrainSample

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def make_checkpoint(directory: Path, kind: str, **changes: Any) -> Path:
    """A random fp32 model of `kind` (qwen3, qwen3_moe, qwen2, llama) with norms and biases that matter, in shards."""
    import transformers as hf

    config_cls, model_cls = {
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "qwen3_moe": (hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
    }[kind]
    dtype = changes.pop("dtype", torch.float32)
    extra: dict[str, Any] = {"head_dim": 16} if kind.startswith("qwen3") else {}
    if kind == "qwen3_moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = config_cls(**(SIZES | extra | {"vocab_size": 61, "rope_parameters": rope} | changes))
    torch.manual_seed(len(kind) + config.vocab_size)
    model = model_cls(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.1)
            else:
                p.mul_(3.0)
    model.to(dtype).save_pretrained(directory, max_shard_size="40KB")
    return directory


def make_batch(
    count: int, vocab: int, seed: int = 0, longest: int = 24, versions: bool = False, behaviour: float = -3.0
) -> list[TrainSample]:
    """Samples of uneven lengths with masks, per-token or scalar advantages and behaviour logprobs near `behaviour`."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        prompt, response = rng.randint(1, 6), rng.randint(1, longest - 6)
        scalar = rng.uniform(-2, 2)
        out.append(
            TrainSample(
                tokens=[rng.randrange(vocab) for _ in range(prompt + response)],
                prompt_len=prompt,
                behaviour_logprobs=[behaviour + rng.uniform(-1, 1) for _ in range(response)],
                advantage=scalar if i % 2 else [scalar * (1 + t % 2) for t in range(response)],
                loss_mask=None if i % 3 else [int(t % 4 != 1) for t in range(response)],
                token_versions=[t // 5 for t in range(response)] if versions else None,
            )
        )
    return out


def checkpoint_names(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transformers model's tensors as its checkpoint has them: experts, stacked in the model, one by one."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        at, _, kind = name.rpartition(".")
        if not at.endswith("mlp.experts"):
            out[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            if kind == "down_proj":
                out[f"{at}.{e}.down_proj.weight"] = expert
            else:
                half = expert.shape[0] // 2
                out |= {f"{at}.{e}.gate_proj.weight": expert[:half], f"{at}.{e}.up_proj.weight": expert[half:]}
    return out


class Reference:
    """transformers + torch AdamW, one sample at a time: slow, and as plain as the formulas."""

    def __init__(self, directory: Path, optimizer: OptimizerSpec):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.spec = optimizer
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
        )

    def logits(self, sample: TrainSample) -> torch.Tensor:
        return self.model(torch.tensor([list(sample.tokens)])).logits[0]

    def score(self, sample: TrainSample, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropy) of the response tokens."""
        logp = torch.log_softmax(self.logits(sample)[sample.prompt_len - 1 : -1] / temperature, -1)
        targets = torch.tensor(list(sample.tokens[sample.prompt_len :]))
        return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def sft_loss(self, batch: Sequence[TrainSample], temperature: float = 1.0) -> torch.Tensor:
        total = sum((self.score(s, temperature)[0] * mask_of(s)).sum() for s in batch)
        return -torch.as_tensor(total) / sum(s.trained_tokens for s in batch)

    def step(self, loss: torch.Tensor) -> float:
        """One optimizer step; the gradient norm before clipping."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip_grad or 1e9)
        self.optimizer.step()
        return float(norm)

    def policy_metrics(
        self, batch: Sequence[TrainSample], proximal: list[torch.Tensor], base: list[torch.Tensor], spec: LossSpec
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Token-mean GRPO loss and its diagnostics, written out again from the formulas."""
        sums = dict.fromkeys(("loss", "entropy", "kl", "clip_fraction", "tis_mean", "rollout_logprob_abs_diff"), 0.0)
        count, total = sum(s.trained_tokens for s in batch), torch.zeros(())
        for s, prox, ref in zip(batch, proximal, base, strict=True):
            lp, entropy = self.score(s, spec.temperature)
            behaviour, mask = torch.tensor(list(s.behaviour_logprobs)), mask_of(s)
            adv = torch.as_tensor(s.advantage, dtype=torch.float32) * torch.ones_like(lp)
            ratio = (lp - prox).exp()
            clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
            tis = (prox - behaviour).exp().clamp(max=spec.tis_cap)
            kl = (ref - lp).exp() - 1 - (ref - lp)
            per_token = -tis * torch.minimum(ratio * adv, clipped * adv)
            per_token = per_token - spec.entropy_coef * entropy + spec.kl_coef * kl
            total = total + (per_token * mask).sum() / count
            values = (per_token, entropy, kl, (ratio * adv > clipped * adv).float(), tis, (lp - behaviour).abs())
            for key, value in zip(sums, values, strict=True):
                sums[key] += float((value.detach() * mask).sum() / count)
        return total, sums


def mask_of(sample: TrainSample) -> torch.Tensor:
    return torch.tensor(sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_len).float()


class ValueReference:
    """A critic in transformers and plain torch: the backbone, a linear value head that begins at 0, AdamW."""

    def __init__(self, directory: Path, optimizer: OptimizerSpec):
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        self.backbone = whole.model
        self.head = torch.nn.Linear(whole.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.parameters = [*self.backbone.parameters(), *self.head.parameters()]
        self.spec = optimizer
        decay, plain = [p for p in self.parameters if p.ndim > 1], [p for p in self.parameters if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=optimizer.lr,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
        )

    def values(self, sample: TrainSample) -> torch.Tensor:
        """Value of the state before each response token."""
        hidden = self.backbone(torch.tensor([list(sample.tokens)])).last_hidden_state[0]
        return self.head(hidden)[sample.prompt_len - 1 : -1, 0]

    def step(
        self,
        batch: Sequence[TrainSample],
        old: Sequence[torch.Tensor],
        returns: Sequence[torch.Tensor],
        clip: float,
    ) -> tuple[float, float]:
        """One optimizer step on the token mean of the clipped loss: (loss, gradient norm before clipping)."""
        total, count = torch.zeros(()), sum(s.trained_tokens for s in batch)
        for sample, before, target in zip(batch, old, returns, strict=True):
            values = self.values(sample)
            near = before + (values - before).clamp(-clip, clip)
            error = torch.maximum((values - target) ** 2, (near - target) ** 2)
            total = total + 0.5 * (error * mask_of(sample)).sum() / count
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.spec.clip_grad or 1e9)
        self.optimizer.step()
        return float(total), float(norm)
