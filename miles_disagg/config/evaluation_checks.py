"""Evaluation: what cannot work together. Everything else is `checks`."""

from collections.abc import Iterator

from miles_disagg.config.run import RunConfig


def evaluation(config: RunConfig) -> Iterator[str]:
    """Problems of held-out prompts, of an evaluation function, and of engines that only evaluate."""
    section = config.evaluation
    if len(section.eval_prompt_data) % 2:
        yield "--eval-prompt-data takes pairs of a name and a file: NAME PATH [NAME PATH ...]"
    if section.eval_prompt_data and section.eval_interval is None:
        yield "--eval-prompt-data has no effect without --eval-interval: give both"
    if section.eval_function_path:
        if section.eval_interval is None:
            yield "--eval-function-path has no effect without --eval-interval: give both"
        if config.weights.transport != "disk":
            yield "--eval-function-path reads versions from the store: use --update-weight-transport disk"
    elif section.eval_interval and not section.eval_prompt_data and not config.data.task:
        yield "--eval-interval needs held-out prompts: give --eval-prompt-data NAME PATH"
    if section.eval_num_replicas or section.eval_num_gpus:
        yield from _own_engines(config)


def _own_engines(config: RunConfig) -> Iterator[str]:
    """--eval-num-replicas, --eval-num-gpus: engines of this job that read their version from the store."""
    section, engines = config.evaluation, config.engines
    given, each = section.eval_num_gpus, engines.rollout_num_gpus_per_engine
    name = f"--eval-num-gpus {given}" if given else f"--eval-num-replicas {section.eval_num_replicas}"
    if section.eval_interval is None:
        yield f"{name} has no effect without --eval-interval: give both"
    if section.eval_function_path:
        yield f"{name} and --eval-function-path both say what evaluates: drop one"
    if engines.topology != "managed":
        other = "--rollout-external" if engines.topology == "attached" else "--rollout-endpoint"
        yield f"{name} starts engines, but this run starts none ({other}): drop one of them"
        return
    if config.weights.transport != "disk":
        yield (
            f"{name}: these engines stay at the version they evaluate and read it from the store, but "
            f"--update-weight-transport {config.weights.transport} sends every version past them once; use "
            "--update-weight-transfer-mode disk-delta (or disk-full)"
        )
    if given % each:
        yield f"--eval-num-gpus {given} is not divisible by --rollout-num-gpus-per-engine {each}"
    elif given and section.eval_num_replicas not in (None, given // each):
        yield (
            f"--eval-num-replicas {section.eval_num_replicas} contradicts --eval-num-gpus {given} / "
            f"--rollout-num-gpus-per-engine {each} = {given // each}: drop it"
        )
    if engines.rollout_num_gpus and not given:
        yield f"{name} with --rollout-num-gpus: say on how many GPUs with --eval-num-gpus, which gives their number too"
