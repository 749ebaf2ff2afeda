"""Advantages, loss, critic, teacher and schedule: what cannot work together. Everything else is `checks`."""

import contextlib
from collections.abc import Iterator

from miles_disagg.config.flags import flag
from miles_disagg.config.resolve import resolve
from miles_disagg.config.run import RunConfig
from miles_disagg.config.server_groups import read_server_groups
from miles_disagg.config.trainer import CriticConfig, DistillationConfig, LossConfig
from miles_disagg.domain.errors import ConfigError


def loss(config: RunConfig) -> Iterator[str]:
    """Problems of --advantage-estimator, --policy-loss, the corrections and the optimizer's schedule."""
    section, optimizer = config.loss, config.optimizer
    yield from _corrections(section)
    yield from _plugged_in(section)
    yield from _critic(config)
    yield from _teacher(config)
    if section.calculate_per_token_loss and section.loss_aggregation not in (None, "token-mean"):
        yield f"--calculate-per-token-loss contradicts --loss-aggregation {section.loss_aggregation}: drop one"
    if section.advantage_estimator == "gspo" and section.policy_loss == "cispo":
        yield "--advantage-estimator gspo means --policy-loss gspo, not cispo: use --advantage-estimator grpo"
    if section.disable_grpo_std_normalization and section.custom_advantage_function_path:
        yield "--disable-grpo-std-normalization has no effect with --custom-advantage-function-path: drop it"
    elif section.disable_grpo_std_normalization and section.advantage_estimator not in ("grpo", "gspo"):
        yield f"--disable-grpo-std-normalization has no effect with --advantage-estimator {section.advantage_estimator}"
    if section.objective == "cispo" and section.eps_clip_c is not None:
        yield "--eps-clip-c has no effect with --policy-loss cispo, which has no dual clip: drop it"
    yield from _reference(config)
    if section.kl_loss_coef > 0 and not section.use_kl_loss:
        yield "--kl-loss-coef has no effect without --use-kl-loss: give both"
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}"
    steps = resolve(config).optimizer.lr_decay_iters
    if optimizer.lr_decay_style != "constant" and steps is not None and steps <= optimizer.lr_warmup_iters:
        yield (
            f"--lr-decay-style {optimizer.lr_decay_style}: --lr-warmup-iters {optimizer.lr_warmup_iters} leaves "
            f"nothing of the {steps} steps of --lr-decay-iters"
        )


def _reference(config: RunConfig) -> Iterator[str]:
    """A served reference: one to ask, for a term that there is, at temperature 1."""
    section, file = config.loss, config.engines.sglang_config
    name = section.kl_reference
    if name is None:
        if section.kl_reference_timeout != LossConfig().kl_reference_timeout:
            yield "--kl-reference-timeout has no effect without --kl-reference: give both"
        return
    if not section.use_kl_loss or not section.kl_loss_coef:
        yield "--kl-reference has no effect without --use-kl-loss and --kl-loss-coef: give all three"
    if config.rollout.rollout_temperature != 1:
        yield (
            f"--kl-reference with --rollout-temperature {config.rollout.rollout_temperature:g}: a server's logprobs "
            "are those of temperature 1; set --rollout-temperature 1, or drop it for a reference in the trainer"
        )
    if name.startswith(("http://", "https://")):
        return
    if file is None:
        yield f"--kl-reference {name!r} is no http:// or https:// URL, and no --sglang-config names frozen models"
        return
    with contextlib.suppress(ConfigError):  # what is wrong with the file is said by `checks`
        frozen = [m.name for m in read_server_groups(file, config.model.hf_checkpoint) if not m.updates]
        if name not in frozen:
            there = ", ".join(frozen) or "none"
            yield f"--kl-reference {name!r} is not a frozen model of --sglang-config {file} (there are: {there})"


def _corrections(section: LossConfig) -> Iterator[str]:
    """Importance weights and rejection: settings that contradict each other or have no effect."""
    default = LossConfig()
    for switch, fields in (
        ("use_tis", ("tis_clip", "tis_clip_low", "tis_level", "tis_mode")),
        ("use_rs", ("rs_level", "rs_lower_bound", "rs_upper_bound")),
    ):
        for field in fields:
            if not getattr(section, switch) and getattr(section, field) != getattr(default, field):
                yield f"{flag(field)} has no effect without {flag(switch)}: give both"
    if section.tis_clip_low and section.tis_mode == "truncate":
        yield "--tis-clip-low has no effect with --tis-mode truncate: use clip or mask, or drop it"
    if section.tis_clip_low > section.tis_clip:
        yield f"--tis-clip-low {section.tis_clip_low:g} is above --tis-clip {section.tis_clip:g}"
    if section.rs_lower_bound > section.rs_upper_bound:
        yield f"--rs-lower-bound {section.rs_lower_bound:g} is above --rs-upper-bound {section.rs_upper_bound:g}"
    if section.use_rollout_logprobs and (section.use_tis or section.use_rs or section.rs_veto_threshold):
        yield "--use-rollout-logprobs makes every importance ratio 1: drop --use-tis, --use-rs and --rs-veto-threshold"


def _plugged_in(section: LossConfig) -> Iterator[str]:
    """Functions by import path, and the flags that they replace."""
    if section.custom_advantage_function_path and section.advantage_estimator != "grpo":
        yield (
            f"--custom-advantage-function-path and --advantage-estimator {section.advantage_estimator} both say what "
            "an advantage is: drop one (the gspo objective is --policy-loss gspo)"
        )
    if not section.custom_loss_function_path:
        return
    if section.objective != "ppo":
        yield f"--custom-loss-function-path and the {section.objective} objective both say what the loss is: drop one"
    if section.eps_clip_c is not None:
        yield "--eps-clip-c has no effect with --custom-loss-function-path: drop it"


def _critic(config: RunConfig) -> Iterator[str]:
    """Flags of a critic that is not there, or that never lets the policy train."""
    critic, default = config.critic, CriticConfig()
    if not config.uses_critic:
        for field in type(critic).model_fields:
            if getattr(critic, field) != getattr(default, field):
                yield f"{flag(field)} has no effect without --advantage-estimator ppo: give both"
        return
    only, steps = critic.num_critic_only_steps, config.rollout.num_rollout
    if steps is not None and only >= steps:
        yield f"--num-critic-only-steps {only} leaves nothing of the {steps} steps of --num-rollout for the policy"


def _teacher(config: RunConfig) -> Iterator[str]:
    """On-policy distillation: a teacher to ask, in its terms, at temperature 1."""
    section, default = config.distillation, DistillationConfig()
    if not section.use_opd:
        for field in type(section).model_fields:
            if getattr(section, field) != getattr(default, field):
                yield f"{flag(field)} has no effect without --use-opd: give both"
        return
    if not section.opd_teacher_urls:
        yield "--use-opd needs --opd-teacher-urls URL: the server of the teacher"
    names = [name for name, _ in section.teachers]
    for name, url in section.teachers:
        if not url.startswith(("http://", "https://")):
            yield f"--opd-teacher-urls: {url!r} is not an http:// or https:// URL"
        if names.count(name) > 1:
            yield f"--opd-teacher-urls: teacher {name!r} is given twice"
            break
    if config.rollout.rollout_temperature != 1:
        yield (
            f"--use-opd with --rollout-temperature {config.rollout.rollout_temperature:g}: a teacher's logprobs are "
            "those of temperature 1; set --rollout-temperature 1"
        )
