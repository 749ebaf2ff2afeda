"""`miles-disagg plan`: the transfer plan of a run's configuration, or a simulation for a model of 1T parameters.

Engine layouts come from the model's sizes here; a run records the real ones from its engines and prints them at start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from miles_disagg.config.flags import parse_run
from miles_disagg.config.model import QUICKSTART
from miles_disagg.config.resolve import resolve
from miles_disagg.config.run import RunConfig
from miles_disagg.domain.errors import ConfigError
from miles_disagg.trainer.hf_config import read_hf_config
from miles_disagg.weights.transfer.blocks import RankLayout
from miles_disagg.weights.transfer.layouts import (
    EngineParallel,
    TrainerParallel,
    embedded_layout,
    engine_layouts,
    trainer_layouts,
)
from miles_disagg.weights.transfer.plan import aligned, make_plan
from miles_disagg.weights.transfer.report import Rates, expected, summary
from miles_disagg.weights.transfer.simulate import simulate, table

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main(argv: Sequence[str]) -> int:
    """Print the plan; with --json one object. The flags of a run follow, or stand in --config FILE."""
    parser = argparse.ArgumentParser(prog="miles-disagg plan", description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="1T parameters on 256 -> 128 ranks, no configuration")
    parser.add_argument("--send-gb-per-s", type=float, default=50.0, help="out of one trainer rank")
    parser.add_argument("--receive-gb-per-s", type=float, default=50.0, help="into one engine rank")
    parser.add_argument("--write-microseconds", type=float, default=5.0, help="cost of one write beside its bytes")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="of a run; its flags may follow")
    parser.add_argument("--json", action="store_true", help="one object")
    args, rest = parser.parse_known_args(list(argv))
    rates = Rates(args.send_gb_per_s, args.receive_gb_per_s, args.write_microseconds * 1e-6)
    if min(args.send_gb_per_s, args.receive_gb_per_s) <= 0:
        raise ConfigError(["--send-gb-per-s and --receive-gb-per-s must be above 0"])
    if args.simulate:
        if rest or args.config:
            raise ConfigError([f"--simulate takes no configuration: drop {' '.join([*args.config, *rest])}"])
        return _simulate(rates, args.json)
    files = [word for file in args.config for word in ("--config", file)]
    return _plan(parse_run([*files, *rest]), rates, args.json)


def _simulate(rates: Rates, as_json: bool) -> int:
    cases = [
        simulate(ranks, dtype=dtype, rates=rates)
        for ranks, dtype in ((16, "float8_e4m3fn"), (32, "float8_e4m3fn"), (128, "float8_e4m3fn"), (16, "bfloat16"))
    ]
    rows = [
        {"engines": c.engines, "engine_ranks": c.engine_ranks, "dtype": c.dtype, "seconds": round(c.seconds, 3)}
        for c in cases
    ]
    print(json.dumps({"results": rows}) if as_json else "\n".join(table(cases, rates)))
    return 0


def layouts(config: RunConfig) -> tuple[list[RankLayout], list[RankLayout]]:
    """Trainer ranks and engine ranks of a resolved configuration, by formula. ConfigError if they do not fit."""
    if config.model.hf_checkpoint == QUICKSTART and not config.checkpoint.is_dir():
        raise ConfigError(["--hf-checkpoint quickstart is not made yet: run miles-disagg train --dry-run first"])
    hf, t, engines = read_hf_config(config.checkpoint), config.trainer, config.engines
    tp, pp, ep = t.tensor_model_parallel_size, t.pipeline_model_parallel_size, t.expert_model_parallel_size
    problems = hf.layout_problems(tp, pp, ep)
    if engines.topology != "managed":
        problems.append(f"--rollout-endpoint and --rollout-external: the {engines.topology} topology is not planned")
    if t.world_size % (tp * pp):
        problems.append("--actor-num-gpus-per-node does not fit --tensor-model-parallel-size: see train --dry-run")
    if problems:
        raise ConfigError(problems)
    parallel = TrainerParallel(tp, pp, t.world_size // (tp * pp), ep)
    dtype = _DTYPES.get(engines.rollout_dtype, "bfloat16")
    ranks = engines.rollout_num_gpus_per_engine
    targets: list[RankLayout] = []
    for i in range(engines.num_managed_engines):
        if engines.rollout_engine == "embedded":
            targets.append(embedded_layout(hf.sizes(), name=f"engine-{i}", dtype=dtype))
        else:
            targets += engine_layouts(hf.sizes(), EngineParallel(ranks), name=f"engine-{i}", dtype=dtype)
    return trainer_layouts(hf.sizes(), parallel, _DTYPES[t.train_dtype]), targets


def _plan(config: RunConfig, rates: Rates, as_json: bool) -> int:
    config = resolve(config)
    sources, targets = layouts(config)
    bucket = aligned(config.weights.update_weight_buffer_size)
    plan = make_plan(sources, targets, bucket=bucket)
    found = expected(plan, rates, bucket)
    pairs = plan.pairs()
    if as_json:
        slowest = max(pairs, key=lambda pair: pairs[pair])
        print(json.dumps({
            "sent_bytes": dict(zip([s.name for s in plan.sources], plan.sent(), strict=True)),
            "received_bytes": {t.name: t.nbytes for t in plan.targets},
            "slowest_pair": [plan.sources[slowest[0]].name, plan.targets[slowest[1]].name, pairs[slowest]],
            "pieces": len(plan.pieces), "writes": len(plan.writes(bucket)), "expected_seconds": found.seconds,
        }))  # fmt: skip
        return 0
    print("\n".join(summary(plan, bucket, rates)))
    for source, sent, packed in zip(plan.sources, plan.sent(), plan.packed_bytes, strict=True):
        print(f"  {source.name}: sends {sent:,} bytes, packs {packed:,}")
    for target in plan.targets:
        print(f"  {target.name}: receives {target.nbytes:,} bytes")
    return 0
