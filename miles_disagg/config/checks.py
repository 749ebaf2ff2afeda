"""What cannot work, found before anything starts: ranges, combinations, and what this machine lacks.

Every problem is reported at once, naming its flags and the remedy. What the files hold (checkpoint, tokenizer,
prompts) is looked at by `cluster.preflight`, through the readers that use them.
"""

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_disagg.config.attached_checks import attached
from miles_disagg.config.base import bounds_of
from miles_disagg.config.evaluation_checks import evaluation
from miles_disagg.config.flags import CONFIG_FILE, SGLANG_PREFIX, closest, flag, load_files, section_of
from miles_disagg.config.loss_checks import loss
from miles_disagg.config.machine import Machine, port_problem
from miles_disagg.config.placement import GroupPlan, plan_placement, policy_engines
from miles_disagg.config.resolve import is_url, joins_cluster, resolve
from miles_disagg.config.run import RunConfig
from miles_disagg.config.secrets import token_problems
from miles_disagg.config.server_groups import OWNED_SERVER_ARGS
from miles_disagg.config.weight_checks import weights
from miles_disagg.domain.errors import ConfigError, InvalidVersionRef
from miles_disagg.domain.versions import check_run_id

REWARDS = ("exact", "math", "reasoning-gym", "remote_rm")


