"""The rollout side of a run, part by part: gateways, the policy's engines, those that only evaluate, frozen ones.

Each part ends with the stack that it is given. What looks after a part while the run lasts is `fleet`, `gateway` and
`frozen`; the order of a start is `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles_disagg.cluster import specs
from miles_disagg.cluster.calls import Lifeline
from miles_disagg.cluster.connect import incarnation
from miles_disagg.cluster.endpoint import ServiceFleet
from miles_disagg.cluster.evaluation_replicas import EvaluationReplicas
from miles_disagg.cluster.fleet import Fleet
from miles_disagg.cluster.frozen import serving
from miles_disagg.cluster.gateway import KeptGateway, Listening
from miles_disagg.cluster.ledger import KeptLedger
from miles_disagg.config.placement import PlacementPlan
from miles_disagg.config.run import RunConfig
from miles_disagg.config.secrets import read_token
from miles_disagg.domain.versions import VersionRef
from miles_disagg.gateway.actor import GatewayActor
from miles_disagg.gateway.app import GatewaySettings

Say = Callable[[str], None]


def start_here(actor_class: Any, run_id: str, name: str, *args: Any, restarts: int = 0) -> Any:
    """An actor on the driver's node, where the run directory and the prompts are; it reserves no core."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": incarnation(name), "namespace": run_id, "num_cpus": 0, "scheduling_strategy": here}
    options["max_restarts"] = restarts
    return actor_class.options(**options).remote(*args)


async def rollout_side(
    config: RunConfig,
    plan: PlacementPlan,
    ledger: KeptLedger,
    base: VersionRef,
    say: Say,
    lifeline: Lifeline,
    stack: AsyncExitStack,
) -> tuple[Fleet | ServiceFleet, str]:
    """The engines of this job behind a gateway of its own, or somebody else's service; and the URL to ask."""
    endpoint = config.engines.rollout_endpoint
    if endpoint:
        token = read_token(config.engines.rollout_auth_token_file, "--rollout-auth-token-file")
        service = ServiceFleet(endpoint, say, token=token)
        stack.push_async_callback(service.stop)
        return service, endpoint
    gateway = await _gateway(config, "gateway", config.cluster.gateway_port, say)
    members = specs.fleet_members(config, plan, base, gateway.url)
    fleet = Fleet(members, gateway, ledger, specs.fleet_timeouts(config), say, lifeline=lifeline)
    stack.push_async_callback(fleet.stop)
    ledger.served = fleet.served
    return fleet, gateway.url


async def evaluators(
    config: RunConfig, plan: PlacementPlan, ledger: KeptLedger, base: VersionRef, say: Say, stack: AsyncExitStack
) -> EvaluationReplicas | None:
    """Engines that only evaluate, behind a gateway that rollouts do not know; None where there are none.

    Training does not need them: evaluations are skipped where they are lost.
    """
    if not plan.evaluators:
        return None
    gateway = await _gateway(config, "eval-gateway", 0, say)
    members = specs.evaluation_members(config, plan, base, gateway.url)
    fleet = Fleet(members, gateway, ledger, specs.fleet_timeouts(config), say, counted=False)
    stack.push_async_callback(fleet.stop)
    return EvaluationReplicas(fleet, config.timeouts.update_weights_timeout)


async def frozen(
    config: RunConfig, plan: PlacementPlan, say: Say, lifeline: Lifeline, stack: AsyncExitStack
) -> Mapping[str, tuple[str, ...]]:
    """Engines of models that are never updated; their URLs by the models' names."""
    served = await stack.enter_async_context(
        serving(
            specs.frozen_engines(config, plan),
            plan.placeholders,
            run_id=config.run_id,
            placement_timeout=config.timeouts.placement_timeout,
            shutdown_timeout=config.timeouts.shutdown_timeout,
            lifeline=lifeline,
            say=say,
        )
    )
    for name, urls in served.items():
        say(f"frozen model {name}: {', '.join(urls)}")
    return served


async def _gateway(config: RunConfig, name: str, port: int, say: Say) -> KeptGateway:
    settings = GatewaySettings(request=config.timeouts.rollout_request_timeout)
    listening = Listening(config.cluster.gateway_host, port, config.run_id, settings)
    gateway = KeptGateway(name, lambda: start_here(GatewayActor, config.run_id, name), listening, say)
    await gateway.start()
    return gateway
