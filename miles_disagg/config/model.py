"""Model, prompts, rewards and evaluation: what is trained, on what, and how it is judged."""

import os
from pathlib import Path
from typing import Literal

from miles_disagg.config.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Section

QUICKSTART = "builtin:quickstart"
"""Value of --hf-checkpoint for the quickstart's tiny model, made on first use."""


def quickstart_directory() -> Path:
    """Where the quickstart's model is kept: outside the checkout, so that a Ray job finds it too."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "miles-disagg" / "quickstart"


class ModelConfig(Section):
    """The model: a Hugging Face checkpoint directory."""

    hf_checkpoint: str | None = None
    """Checkpoint directory (config.json, safetensors, tokenizer), version 0 of the run; or `builtin:quickstart`."""


class DataConfig(Section):
    """Where prompts come from: a JSON Lines file, or a built-in task."""

    prompt_data: str | None = None
    """Prompts: a .jsonl (one object a line) or .parquet file, or a Hugging Face data set's directory of one split."""
    task: str | None = None
    """Task that makes prompts and scores answers by itself: `addition`, or the name of a reasoning-gym data set."""
    task_size: PositiveInt | None = None
    """Number of training prompts that --task makes; unset: all there are, where they are finite (`addition`)."""
    input_key: str = "input"
    """Key of the prompt in each line: a string, or chat messages with --apply-chat-template."""
    label_key: str | None = None
    """Key of the expected answer in each line."""
    metadata_key: str = "metadata"
    """Key of an object that is handed to the reward function unchanged."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    long_prompts: Literal["error", "skip"] = "error"
    """A prompt that leaves no room for the completion in the context: an error, or skipped and counted."""
    num_epoch: PositiveInt | None = None
    """Passes over the prompts before they are exhausted; unset: as many as the run needs."""
    rollout_shuffle: bool = True
    """Shuffle the prompts of every epoch, by --rollout-seed."""


class RewardConfig(Section):
    """How a completion is scored."""

    rm_type: str | None = None
    """Built-in reward: `exact`, `math`, `reasoning-gym` or `remote_rm`; a --task brings its own."""
    custom_rm_path: str | None = None
    """Import path `module.function` of a reward function, instead of --rm-type."""
    rm_url: str | None = None
    """Address of the reward service for --rm-type remote_rm."""
    reward_workers: PositiveInt = 4
    """Rewards computed at once."""


class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    eval_prompt_data: tuple[str, ...] = ()
    """Pairs of a name and a JSON Lines file: NAME PATH [NAME PATH ...]."""
    eval_task_size: PositiveInt = 256
    """Number of held-out prompts that a task makes."""
    eval_interval: PositiveInt | None = None
    """Evaluate every N steps, and before the first and after the last one; unset: never."""
    eval_temperature: NonNegativeFloat = 0.0
    """Temperature while evaluating; 0 is greedy."""
    eval_top_p: Probability = 1.0
    """Top-p while evaluating."""
    eval_max_response_len: PositiveInt | None = None
    """Longest evaluated completion in tokens; unset: --rollout-max-response-len."""
    eval_overflow: Literal["skip", "wait"] = "skip"
    """An evaluation that is due while the last one still runs: skipped with its reason, or training waits."""
    eval_num_replicas: PositiveInt | None = None
    """Engines for evaluation alone, at exactly the version that is evaluated; unset: the rollout engines do it too."""
    eval_num_gpus: NonNegativeInt = 0
    """GPUs for engines of evaluation alone, --rollout-num-gpus-per-engine each."""
    eval_function_path: str | None = None
    """Function of an exported checkpoint and its version, instead of asking the engines; needs versions on disk."""
    skip_eval_before_train: bool = False
    """Do not evaluate the base model first."""

    @property
    def datasets(self) -> dict[str, str]:
        """Evaluation files by name."""
        return dict(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=False))
