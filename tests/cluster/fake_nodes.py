"""Run as a script: places a run on a Ray of fake nodes and prints what went where, as one JSON object.

usage: fake_nodes.py TRAINER_NODES ROLLOUT_NODES FLAG...   (each node pretends to have 4 GPUs)
"""

import json
import logging
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from miles_disagg.cluster.connect import reserve
from miles_disagg.config.flags import parse_run
from miles_disagg.config.placement import plan_placement
from miles_disagg.config.resolve import resolve
from miles_disagg.domain.errors import PlacementError


def main(trainer_nodes: int, rollout_nodes: int, flags: list[str]) -> dict:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    roles = {}
    for role, count in (("trainer", trainer_nodes), ("rollout", rollout_nodes)):
        for i in range(count):
            node = cluster.add_node(num_cpus=16, num_gpus=4, resources={role: 1})
            roles[node.node_id] = f"{role}-{i}"
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        plan = plan_placement(resolve(parse_run(flags), gpus=4))
        placed: dict[str, list[str]] = {}
        try:
            for group in plan.groups:
                handle = reserve(group.name, [b.resources() for b in group.bundles], group.strategy, 10.0)
                nodes = placement_group_table(handle)["bundles_to_node_id"]
                placed[group.name] = [roles[nodes[i]] for i in range(len(group.bundles))]
        except PlacementError as error:
            return {"placed": placed, "error": str(error)}
        return {"placed": placed, "error": None, "free": ray.available_resources().get("GPU", 0)}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
