"""From the resolved configuration to the plain specs that each part is built from. Pure: nothing is started here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from miles_disagg.buffer.data_buffer import capacity_groups
from miles_disagg.cluster.fleet import FleetTimeouts, Member
from miles_disagg.cluster.frozen import FrozenMember
from miles_disagg.cluster.peer import PeerSettings
from miles_disagg.cluster.preflight import data_options
from miles_disagg.cluster.scorers import teacher_spec
from miles_disagg.config.placement import EngineUnit, PlacementPlan
from miles_disagg.config.run import RunConfig
from miles_disagg.config.secrets import read_token
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.discovery import ModelFacts, Wanted
from miles_disagg.prompts.reward import task_reward
from miles_disagg.replica.activation import ActivationLimits
from miles_disagg.replica.listen import Listen
from miles_disagg.replica.peer import PeerOptions
from miles_disagg.rollout.actor import ProducerSpec, StagingSpec
from miles_disagg.rollout.base import RolloutOptions, SamplingOptions
from miles_disagg.rollout.frozen import FrozenSpec
from miles_disagg.rollout.host import HostSpec
from miles_disagg.rollout.processes import EngineCommand
from miles_disagg.store.checkout import companion_files
from miles_disagg.trainer.actor import PublicationSpec
from miles_disagg.trainer.base import AdvantageSpec, CriticSpec, LossSpec, OptimizerSpec, TrainerSpec
from miles_disagg.trainer.hf_config import read_hf_config

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def trainer_spec(config: RunConfig) -> TrainerSpec:
    """What every trainer rank is built from."""
    trainer, loss = config.trainer, config.loss
    return TrainerSpec(
        hf_checkpoint=str(config.checkpoint.absolute()),
        tensor_parallel=trainer.tensor_model_parallel_size,
        pipeline_parallel=trainer.pipeline_model_parallel_size,
        expert_parallel=trainer.expert_model_parallel_size,
        dtype=trainer.train_dtype,
        use_distributed_optimizer=trainer.use_distributed_optimizer,
        recompute=trainer.recompute_granularity or "none",
        max_tokens_per_micro_batch=trainer.max_tokens_per_gpu,
        seed=trainer.seed,
        optimizer=optimizer_spec(config),
        loss=loss_spec(config),
        advantages=AdvantageSpec(
            estimator="grpo" if loss.advantage_estimator == "gspo" else loss.advantage_estimator,
            normalise_std=not loss.disable_grpo_std_normalization,
            custom=loss.custom_advantage_function_path,
            whiten=loss.normalize_advantages,
        ),
        critic=critic_spec(config) if config.uses_critic else None,
        meet_timeout=config.timeouts.trainer_start_timeout,
        collective_timeout=config.timeouts.distributed_timeout_minutes * 60,
    )


def optimizer_spec(config: RunConfig) -> OptimizerSpec:
    """The policy's optimizer and schedule."""
    adam = config.optimizer
    return OptimizerSpec(
        lr=adam.lr,
        min_lr=adam.min_lr,
        schedule=adam.lr_decay_style,
        warmup_steps=adam.lr_warmup_iters,
        decay_steps=adam.lr_decay_iters or 0,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.adam_beta1,
        adam_beta2=adam.adam_beta2,
        adam_eps=adam.adam_eps,
        clip_grad=adam.clip_grad,
    )


def critic_spec(config: RunConfig) -> CriticSpec:
    """PPO's critic: Adam as for the policy, with a learning rate and a warm-up of its own and no decay."""
    critic = config.critic
    return CriticSpec(
        optimizer=replace(
            optimizer_spec(config),
            lr=critic.critic_lr or config.optimizer.lr,
            schedule="constant",
            warmup_steps=critic.critic_lr_warmup_iters,
            decay_steps=0,
            min_lr=0.0,
        ),
        gamma=critic.gamma,
        lambd=critic.lambd,
        value_clip=critic.value_clip,
        only_steps=critic.num_critic_only_steps,
    )


