"""The quickstart's model and data: a tiny Qwen3 with a character tokenizer, warmed up by a careless teacher.

The teacher adds two numbers, but forgets every carry in most of its demonstrations. So the model comes out of the
warm-up able to add with carries and used to not doing it: greedy answers are right for a third of the held-out sums,
and the reward has something to reinforce from the first step. Torch and transformers are imported where they are used.
The reinforcement learning itself is the rest of this package.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.prompts.tasks import Split, TaskItem, make_task, write_jsonl

if TYPE_CHECKING:
    import torch

CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = len(CHARACTERS), len(CHARACTERS) + 1
VOCABULARY = {**{c: i for i, c in enumerate(CHARACTERS)}, PAD: PAD_ID, EOS: EOS_ID}
_MARKER = "quickstart.json"


@dataclass(frozen=True)
class Recipe:
    """Everything the result depends on. `careless`: share of demonstrations that forget the carries. `experts`: of
    every layer, two of them active, each half as wide as the MLP that they replace; 0: that MLP.

    The warm-up stops at the first check, every `check_every` steps from `least_steps` on, at which greedy held-out
    accuracy is within `accept` and sampled accuracy is at least `least_sampled`.
    """

    format: int = 3
    seed: int = 0
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    batch: int = 64
    learning_rate: float = 3e-3
    careless: float = 0.6
    least_steps: int = 350
    most_steps: int = 700
    decay_steps: int = 500
    check_every: int = 25
    accept: tuple[float, float] = (0.25, 0.45)
    least_sampled: float = 0.33
    held_out: int = 256
    experts: int = 0

    @property
    def key(self) -> str:
        """Cache key: a digest of every field; `experts` counts where there are some, and then nothing is tied."""
        fields = asdict(self)
        fields |= {"tied": False} if fields["experts"] else {}
        fields = {name: value for name, value in fields.items() if name != "experts" or value}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Quickstart:
    """Where the assets are and how good the model is: greedy and sampled held-out accuracy in [0, 1]."""

    path: str
    key: str
    steps: int
    greedy_accuracy: float
    sampled_accuracy: float
    parameters: int
    cached: bool = False


def make_quickstart(output: Path, recipe: Recipe | None = None) -> Quickstart:
    """Make (or find) the quickstart's checkpoint directory `output`: model, tokenizer, train.jsonl, heldout.jsonl.

    A second call with the same recipe returns at once. The directory appears complete or not at all. A directory that
    holds anything else is refused.
    """
    recipe = recipe or Recipe()
    output = output.resolve()
    if (found := _cached(output)) is not None and found.key == recipe.key:
        return found
    if output.exists() and found is None and any(output.iterdir()):
        raise MilesDisaggError(f"{output} exists and was not made by this script: give another --output, or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        result = _build(work, output, recipe)
        (work / _MARKER).write_text(json.dumps(asdict(result), indent=2) + "\n")
        work.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        os.rename(work, output)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return result


def _cached(output: Path) -> Quickstart | None:
    try:
        found = Quickstart(**{**json.loads((output / _MARKER).read_text()), "cached": True, "path": str(output)})
    except (OSError, ValueError, TypeError):
        return None
    files = ("config.json", "model.safetensors", "tokenizer.json", "train.jsonl", "heldout.jsonl")
    return found if all((output / f).is_file() for f in files) else None


def _build(work: Path, output: Path, recipe: Recipe) -> Quickstart:
    import torch

    split = make_task("addition", seed=recipe.seed, num_held_out=recipe.held_out)
    with _one_thread(torch):
        model = make_model(recipe)
        steps, greedy, sampled = warm_up(model, split, recipe)
        model.to(torch.bfloat16).save_pretrained(work)
    make_tokenizer().save_pretrained(work)
    write_jsonl(work / "train.jsonl", split.train)
    write_jsonl(work / "heldout.jsonl", split.held_out)
    parameters = sum(p.numel() for p in model.parameters())
    return Quickstart(str(output), recipe.key, steps, greedy, sampled, parameters)


@contextmanager
def _one_thread(torch: Any) -> Iterator[None]:
    """The order of additions, and with it the result, must not depend on the number of cores; nor is it slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_tokenizer() -> Any:
    """One token a character. Loads through AutoTokenizer.

    A character outside the vocabulary reads as padding: SGLang warms up with an English sentence and must survive it.
    In prompt data it is an error (`source`).
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def make_model(recipe: Recipe) -> Any:
    """A randomly initialised Qwen3 (445 k parameters without experts, then tied), the same for the same seed."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    kinds: Any = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if recipe.experts else (Qwen3Config, Qwen3ForCausalLM)
    config_class, model_class = kinds
    experts: dict[str, Any] = {}
    if recipe.experts:
        experts = {"num_experts": recipe.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        experts["moe_intermediate_size"] = recipe.hidden_size
    config = config_class(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=64,
        tie_word_embeddings=not recipe.experts,  # SGLang gives a mixture an output head of its own, always
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        **experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = model_class(config)
        if recipe.experts:  # it starts as a tied model does: from a random head it learns too slowly
            model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


def careless_answer(a: int, b: int) -> str:
    """The digits of `a + b` without any carry, lowest first: 47 + 85 -> `2` `2` instead of `2` `3` `1`."""
    return f"{(a + b) % 10}{(a // 10 + b // 10) % 10}"


def warm_up(model: Any, split: Split, recipe: Recipe) -> tuple[int, float, float]:
    """Supervised steps on the teacher's demonstrations; returns steps, greedy and sampled held-out accuracy."""
    import torch
    from torch.nn.functional import cross_entropy

    teacher = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    accuracy = (0.0, 0.0)
    for step in range(1, recipe.most_steps + 1):
        decay = 1 - 0.9 * min(1.0, step / recipe.decay_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / 20) * decay
        tokens, labels = demonstrations(teacher.sample(split.train, recipe.batch), teacher, recipe.careless)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= recipe.least_steps and step % recipe.check_every == 0:
            accuracy = measure(model, split.held_out, recipe.seed)
            if recipe.accept[0] <= accuracy[0] <= recipe.accept[1] and accuracy[1] >= recipe.least_sampled:
                return step, *accuracy
    raise MilesDisaggError(
        f"the warm-up did not come to greedy accuracy within {recipe.accept} and sampled accuracy of at least "
        f"{recipe.least_sampled} in {recipe.most_steps} steps (last: {accuracy[0]:.2f}, {accuracy[1]:.2f}); "
        "give another --seed"
    )


def demonstrations(
    items: Sequence[TaskItem], teacher: random.Random, careless: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [batch, longest] int64, right-padded, and labels of the same shape: -100 outside the answer."""
    import torch

    rows, labels = [], []
    for item in items:
        a, b = (int(x) for x in item.input.rstrip("=").split("+"))
        answer = careless_answer(a, b) if teacher.random() < careless else item.label
        prompt, written = [VOCABULARY[c] for c in item.input], [*(VOCABULARY[c] for c in answer), EOS_ID]
        rows.append(prompt + written)
        labels.append([-100] * len(prompt) + written)
    longest = max(map(len, rows))
    padded = torch.tensor([r + [PAD_ID] * (longest - len(r)) for r in rows])
    return padded, torch.tensor([r + [-100] * (longest - len(r)) for r in labels])


def measure(model: Any, items: Sequence[TaskItem], seed: int) -> tuple[float, float]:
    """Greedy and sampled (temperature 1) accuracy of the model as it will be saved: rounded to bf16."""
    import torch

    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        model.eval()
        scores = tuple(
            sum(text == item.label for text, item in zip(_answers(model, items, g), items, strict=True)) / len(items)
            for g in (None, generator)
        )
        for name, parameter in model.named_parameters():
            parameter.copy_(exact[name])
        model.train()
    return scores[0], scores[1]


def _answers(model: Any, items: Sequence[TaskItem], generator: torch.Generator | None) -> list[str]:
    """Completions of equally long prompts, greedy without a generator. An answer has at most three digits."""
    import torch

    tokens = torch.tensor([[VOCABULARY[c] for c in item.input] for item in items])
    length = tokens.shape[1]
    for _ in range(4):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
        if generator is None:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], dim=1)
    letters = [*CHARACTERS, PAD, EOS]
    return ["".join(letters[t] for t in row).partition(EOS)[0] for row in tokens[:, length:].tolist()]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of `scripts/make_quickstart_model.py`."""
    import argparse

    parser = argparse.ArgumentParser(description="Make the quickstart's tiny model and its data (cached).")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the split and the demonstrations")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    result = make_quickstart(args.output, Recipe(seed=args.seed))
    print(
        f"{result.path}: {result.parameters:,} parameters, greedy held-out accuracy {result.greedy_accuracy:.2f} "
        f"(sampled {result.sampled_accuracy:.2f}) after {result.steps} supervised steps, "
        + ("found there" if result.cached else f"made in {time.monotonic() - begin:.0f} s")
    )
