"""--sglang-config: what a file means, and what is wrong with one, by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from miles_disagg.config.flags import parse_run
from miles_disagg.config.placement import plan_placement, policy_engines
from miles_disagg.config.resolve import resolve
from miles_disagg.config.server_groups import read_server_groups
from miles_disagg.domain.errors import ConfigError


def write(tmp_path: Path, *models: Any) -> str:
    path = tmp_path / "groups.yaml"
    path.write_text(json.dumps({"sglang": list(models)}))
    return str(path)


def policy(**group: Any) -> dict[str, Any]:
    return {"name": "policy", "server_groups": [group]}


def test_engines_of_all_groups_are_placed_each_with_its_own_resources(tmp_path: Path):
    model = {"name": "policy", "num_gpus_per_engine": 2}
    model["server_groups"] = [
        {"num_gpus": 4, "overrides": {"mem_fraction_static": 0.7, "disable-radix-cache": True, "enable-x": False}},
        {"num_gpus": 4, "num_gpus_per_engine": 4},
        {"worker_type": "placeholder", "num_gpus": 1, "num_gpus_per_engine": 1},
    ]
    frozen = {"name": "reference", "update_weights": False, "server_groups": [{"num_gpus": 1}]}
    file = write(tmp_path, model, frozen)
    flags = ["--hf-checkpoint", "/m", "--num-rollout", "1", "--rollout-engine", "sglang", "--trainer-device", "cpu"]
    config = resolve(parse_run([*flags, "--sglang-config", file]), gpus=16)
    plan = plan_placement(config)
    assert [(g.unit.name, g.bundles[0].gpus) for g in plan.engines if g.unit] == [
        ("engine-0", 2), ("engine-1", 2), ("engine-2", 4),
    ]  # fmt: skip
    assert [(g.unit.name, g.unit.path) for g in plan.frozen if g.unit] == [("reference-0", None)]
    assert [g.bundles[0].gpus for g in plan.placeholders] == [1]
    assert plan.total()["GPU"] == 10
    assert policy_engines(config)[0].overrides == {"mem-fraction-static": ("0.7",), "disable-radix-cache": ()}
    assert config.engines.num_managed_engines == 3
    assert resolve(config, gpus=16) == config
    assert "1 engine(s) of reference" in plan.describe()


def test_ranks_of_an_engine_on_the_cpu_reserve_no_gpu(tmp_path: Path):
    flags = ["--hf-checkpoint", "/m", "--num-rollout", "1", "--rollout-engine", "sglang", "--trainer-device", "cpu"]
    file = write(tmp_path, policy(num_engines=1, num_gpus_per_engine=2))
    for given in (["--sglang-config", file], ["--rollout-num-gpus-per-engine", "2"]):
        (group,) = plan_placement(resolve(parse_run([*flags, *given]), gpus=0)).engines
        assert group.unit is not None
        assert (group.unit.gpus, group.unit.ranks, group.bundles[0].gpus) == (0, 2, 0)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([policy()], "num_gpus is missing (or num_engines, for engines on CPU)"),
        ([policy(num_gpus=3, num_gpus_per_engine=2)], "num_gpus 3 is not divisible by num_gpus_per_engine 2"),
        ([policy(num_gpus=4, num_engines=3)], "num_engines 3 contradicts num_gpus 4"),
        ([policy(num_engines=0)], "num_engines must be a whole number of at least 1, not 0"),
        ([policy(num_engines=1, overide={})], "unknown key overide; perhaps you meant overrides"),
        ([policy(num_engines=1, overrides={"tp_size": 2})], "tp-size is set by this program: use num_gpus_per_engine"),
        ([policy(num_engines=1, worker_type="prefil")], "worker_type 'prefil' is not one of regular, prefill"),
        ([policy(num_engines=1, worker_type="prefill")], "does not start prefill/decode groups"),
        ([policy(num_engines=1, worker_type="placeholder")], "only placeholders, no engine"),
        ([policy(num_engines=1), policy(num_engines=1)], "every model needs a name of its own"),
        ([{**policy(num_engines=1), "update_weights": False}], "0 models are updated (none), there must be exactly"),
        ([policy(num_engines=1), {**policy(num_engines=1), "name": "other"}], "2 models are updated (policy, other)"),
        ([{**policy(num_engines=1), "model_path": "/none"}], "model_path '/none' is no directory"),
        ([{**policy(num_engines=1), "model_path": "/", "update_weights": True}], "its model_path must be --hf-"),
        (["policy"], "one key `sglang` with a list of models"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, models: list[Any], said: str):
    with pytest.raises(ConfigError) as caught:
        read_server_groups(write(tmp_path, *models), "/m")
    assert said in str(caught.value)
    assert "--sglang-config" in str(caught.value)
