"""Everything that can be known to be wrong before a run starts: its configuration and the files it names.

Files are read by the code that will use them (`weights`, `trainer.hf_config`, `prompts`), so that a rule is written
once. Nothing is started and nothing is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from miles_disagg.cluster import resume
from miles_disagg.cluster.scorers import reference_spec, teacher_spec, vocabulary_problems
from miles_disagg.config.checks import check, within_range
from miles_disagg.config.flags import flag
from miles_disagg.config.imports import import_function
from miles_disagg.config.machine import Machine
from miles_disagg.config.resolve import is_url
from miles_disagg.config.run import RunConfig
from miles_disagg.domain.errors import CheckpointError, ConfigError, MilesDisaggError, PromptDataError
from miles_disagg.prompts.reward import load_reward
from miles_disagg.prompts.source import DataOptions, DatasetSource, check_tokenizer
from miles_disagg.prompts.tasks import make_task
from miles_disagg.prompts.tokenizer import load_tokenizer
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore
from miles_disagg.trainer.hf_config import HfModelConfig, read_hf_config
from miles_disagg.weights.checkpoint import open_checkpoint


def preflight(config: RunConfig, machine: Machine | None) -> list[str]:
    """All problems of a run, each naming its flag and the remedy. `machine` as in `config.checks.check`."""
    problems = check(config, machine)
    config = within_range(config)
    model, found = _model(config)
    problems.extend(found)
    problems.extend(resume.problems(config))
    problems.extend(_reward(config))
    problems.extend(_plugins(config))
    problems.extend(_task(config))
    problems.extend(_store(config))
    if model is not None and not problems:
        problems.extend(_prompts(config, model))
    return problems


def data_options(config: RunConfig, max_positions: int, *, training: bool = True) -> DataOptions:
    """How prompts are read; a prompt leaves room for the longest completion in `max_positions` tokens."""
    data, rollout = config.data, config.rollout
    response = rollout.rollout_max_response_len
    if not training:
        response = config.evaluation.eval_max_response_len or response
    room = min(max_positions - response, rollout.rollout_max_prompt_len or max_positions)
    if training:
        room = min(room, config.trainer.max_tokens_per_gpu - response)
    return DataOptions(
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        apply_chat_template=data.apply_chat_template,
        max_prompt_tokens=room,
        long_prompts=data.long_prompts,
        shuffle=data.rollout_shuffle and training,
        seed=rollout.rollout_seed,
        epochs=data.num_epoch if training else 1,
    )


def _model(config: RunConfig) -> tuple[HfModelConfig | None, list[str]]:
    """The model's sizes, and what is wrong with its checkpoint or with splitting it as asked."""
    if config.model.hf_checkpoint is None:
        return None, []
    path, trainer = config.checkpoint, config.trainer
    if not path.is_dir():
        return None, [f"--hf-checkpoint {path}: no such directory"]
    problems: list[str] = []
    model = None
    try:
        model = read_hf_config(path)
    except CheckpointError as error:
        problems.append(f"--hf-checkpoint {path}: {error}")
    try:
        with open_checkpoint(path) as checkpoint:
            embedding = checkpoint.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            problems.append(f"--hf-checkpoint {path}: there is no tensor model.embed_tokens.weight")
        elif model is not None and embedding.shape != (model.vocab_size, model.hidden_size):
            problems.append(
                f"--hf-checkpoint {path}: model.embed_tokens.weight has shape {list(embedding.shape)}, config.json "
                f"says vocab_size {model.vocab_size}, hidden_size {model.hidden_size}"
            )
    except CheckpointError as error:
        problems.append(f"--hf-checkpoint {path}: {error}")
    if model is not None:
        problems += model.layout_problems(
            trainer.tensor_model_parallel_size,
            trainer.pipeline_model_parallel_size,
            trainer.expert_model_parallel_size,
        )
        if model.experts and model.tied and config.engines.rollout_engine == "sglang":
            problems.append(
                f"--hf-checkpoint {path}: tie_word_embeddings with experts: SGLang's {model.architecture} has an "
                "output head of its own and would leave it empty; add lm_head.weight (a copy of "
                "model.embed_tokens.weight) and set tie_word_embeddings to false in config.json, or use "
                "--rollout-engine embedded"
            )
        longest = config.rollout.rollout_max_response_len
        if longest >= model.max_positions:
            problems.append(
                f"--rollout-max-response-len {longest} leaves no room for a prompt in the model's "
                f"{model.max_positions} positions: lower it"
            )
    return (model if not problems else None), problems