def loss_spec(config: RunConfig) -> LossSpec:
    """The policy loss."""
    loss = config.loss
    mean = "token-mean" if loss.calculate_per_token_loss else "sequence-mean"
    return LossSpec(
        clip_low=loss.eps_clip,
        clip_high=loss.eps_clip_high if loss.eps_clip_high is not None else loss.eps_clip,
        dual_clip=loss.eps_clip_c,
        objective=loss.objective,
        proximal="behaviour" if loss.use_rollout_logprobs else "recomputed",
        tis_cap=loss.tis_clip if loss.use_tis else None,
        tis_low=loss.tis_clip_low,
        tis_level=loss.tis_level,
        tis_mode=loss.tis_mode,
        rs_level=loss.rs_level if loss.use_rs else None,
        rs_low=loss.rs_lower_bound,
        rs_high=loss.rs_upper_bound,
        rs_veto=loss.rs_veto_threshold,
        entropy_coef=loss.entropy_coef,
        kl_coef=loss.kl_loss_coef if loss.use_kl_loss else 0.0,
        kl_kind=loss.kl_loss_type,
        kl_reference="served" if loss.kl_reference else "local",
        aggregate=loss.loss_aggregation or mean,
        constant_length=config.rollout.rollout_max_response_len if loss.loss_aggregation == "constant" else None,
        temperature=config.rollout.rollout_temperature,
        custom=loss.custom_loss_function_path,
        distill_coef=config.distillation.opd_kl_coef if config.distillation.use_opd else 0.0,
    )


def publication_spec(config: RunConfig, device: str, published: Path | None = None) -> PublicationSpec:
    """How the sources publish. published: checkpoint of the version published last, where that is not the base."""
    weights = config.weights
    return PublicationSpec(
        transport=weights.transport,
        store_url=config.version_store,
        checksum=weights.update_weight_delta_checksum,
        base=str(config.checkpoint.absolute()),
        published=str(published.absolute()) if published is not None else None,
        companions=tuple(str(config.checkpoint.absolute() / name) for name in companion_files(config.checkpoint)),
        bucket_bytes=weights.update_weight_buffer_size,
        backend="nccl" if device == "cuda" else "gloo",
        timeout=config.timeouts.update_weights_timeout,
        encoding=weights.encoding,
        snapshot_device=weights.update_weight_snapshot_device,
        post_write_path=weights.custom_update_weight_post_write_path,
        p2p_transport=weights.update_weight_p2p_transport,
    )


def peer_settings(config: RunConfig) -> PeerSettings:
    """How the driver runs peer-to-peer updates."""
    weights = config.weights
    return PeerSettings(
        transport=weights.update_weight_p2p_transport,
        backend="nccl" if config.trainer.trainer_device == "cuda" else "gloo",
        bucket=weights.update_weight_buffer_size,
        timeout=config.timeouts.update_weights_timeout,
    )


def peer_options(config: RunConfig) -> PeerOptions:
    """How an engine's side receives them."""
    weights = config.weights
    return PeerOptions(
        transport=weights.update_weight_p2p_transport,
        staging=weights.update_weight_p2p_staging,
        bucket=weights.update_weight_buffer_size,
        deadline=config.timeouts.update_weights_timeout,
        delta=weights.encoding is not None,
    )


def fleet_members(config: RunConfig, plan: PlacementPlan, base: VersionRef, gateway_url: str) -> list[Member]:
    """One member per managed or attached engine; none in the service topology."""
    engines, model = config.engines, ModelFacts.read(config.checkpoint)
    api_key = read_token(engines.rollout_auth_token_file, "--rollout-auth-token-file")
    units = [group.unit for group in plan.engines]
    attached = (engines.router_url,) if engines.router_url else engines.engine_urls
    names = [u.name for u in units if u] or [f"engine-{i}" for i in range(len(attached))]
    members = []
    for i, name in enumerate(names):
        unit = units[i] if units else None
        staging = _staging(config, name)
        spec = replace(
            _host_spec(config, name, base, gateway_url, staging),
            command=engine_command(config, unit, model) if unit else None,
            peer=peer_options(config) if config.weights.transport == "p2p" else None,
        )
        if not plan.engines:
            spec = replace(spec, engine_url=attached[i], wanted=wanted(config, model), api_key=api_key)
            if engines.router_url:
                spec = replace(spec, members=engines.engine_urls, activation="reload")
        group = plan.engines[i] if plan.engines else None
        members.append(Member(spec, staging, group, num_ranks=unit.ranks if unit else 1))
    return members


