"""Derived values, this machine's resources, and the plan of placement groups."""

from pathlib import Path

import pytest

from miles_disagg.config.flags import parse_run
from miles_disagg.config.machine import Machine, free_port
from miles_disagg.config.placement import plan_placement
from miles_disagg.config.resolve import joins_cluster, resolve


def resolved(*flags: str, gpus: int | None = 0):
    return resolve(parse_run(["--num-rollout", "4", *flags]), gpus)


def test_resolving_fills_in_what_follows_and_twice_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = resolved("--run-id", "r1", "--update-weight-transfer-mode", "disk-delta", "--eps-clip", "0.3")
    assert config.run_dir == tmp_path / "runs" / "r1"
    assert config.version_store == str(tmp_path / "runs" / "r1" / "weights")
    assert config.global_batch_size == config.max_concurrent_samples == 32 * 8
    assert config.buffer_capacity == 64
    assert config.loss.eps_clip_high == 0.3
    assert config.optimizer.lr_decay_iters == 4
    assert (config.weights.update_weight_mode, config.weights.update_weight_transport) == ("delta", "disk")
    assert config.trainer.trainer_device == "cpu"
    assert resolve(config, 0) == config


def test_two_runs_get_two_names():
    assert resolved().run_id != resolved().run_id


def test_an_unresolved_value_is_not_silently_none():
    with pytest.raises(ValueError, match="--run-id has no value"):
        _ = parse_run([]).run_id


def test_the_device_follows_the_gpus_in_reach():
    assert resolved(gpus=2).trainer.trainer_device == "cuda"
    assert resolved(gpus=None).trainer.trainer_device == "auto"
    assert resolved("--trainer-device", "cpu", gpus=2).trainer.trainer_device == "cpu"


def test_the_service_topology_publishes_to_the_services_store():
    config = resolved("--rollout-endpoint", "http://h:1", "--version-store", "s3://bucket/prefix")
    assert config.version_store == "s3://bucket/prefix"
    assert config.engines.topology == "service"
    assert (config.weights.mode, config.weights.transport) == ("delta", "disk")  # a service reads nothing else
    assert plan_placement(config).engines == ()


@pytest.mark.parametrize(
    ("nodes", "ranks", "gpus", "strategy"),
    [(1, 2, 0, "STRICT_PACK"), (1, 8, 8, "STRICT_PACK"), (3, 8, 8, "STRICT_SPREAD")],
)
def test_the_trainer_is_one_group_with_a_bundle_a_node(nodes: int, ranks: int, gpus: int, strategy: str):
    flags = ("--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(ranks))
    trainer = plan_placement(resolved(*flags, gpus=gpus)).trainer
    assert len(trainer.bundles) == nodes
    assert trainer.strategy == strategy
    expected = {"CPU": float(ranks)} | ({"GPU": float(ranks)} if gpus else {})
    assert [b.resources() for b in trainer.bundles] == [expected] * nodes
    assert [trainer.bundle_of(rank) for rank in range(nodes * ranks)] == [r // ranks for r in range(nodes * ranks)]


def test_every_engine_is_a_group_of_its_own():
    plan = plan_placement(resolved("--num-rollout-engines", "3", "--rollout-cpus-per-engine", "0.5"))
    assert [g.bundles[0].resources() for g in plan.engines] == [{"CPU": 0.5}] * 3
    assert len({g.name for g in plan.groups}) == 4
    assert plan.total() == {"CPU": 2.5}


def test_gpu_engines_reserve_cores_too_and_large_ones_span_nodes():
    flags = ("--rollout-engine", "sglang", "--rollout-num-gpus", "32", "--rollout-num-gpus-per-engine", "16")
    plan = plan_placement(resolved(*flags, "--rollout-cpus-per-engine", "4", gpus=8))
    assert len(plan.engines) == 2
    assert plan.engines[0].strategy == "STRICT_SPREAD"
    assert [b.resources() for b in plan.engines[0].bundles] == [{"CPU": 4.0, "GPU": 8.0}] * 2
    assert plan.total()["GPU"] == 33


def test_engines_that_only_evaluate_have_groups_of_their_own():
    flags = ("--eval-interval", "5", "--update-weight-transfer-mode", "disk-delta")
    plan = plan_placement(resolved("--eval-num-replicas", "2", *flags))
    assert [g.unit and g.unit.name for g in plan.engines] == ["engine-0"]
    assert [g.unit and g.unit.name for g in plan.evaluators] == ["eval-0", "eval-1"]
    assert plan.total() == {"CPU": 4.0}
    assert "evaluation replica: 2 engine(s) in 2 placement groups" in plan.describe()
    gpus = ("--rollout-engine", "sglang", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2")
    config = resolved(*gpus, "--eval-num-gpus", "4", *flags, gpus=8)
    assert config.evaluation.eval_num_replicas == 2
    assert resolve(config, 8) == config
    assert [g.bundles[0].resources() for g in plan_placement(config).evaluators] == [{"CPU": 1.0, "GPU": 2.0}] * 2
    assert plan_placement(config).total()["GPU"] == 9


def test_a_marked_node_type_is_asked_for_in_every_bundle():
    flags = ("--actor-node-resource", "trainer_node", "--rollout-node-resource", "rollout_node")
    plan = plan_placement(resolved(*flags))
    assert plan.trainer.bundles[0].resources() == {"CPU": 1.0, "trainer_node": 0.001}
    assert plan.engines[0].bundles[0].resources() == {"CPU": 1.0, "rollout_node": 0.001}


def test_the_plan_reads_as_sentences():
    text = plan_placement(resolved("--num-rollout-engines", "2")).describe()
    assert "trainer: 1 rank(s) in 1 placement group" in text
    assert "engine: 2 engine(s) in 2 placement groups" in text
    assert "in all: 3 CPU" in text


def test_visible_devices_decide_how_many_gpus_there_are():
    assert Machine.local({"CUDA_VISIBLE_DEVICES": ""}).gpus == 0
    assert Machine.local({"CUDA_VISIBLE_DEVICES": "-1"}).gpus == 0
    assert Machine.local({"CUDA_VISIBLE_DEVICES": "0,2"}).gpus == 2
    assert Machine.local({}).cpus >= 1


def test_a_run_joins_a_cluster_by_flag_or_environment():
    assert not joins_cluster(resolved(), {})
    assert joins_cluster(resolved(), {"RAY_ADDRESS": "auto"})
    assert joins_cluster(resolved("--ray-address", "auto"), {})
    assert not joins_cluster(resolved("--ray-address", "local"), {"RAY_ADDRESS": "auto"})


def test_a_free_port_is_of_no_range_from_which_others_are_given_one_unasked():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(50)]
    assert not [p for p in ports if low <= p <= high or 10_002 <= p <= 19_999]
    assert len(set(ports)) > 1
