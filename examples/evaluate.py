"""Evaluation function: greedy accuracy on held-out sums, by transformers, on the checkpoint of one published version.

`--eval-function-path examples.evaluate.accuracy --eval-interval 20 --task addition`

It runs in a thread of the driver, beside training; a harness that needs its own machine is started and waited for here.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_disagg.prompts.tasks import make_task

ITEMS = 64


def accuracy(checkpoint: Path, version: int) -> float:
    """Share of held-out sums that the policy at `version` answers right. The directory is removed afterwards."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    right = 0
    for item in make_task("addition", num_held_out=ITEMS).held_out:
        ids = tokenizer(item.input, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        right += tokenizer.decode(out, skip_special_tokens=True).strip() == item.label
    return right / ITEMS