def evaluation_members(config: RunConfig, plan: PlacementPlan, base: VersionRef, gateway_url: str) -> list[Member]:
    """One member per engine that only evaluates. gateway_url: of their own gateway."""
    model, members = ModelFacts.read(config.checkpoint), []
    for group in plan.evaluators:
        unit = group.unit
        assert unit is not None
        staging = _staging(config, unit.name)
        spec = _host_spec(config, unit.name, base, gateway_url, staging)
        spec = replace(spec, command=engine_command(config, unit, model), follow=False)
        members.append(Member(spec, staging, group, num_ranks=unit.ranks))
    return members


def _host_spec(
    config: RunConfig, name: str, base: VersionRef, gateway_url: str, staging: StagingSpec | None
) -> HostSpec:
    """What all engines of a run have in common."""
    weights = config.weights
    return HostSpec(
        replica_id=name,
        base=base,
        command=None,
        gateways=(gateway_url,),
        listen=Listen(config.cluster.gateway_host),
        mode=config.engines.pause_generation_mode,
        activation=weights.activation if weights.publishes_deltas else "reload",
        checkpoint=config.checkpoint.absolute(),
        start_timeout=config.timeouts.engine_start_timeout,
        limits=ActivationLimits(load=config.timeouts.update_weights_timeout),
        staging=staging.directory if staging is not None else None,
    )


def _staging(config: RunConfig, name: str) -> StagingSpec | None:
    """Where an engine's versions come from and are built; None where they are sent to it."""
    if config.weights.transport != "disk":
        return None
    hook = config.weights.custom_update_weight_pre_read_path
    return StagingSpec(config.version_store, config.local_checkpoint_dir / name, config.checkpoint.absolute(), hook)


def wanted(config: RunConfig, model: ModelFacts) -> Wanted:
    """What the run needs of an engine that somebody else runs."""
    rollout = config.rollout
    tokens = rollout.rollout_max_response_len + (rollout.rollout_max_prompt_len or 1)
    return Wanted(model, _rollout_dtype(config, model), config.weights.transport, tokens)


def _rollout_dtype(config: RunConfig, model: ModelFacts) -> str:
    return _DTYPES.get(config.engines.rollout_dtype, model.dtype)