def _reward(config: RunConfig) -> list[str]:
    """What is wrong with a plugged-in reward function; the other reward flags are `config.checks`'."""
    if config.reward.custom_rm_path is None:
        return []
    try:
        load_reward(custom_path=config.reward.custom_rm_path)
    except ConfigError as error:
        return list(error.problems)
    return []


def _plugins(config: RunConfig) -> Iterator[str]:
    """Import paths that lead nowhere."""
    hooks = ("custom_update_weight_post_write_path", "custom_update_weight_pre_read_path")
    functions = ("custom_advantage_function_path", "custom_loss_function_path")
    owners = [*((config.plugins, f) for f in type(config.plugins).model_fields), *((config.weights, f) for f in hooks)]
    owners += [(config.loss, f) for f in functions]
    owners.append((config.evaluation, "eval_function_path"))
    for section, field in owners:
        path = getattr(section, field)
        if path is not None:
            try:
                import_function(path, flag(field))
            except ConfigError as error:
                yield from error.problems


def _task(config: RunConfig) -> list[str]:
    data = config.data
    if not data.task:
        return []
    try:
        make_task(
            data.task,
            seed=config.rollout.rollout_seed,
            num_train=data.task_size,
            num_held_out=config.evaluation.eval_task_size,
        )
    except ConfigError as error:
        return list(error.problems)
    return []


def _store(config: RunConfig) -> list[str]:
    """A publication directory that another run is publishing to. (An S3 prefix answers at the claim.)"""
    root = config.engines.version_store or config.weights.update_weight_disk_dir
    if root is None or is_url(root) or not Path(root).expanduser().is_dir():
        return []
    name = "--version-store" if config.engines.version_store else "--update-weight-disk-dir"
    store = VersionStore(open_store(str(Path(root).expanduser())))
    try:
        newest = store.latest()
        claim = store.claim_of(newest.run_id) if newest is not None else None
    except MilesDisaggError as error:
        return [f"{name} {root}: {error}"]
    if claim is None or not claim.is_live(time.time()) or (config.output.load and claim.run_id == config.output.run_id):
        return []
    return [f"{name} {root} is in use by {claim.describe()}: wait for its end, or give another directory"]


def _prompts(config: RunConfig, model: HfModelConfig) -> Iterator[str]:
    """Tokenizer, then every line of every prompt file: parsed, tokenized, and short enough."""
    try:
        tokenizer = load_tokenizer(config.checkpoint)
        check_tokenizer(tokenizer, {"vocab_size": model.vocab_size, "eos_token_id": None})
    except ConfigError as error:
        yield from error.problems
        return
    asked = [spec for spec in (teacher_spec(config), reference_spec(config, {})) if spec is not None]
    if asked:  # a reference that the run starts is asked then
        yield from asyncio.run(vocabulary_problems(tokenizer, *asked))
    files = [(f"--eval-prompt-data {name}", path, False) for name, path in config.evaluation.datasets.items()]
    if config.data.prompt_data and not config.plugins.data_source_path:
        files.insert(0, ("--prompt-data", config.data.prompt_data, True))
    for name, path, training in files:
        try:
            options = data_options(config, model.max_positions, training=training)
            DatasetSource.from_files([path], tokenizer, options)
        except PromptDataError as error:
            yield f"{name}: {error}"
