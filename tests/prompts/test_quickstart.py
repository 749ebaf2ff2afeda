"""The quickstart's assets: tokenizer, demonstrations, cache, and (slow) the warm-up itself."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.prompts.quickstart import (
    EOS_ID,
    PAD_ID,
    VOCABULARY,
    Recipe,
    careless_answer,
    demonstrations,
    make_model,
    make_quickstart,
    make_tokenizer,
)
from miles_disagg.prompts.source import DataOptions, DatasetSource, check_tokenizer
from miles_disagg.prompts.tasks import make_task

# As small as it gets, and content with any accuracy: what is tested is everything but the learning.
TINY = Recipe(hidden_size=16, layers=1, heads=2, kv_heads=1, batch=4, held_out=8, least_steps=1, check_every=1)
TINY = replace(TINY, accept=(0.0, 1.0), least_sampled=0.0)


def test_the_tokenizer_loads_through_auto_tokenizer_and_is_one_token_a_character(tmp_path):
    from transformers import AutoTokenizer

    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("12+34=")
    assert ids == [VOCABULARY[c] for c in "12+34="]
    assert tokenizer.decode([*ids, EOS_ID, PAD_ID], skip_special_tokens=True) == "12+34="
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (EOS_ID, PAD_ID, 14)


def test_the_careless_teacher_forgets_carries_and_nothing_else():
    assert careless_answer(47, 85) == "22"
    assert careless_answer(12, 34) == "64"
    for item in make_task("addition", num_train=200).train:
        a, b = map(int, item.input.rstrip("=").split("+"))
        carries = a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9
        assert (careless_answer(a, b) == item.label) != carries


def test_demonstrations_train_on_the_answer_only():
    items = make_task("addition", num_train=16).train
    tokens, labels = demonstrations(items, random.Random(0), careless=0.0)
    assert tokens.shape == labels.shape
    for item, row, label in zip(items, tokens.tolist(), labels.tolist(), strict=True):
        n, m = len(item.input), len(item.label)
        assert row[n : n + m + 1] == label[n : n + m + 1] == [*(VOCABULARY[c] for c in item.label), EOS_ID]
        assert set(label[:n] + label[n + m + 1 :]) <= {-100}


def test_the_assets_are_complete_fit_together_and_are_made_once(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    made = make_quickstart(tmp_path / "model", TINY)
    directory = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    check_tokenizer(tokenizer, AutoConfig.from_pretrained(directory))
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    for name in ("train", "heldout"):
        DatasetSource.from_files([str(directory / f"{name}.jsonl")], tokenizer, DataOptions(max_prompt_tokens=8))
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    again = make_quickstart(directory, TINY)
    assert (again.cached, again.key) == (True, made.key)
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "nothing half-made is left"


def test_the_same_recipe_gives_the_same_bytes_and_another_replaces_it(tmp_path):
    make_quickstart(tmp_path / "a", TINY)
    make_quickstart(tmp_path / "b", TINY)
    first = (tmp_path / "a/model.safetensors").read_bytes()
    assert first == (tmp_path / "b/model.safetensors").read_bytes()
    assert not make_quickstart(tmp_path / "a", replace(TINY, seed=1)).cached
    assert first != (tmp_path / "a/model.safetensors").read_bytes()


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MilesDisaggError, match="was not made by this script"):
        make_quickstart(tmp_path, TINY)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_warm_up_that_does_not_get_there_leaves_nothing_behind(tmp_path):
    with pytest.raises(MilesDisaggError, match="in 2 steps"):
        make_quickstart(tmp_path / "model", replace(TINY, accept=(0.9, 1.0), most_steps=2))
    assert list(tmp_path.iterdir()) == []


def test_the_model_of_the_recipe_has_the_documented_size():
    assert sum(p.numel() for p in make_model(Recipe()).parameters()) == pytest.approx(445_000, rel=0.01)


@pytest.mark.slow
def test_the_script_makes_a_model_that_has_something_to_learn(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "make_quickstart_model.py"
    output = tmp_path / "model"
    done = subprocess.run(
        [sys.executable, str(script), "--output", str(output)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((output / "quickstart.json").read_text())
    assert 0.25 <= result["greedy_accuracy"] <= 0.45
    assert result["sampled_accuracy"] >= 0.33
    shutil.rmtree(output)
