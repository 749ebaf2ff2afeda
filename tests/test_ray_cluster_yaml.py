"""ray_cluster.yaml is what `ray up` accepts, with a trainer group and a rollout group."""

import json
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from miles_disagg.config.flags import parse_run
from miles_disagg.config.placement import plan_placement
from miles_disagg.config.resolve import resolve

FILE = Path(__file__).parents[1] / "ray_cluster.yaml"


@pytest.fixture
def cluster() -> dict:
    return yaml.safe_load(FILE.read_text())


def test_it_follows_rays_schema_as_written_and_with_rays_defaults(cluster: dict):
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    validate_config(prepare_config(cluster))


def test_the_groups_scale_apart_and_add_up(cluster: dict):
    types = cluster["available_node_types"]
    assert {cluster["head_node_type"], "trainer", "rollout"} == set(types)
    assert cluster["max_workers"] == sum(types[name]["max_workers"] for name in ("trainer", "rollout"))


def test_the_command_it_documents_is_placed_on_its_groups(cluster: dict):
    """Marks in the node types, in the comment's command and in the planned bundles are the same."""
    comment = " ".join(line.lstrip("# ") for line in FILE.read_text().splitlines() if line.startswith("#"))
    words = comment.split()
    flags = ["--num-rollout", "1", "--actor-num-gpus-per-node", "8", "--trainer-device", "cuda"]
    for name in ("--actor-node-resource", "--rollout-node-resource"):
        flags += [name, words[words.index(name) + 1]]
    plan = plan_placement(resolve(parse_run(flags)))
    for group, node_type in ((plan.trainer, "trainer"), (plan.engines[0], "rollout")):
        offered = cluster["available_node_types"][node_type]["resources"]
        for resource, amount in group.bundles[0].resources().items():
            assert offered.get(resource, 0) >= amount, f"{node_type} nodes have no {resource}"


def test_the_dashboard_is_not_open_and_the_token_is_on(cluster: dict):
    starts = [c for c in cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert any(target.endswith(".ray/auth_token") for target in cluster["file_mounts"])


def test_every_placeholder_is_explained(cluster: dict):
    text = FILE.read_text()
    assert "PLACEHOLDER" in text.split("cluster_name")[0]
    for line in text.splitlines():
        if "ami-0000" in line or "ssh_user" in line or "region:" in line:
            assert "# PLACEHOLDER: " in line, line