def check(config: RunConfig, machine: Machine | None = None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """All problems of a configuration, resolved or not; empty if there are none.

    machine: what the run may use, where that is known here; None when it joins a Ray cluster (Ray decides at start).
    """
    problems = list(_out_of_range(config).values())
    config = within_range(config)
    if found := list(_server_groups(config)):
        problems.extend(found)
        config = config.replace(sglang_config=None)
    for rule in (_required, _data, evaluation, _topology, _sglang, weights, _pacing, _trainer, loss, _outputs):
        problems.extend(rule(config))
    problems.extend(_addresses(config))
    if not joins_cluster(config, environ):
        problems.extend(_installed(config))
        if machine is not None:
            problems.extend(_resources(config, machine))
    return problems


def within_range(config: RunConfig) -> RunConfig:
    """The configuration with illegal numbers put back to their defaults, so that the other rules can still speak."""
    wrong = _out_of_range(config)
    return config.replace(**{name: _default(name) for name in wrong}) if wrong else config


def _out_of_range(config: RunConfig) -> dict[str, str]:
    """A problem for every field whose number is out of its bounds."""
    problems: dict[str, str] = {}
    for field, section in section_of().items():
        values = getattr(config, section)
        info = type(values).model_fields[field]
        bounds, value = bounds_of(info.annotation, info.metadata), getattr(values, field)
        if bounds is not None and value is not None and not bounds.allows(value):
            problems[field] = f"{flag(field)} is {value:g}: it must be {bounds}"
    return problems


def _default(field: str) -> Any:
    return getattr(getattr(RunConfig(), section_of()[field]), field)


def _required(config: RunConfig) -> Iterator[str]:
    if config.model.hf_checkpoint is None:
        yield "--hf-checkpoint is missing: give the checkpoint directory of the model to train"
    if config.rollout.num_rollout is None:
        yield "--num-rollout is missing: give the number of training steps"


def _data(config: RunConfig) -> Iterator[str]:
    data, reward = config.data, config.reward
    if data.prompt_data and data.task:
        yield "--prompt-data and --task both say where prompts come from: drop one"
    source = config.plugins.data_source_path
    if source and data.task:
        yield "--data-source-path and --task both say where prompts come from: drop one"
    if not data.prompt_data and not data.task and not source:
        yield "--prompt-data is missing: give a .jsonl or .parquet file, a data set directory, or a --task"
    if data.task and data.task != "addition" and data.task_size is None:
        yield f"--task-size is missing: say how many training prompts --task {data.task} makes"
    if data.task and (reward.rm_type or reward.custom_rm_path):
        yield f"--task {data.task} scores its own answers: drop --rm-type and --custom-rm-path"
    if reward.rm_type and reward.custom_rm_path:
        yield "--rm-type and --custom-rm-path both say how to score: drop one"
    if not reward.rm_type and not reward.custom_rm_path and not data.task:
        yield f"--rm-type is missing: give one of {', '.join(REWARDS)}, or --custom-rm-path module.function"
    if reward.rm_type and reward.rm_type not in REWARDS:
        yield f"--rm-type {reward.rm_type} is unknown{closest(reward.rm_type, REWARDS)}; there are {', '.join(REWARDS)}"
    if (reward.rm_type == "remote_rm") != bool(reward.rm_url):
        yield "--rm-type remote_rm and --rm-url go together: give both or neither"
    if reward.rm_type in ("exact", "math") and data.prompt_data and not source and not data.label_key:
        yield f"--rm-type {reward.rm_type} compares with an answer: name its key with --label-key"
    if config.rollout.n_samples_per_prompt < 2 and config.loss.compares_samples:
        yield (
            f"--n-samples-per-prompt 1 with --advantage-estimator {config.loss.advantage_estimator}: "
            "a group of one has no advantage; give at least 2"
        )


def _topology(config: RunConfig) -> Iterator[str]:
    engines = config.engines
    yield from attached(config)
    if bool(engines.rollout_endpoint) != bool(engines.version_store):
        yield "--rollout-endpoint and --version-store go together: the service follows that store; give both"
    if engines.rollout_auth_token_file:
        if engines.topology == "managed":
            yield (
                "--rollout-auth-token-file has no effect without --rollout-endpoint or --rollout-external: engines of "
                "this job take no token"
            )
        yield from token_problems("--rollout-auth-token-file", engines.rollout_auth_token_file)
    if engines.rollout_endpoint and engines.rollout_external:
        yield "--rollout-endpoint and --rollout-external are different topologies: drop one"
    if engines.rollout_endpoint and not engines.rollout_endpoint.startswith(("http://", "https://")):
        yield f"--rollout-endpoint {engines.rollout_endpoint} is not an http:// or https:// URL"
    if engines.topology != "managed":
        for field in ("rollout_num_gpus", "num_rollout_engines", "sglang_args", "sglang_python"):
            if getattr(engines, field):
                name = "--sglang-*" if field == "sglang_args" else flag(field)
                yield f"{name} starts engines, but this run starts none ({engines.topology} topology): drop it"
        return
    total, each = engines.rollout_num_gpus, engines.rollout_num_gpus_per_engine
    if total % each:
        yield f"--rollout-num-gpus {total} is not divisible by --rollout-num-gpus-per-engine {each}"
    if not total and each > 1 and config.trainer.trainer_device == "cuda":
        yield (
            f"--rollout-num-gpus-per-engine {each} without --rollout-num-gpus runs the engines' ranks on the CPU, and "
            "the trainer is on GPUs: add --rollout-num-gpus"
        )
    if total and engines.num_rollout_engines not in (None, max(1, total // each)):
        yield (
            f"--num-rollout-engines {engines.num_rollout_engines} contradicts --rollout-num-gpus {total} / "
            f"--rollout-num-gpus-per-engine {each} = {total // each}: drop it"
        )
    if total and each > config.cluster.num_gpus_per_node and each % config.cluster.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {each} spans nodes and must be a multiple of --num-gpus-per-node "
            f"{config.cluster.num_gpus_per_node}"
        )
    yield from _sharing(config)
    if engines.rollout_engine == "embedded" and each > 1:
        yield "--rollout-engine embedded runs on one device: use --rollout-engine sglang for several GPUs per engine"


def _server_groups(config: RunConfig) -> Iterator[str]:
    """--sglang-config: readable, and not contradicted by the flags that it replaces."""
    engines = config.engines
    path = engines.sglang_config
    if path is None:
        return
    if engines.topology != "managed":
        other = "--rollout-external" if engines.topology == "attached" else "--rollout-endpoint"
        yield f"--sglang-config starts engines, but this run starts none ({other}): drop one of them"
        return
    if engines.rollout_num_gpus:
        yield "--rollout-num-gpus and --sglang-config both say which engines there are: drop --rollout-num-gpus"
    try:
        units = policy_engines(config)
    except ConfigError as error:
        yield from error.problems
        return
    if engines.num_rollout_engines not in (None, len(units)):
        yield (
            f"--num-rollout-engines {engines.num_rollout_engines} contradicts --sglang-config, which has {len(units)} "
            "engine(s) of the policy: drop it"
        )
    if engines.rollout_engine == "embedded" and any(group.unit and group.unit.ranks > 1 for group in _planned(config)):
        yield "--rollout-engine embedded runs on one device: use --rollout-engine sglang for several GPUs per engine"
    if any(group.unit and group.unit.gpus > config.cluster.num_gpus_per_node for group in _planned(config)):
        yield (
            "--sglang-config: num_gpus_per_engine is above --num-gpus-per-node "
            f"{config.cluster.num_gpus_per_node}: engines of a file live on one node"
        )


def _planned(config: RunConfig) -> tuple[GroupPlan, ...]:
    return plan_placement(config).groups[1:]


def _sharing(config: RunConfig) -> Iterator[str]:
    """A GPU that trainer and engine share: one process of each, and weights that do not go over NCCL."""
    engines, trainer = config.engines, config.trainer
    if trainer.actor_gpu_fraction < 1 and trainer.actor_num_gpus_per_node > 1:
        yield (
            f"--actor-gpu-fraction {trainer.actor_gpu_fraction:g} shares one GPU, but --actor-num-gpus-per-node is "
            f"{trainer.actor_num_gpus_per_node}: make it 1"
        )
    if engines.rollout_gpu_fraction < 1 and engines.rollout_num_gpus_per_engine > 1:
        yield (
            f"--rollout-gpu-fraction {engines.rollout_gpu_fraction:g} shares one GPU, but "
            f"--rollout-num-gpus-per-engine is {engines.rollout_num_gpus_per_engine}: make it 1"
        )
    elif engines.rollout_gpu_fraction < 1 and not any(group.unit and group.unit.gpus for group in _planned(config)):
        yield (
            f"--rollout-gpu-fraction {engines.rollout_gpu_fraction:g} is a share of a GPU, but this run starts no "
            "engine on one: add --rollout-num-gpus 1"
        )
    if trainer.actor_gpu_fraction < 1 and trainer.trainer_device == "cpu":
        yield f"--actor-gpu-fraction {trainer.actor_gpu_fraction:g} is a share of a GPU, but --trainer-device is cpu"
    if trainer.actor_gpu_fraction < 1 and engines.rollout_num_gpus and config.weights.transport == "broadcast":
        yield (
            f"--actor-gpu-fraction {trainer.actor_gpu_fraction:g} with --update-weight-transport broadcast: NCCL "
            "refuses two processes on one GPU; add --update-weight-transfer-mode disk-delta (or disk-full)"
        )


def _sglang(config: RunConfig) -> Iterator[str]:
    engines = config.engines
    ours = [field.removeprefix(SGLANG_PREFIX) for field in section_of() if field.startswith(SGLANG_PREFIX)]
    if engines.topology == "managed" and engines.rollout_engine == "embedded":
        for name in engines.sglang_args:
            yield (
                f"--sglang-{name} has no effect with --rollout-engine embedded: add --rollout-engine sglang, or drop it"
            )
        if engines.sglang_python:
            yield "--sglang-python has no effect without --rollout-engine sglang: give both"
    if engines.rollout_decode_interval and (engines.topology != "managed" or engines.rollout_engine != "embedded"):
        yield "--rollout-decode-interval slows managed embedded engines only: drop it"
    for name in engines.sglang_args:
        if name in OWNED_SERVER_ARGS:
            yield f"--sglang-{name} is set by this program: use {OWNED_SERVER_ARGS[name]}"
        near = closest(name, [other.replace("_", "-") for other in ours if other != "args"])
        if near:
            yield f"--sglang-{name} would go to the server{near.replace('meant ', 'meant --sglang-')}"


def _pacing(config: RunConfig) -> Iterator[str]:
    pacing, n = config.pacing, config.rollout.n_samples_per_prompt
    abort = config.engines.pause_generation_mode == "abort"
    if pacing.schedule == "async" and abort and not pacing.partial_rollout:
        yield (
            "--pause-generation-mode abort cannot be used with --schedule async: generation is always in flight and "
            "every update would throw it away; use in_place or retract, --partial-rollout, or --schedule sync"
        )
    yield from _partial_rollouts(config)
    in_flight = pacing.async_max_concurrent_samples
    if in_flight is not None and in_flight < n and pacing.rollout_submission_granularity == "group":
        yield (
            f"--async-max-concurrent-samples {in_flight} is below --n-samples-per-prompt {n}: "
            "not even one group could be generated; raise it"
        )
    lag = pacing.max_weight_staleness
    if lag is not None and pacing.update_weights_interval > 1 and lag == 0:
        yield (
            f"--max-weight-staleness 0 with --update-weights-interval {pacing.update_weights_interval}: "
            "samples between two publications would never be fresh enough; set the interval to 1"
        )


def _partial_rollouts(config: RunConfig) -> Iterator[str]:
    pacing, batch = config.pacing, config.rollout.rollout_batch_size
    more = pacing.over_sampling_batch_size
    if more is not None and more < batch:
        yield f"--over-sampling-batch-size {more} is below --rollout-batch-size {batch}: no batch would be complete"
    if more is not None and pacing.schedule == "async":
        yield (
            "--over-sampling-batch-size needs --schedule sync: under async generation goes on all the time, and a "
            "group that a filter drops is replaced at once; drop the flag"
        )
    if pacing.partial_rollout and pacing.max_weight_staleness == 0:
        yield "--partial-rollout with --max-weight-staleness 0: what goes on is always too old; allow 1 or more"
    if pacing.partial_rollout and pacing.schedule == "sync" and more is None:
        yield "--partial-rollout under --schedule sync continues what --over-sampling-batch-size left over: give it too"
    if pacing.mask_offpolicy_in_partial_rollout and not pacing.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout: give both"


def _trainer(config: RunConfig) -> Iterator[str]:
    t = config.trainer
    tp, pp = t.tensor_model_parallel_size, t.pipeline_model_parallel_size
    total = config.samples_per_step
    batch = t.global_batch_size or total
    if t.world_size % (tp * pp):
        yield (
            f"--actor-num-nodes {t.actor_num_nodes} x --actor-num-gpus-per-node {t.actor_num_gpus_per_node} = "
            f"{t.world_size} rank(s), not divisible by --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} = {tp * pp}"
        )
    elif t.data_parallel_size % t.expert_model_parallel_size:
        yield (
            f"--expert-model-parallel-size {t.expert_model_parallel_size} does not divide the data parallel size "
            f"{t.data_parallel_size} ({t.world_size} ranks / ({tp} x {pp})): experts are spread over those ranks"
        )
    elif batch % t.data_parallel_size:
        yield (
            f"--global-batch-size {batch} is not divisible by the data parallel size {t.data_parallel_size} "
            f"({t.world_size} ranks / ({tp} x {pp}))"
        )
    if total % batch:
        yield (
            f"--global-batch-size {batch} does not divide the {total} samples of a step "
            f"(--rollout-batch-size {config.rollout.rollout_batch_size} x --n-samples-per-prompt "
            f"{config.rollout.n_samples_per_prompt})"
        )
    if t.max_tokens_per_gpu <= config.rollout.rollout_max_response_len:
        yield (
            f"--max-tokens-per-gpu {t.max_tokens_per_gpu} cannot hold one sample of --rollout-max-response-len "
            f"{config.rollout.rollout_max_response_len} tokens and its prompt: raise it"
        )


def _outputs(config: RunConfig) -> Iterator[str]:
    run_id = config.output.run_id
    if run_id is not None:
        try:
            check_run_id(run_id)
        except InvalidVersionRef as error:
            yield f"--run-id: {error}"
    output, run_dir = config.output, config.output.run_dir
    if output.save_interval is None and output.save_total_limit is not None and not output.save_on_interrupt:
        yield "--save-total-limit has no effect without --save-interval: give both"
    if output.save_interval is None and not output.async_save and not output.save_on_interrupt:
        yield "--no-async-save has no effect without --save-interval: give both"
    if output.resume == "auto" and not run_dir:
        yield "--resume auto needs --run-dir: the directory of the run to continue, or to start"
    if output.load:
        yield from _continued(Path(output.load).expanduser(), run_id)
        return
    if run_dir and is_url(run_dir):
        yield f"--run-dir {run_dir} must be a local directory"
    elif run_dir:
        yield from _run_directory(Path(run_dir).expanduser())
    root = config.engines.version_store or config.weights.update_weight_disk_dir
    if root and run_id and not is_url(root) and (Path(root).expanduser() / run_id / "run.json").exists():
        yield (
            f"--update-weight-disk-dir {root} already holds versions of run {run_id}: give another --run-id or "
            "another directory"
        )


def _continued(run_dir: Path, run_id: str | None) -> Iterator[str]:
    """A run to continue: there, and still called what it was."""
    saved = run_dir / CONFIG_FILE
    if not saved.is_file():
        yield f"--load {run_dir}: not the directory of a run (no {CONFIG_FILE})"
        return
    was = load_files([str(saved)]).output.run_id
    if was != run_id:
        yield f"--run-id {run_id}: the run in --load {run_dir} is {was}; drop it"


def _run_directory(path: Path) -> Iterator[str]:
    if path.exists() and not path.is_dir():
        yield f"--run-dir {path} is not a directory"
    elif (path / "config.yaml").exists():
        yield f"--run-dir {path} already holds a run: give another directory, or remove that one"
    else:
        parent = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            yield f"--run-dir {path}: {parent} is not writable"


def _addresses(config: RunConfig) -> Iterator[str]:
    cluster = config.cluster
    reason = port_problem(cluster.gateway_host, cluster.gateway_port)
    if reason:
        yield (
            f"--gateway-port {cluster.gateway_port} on {cluster.gateway_host}: {reason}; "
            "use another, or 0 for any free one"
        )


def _installed(config: RunConfig) -> Iterator[str]:
    engines = config.engines
    if config.output.use_wandb and importlib.util.find_spec("wandb") is None:
        yield "--use-wandb: wandb is not installed; pip install 'miles-disagg[wandb]', or drop it"
    w = config.weights
    nixl = any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12"))
    if w.transport == "p2p" and w.update_weight_p2p_transport == "nixl" and not nixl:
        yield (
            "--update-weight-p2p-transport nixl: NIXL is not installed here; pip install 'miles-disagg[p2p]' (on CUDA "
            "13: pip install nixl-cu13), or use --update-weight-p2p-transport torch"
        )
    if engines.topology != "managed" or engines.rollout_engine != "sglang":
        return
    if engines.sglang_python is None and importlib.util.find_spec("sglang") is None:
        yield "--rollout-engine sglang: SGLang is not installed here; give --sglang-python PATH of its environment"
    if engines.sglang_python and not os.access(engines.sglang_python, os.X_OK):
        yield f"--sglang-python {engines.sglang_python} is not an executable file"


def _resources(config: RunConfig, machine: Machine) -> Iterator[str]:
    """GPUs and nodes that this machine lacks. Cores are only reserved by name: a local Ray shares them."""
    resolved = resolve(config, machine.gpus)
    if config.trainer.actor_num_nodes > 1:
        yield (
            f"--actor-num-nodes {config.trainer.actor_num_nodes}: this run would start Ray on one machine; "
            "join a cluster with --ray-address"
        )
    wanted: dict[str, Any] = plan_placement(resolved).total()
    gpus = math.ceil(round(wanted.get("GPU", 0), 6))
    if gpus > machine.gpus:
        asked = [f"--rollout-num-gpus {config.engines.rollout_num_gpus}"] if config.engines.rollout_num_gpus else []
        if config.evaluation.eval_num_gpus:
            asked.append(f"--eval-num-gpus {config.evaluation.eval_num_gpus}")
        if resolved.trainer.trainer_device == "cuda":
            asked.insert(0, f"--actor-num-gpus-per-node {config.trainer.actor_num_gpus_per_node}")
        yield (
            f"{' and '.join(asked)} want {gpus} GPU(s), this machine has {machine.gpus}: lower them, use "
            "--trainer-device cpu, or join a cluster with --ray-address"
        )
    for field in ("actor_node_resource", "rollout_node_resource"):
        if getattr(config.cluster, field):
            yield f"{flag(field)} names nodes of a Ray cluster: join one with --ray-address, or drop it"