def engine_command(config: RunConfig, unit: EngineUnit, model: ModelFacts) -> EngineCommand:
    """How a managed engine is started. model: facts of the checkpoint that it serves."""
    engines = config.engines
    # SGLang's own auto serves float32 checkpoints in float16
    args = ["--dtype", _rollout_dtype(config, model) if unit.updates else model.dtype]
    if engines.rollout_engine == "sglang":
        args += engines.sglang_argv()
    else:
        share = -(-config.max_concurrent_samples // max(1, engines.num_managed_engines))
        args += ["--max-running-requests", str(min(256, max(16, share)))]
        if engines.rollout_decode_interval:
            args += ["--decode-interval", str(engines.rollout_decode_interval)]
    args += [part for name, values in unit.overrides.items() for part in (f"--{name}", *values)]
    return EngineCommand(
        kind=engines.rollout_engine,
        model_path=unit.path or str(config.checkpoint.absolute()),
        device="cuda" if unit.gpus else "cpu",
        log_path=config.run_dir / "logs" / f"{unit.name}.log",
        python=engines.sglang_python,
        args=tuple(args),
        ranks=unit.ranks,
    )


def frozen_engines(config: RunConfig, plan: PlacementPlan) -> list[FrozenMember]:
    """One member per engine of a model that is never updated."""
    members = []
    for group in plan.frozen:
        assert group.unit is not None
        facts = ModelFacts.read(Path(group.unit.path) if group.unit.path else config.checkpoint)
        command = engine_command(config, group.unit, facts)
        loopback = config.cluster.gateway_host in ("127.0.0.1", "localhost", "::1")
        spec = FrozenSpec(group.unit.name, command, loopback, config.timeouts.engine_start_timeout)
        members.append(FrozenMember(group.unit.model, spec, group))
    return members


def producer_spec(config: RunConfig, endpoint: str, version: int) -> ProducerSpec:
    """What the producer, its buffer and its ledger are built from."""
    data, rollout, pacing, evaluation = config.data, config.rollout, config.pacing, config.evaluation
    positions = read_hf_config(config.checkpoint).max_positions
    sampling = SamplingOptions(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        seed=rollout.rollout_seed,
    )
    eval_sampling = SamplingOptions(
        max_new_tokens=evaluation.eval_max_response_len or rollout.rollout_max_response_len,
        temperature=evaluation.eval_temperature,
        top_p=evaluation.eval_top_p,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )
    options = RolloutOptions(
        batch_groups=rollout.rollout_batch_size,
        n_samples_per_prompt=rollout.n_samples_per_prompt,
        max_concurrent_samples=config.max_concurrent_samples,
        max_staleness=pacing.max_weight_staleness,
        groups_per_version=rollout.rollout_batch_size * pacing.update_weights_interval,
        granularity=pacing.rollout_submission_granularity,
        unused=pacing.async_unused_samples_handler,
        failed_sample="shrink_group" if pacing.failed_samples_handler == "shrink" else "drop_group",
        sample_attempts=pacing.sample_attempts,
        prompt_attempts=pacing.prompt_attempts,
        over_sampling_groups=pacing.over_sampling_batch_size or rollout.rollout_batch_size,
        partial=pacing.partial_rollout,
        mask_old=pacing.mask_offpolicy_in_partial_rollout,
        put_timeout=config.timeouts.rollout_wait_timeout,
    )
    return ProducerSpec(
        run_id=config.run_id,
        endpoint=endpoint,
        checkpoint=config.checkpoint.absolute(),
        files=(data.prompt_data,) if data.prompt_data else (),
        data=data_options(config, positions),
        held_out_files=tuple(evaluation.datasets.values()),
        held_out=data_options(config, positions, training=False),
        task=data.task,
        task_sizes=(data.task_size, evaluation.eval_task_size),
        rm_type=config.reward.rm_type or (task_reward(data.task) if data.task else None),
        custom_rm_path=config.reward.custom_rm_path,
        rm_url=config.reward.rm_url,
        reward_timeout=config.timeouts.reward_timeout,
        reward_workers=config.reward.reward_workers,
        options=options,
        sampling=sampling,
        eval_sampling=eval_sampling,
        buffer_groups=capacity_groups(rollout.rollout_batch_size, pacing.async_data_buffer_capacity_factor),
        request_timeout=config.timeouts.rollout_request_timeout,
        version=version,
        token_file=config.engines.rollout_auth_token_file,
        generate_path=config.plugins.custom_generate_function_path,
        source_path=config.plugins.data_source_path,
        filter_path=config.plugins.dynamic_sampling_filter_path,
        teacher=teacher_spec(config),
        buffer_path=config.plugins.custom_async_data_buffer_path,
    )


def fleet_timeouts(config: RunConfig) -> FleetTimeouts:
    """Deadlines of the fleet."""
    t = config.timeouts
    return FleetTimeouts(
        t.placement_timeout, t.engine_start_timeout, t.update_weights_timeout, math.ceil(t.shutdown_timeout)
    )


def log_directory(config: RunConfig) -> Path:
    """Where engine logs go."""
    return config.run_dir / "logs"
