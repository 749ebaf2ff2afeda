"""`miles-disagg serve`: gateways and a fleet of replicas on Ray, that grows, shrinks, heals and ends in order.

Each replica is an actor in a placement group of its own, so that a Ray autoscaler adds and removes nodes. How many
there should be is `autoscale`; what a replica does is `rollout.host`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles_disagg.cluster.autoscale import Autoscaler, ScalePolicy
from miles_disagg.cluster.calls import ActorLost, Pulse, call
from miles_disagg.cluster.connect import cluster, reserve
from miles_disagg.cluster.gateway import KeptGateway, Listening
from miles_disagg.config.secrets import read_token
from miles_disagg.config.service import ServiceConfig, check_service, parse_service
from miles_disagg.domain.errors import ConfigError, MilesDisaggError
from miles_disagg.gateway.actor import GatewayActor
from miles_disagg.gateway.app import GatewaySettings
from miles_disagg.gateway.canary import canary_of
from miles_disagg.replica.activation import ActivationLimits
from miles_disagg.replica.listen import Listen, TlsFiles, log_to_stderr, until_signal
from miles_disagg.rollout.actor import StagingSpec
from miles_disagg.rollout.host import HostSpec
from miles_disagg.rollout.processes import EngineCommand
from miles_disagg.rollout.replica_actor import ServiceReplica

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_CALL_SECONDS = 30.0


@dataclass(eq=False)
class Watched:
    """An actor that is asked how it is, again and again: `look` under way."""

    name: str
    look: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass(eq=False)
class Member(Watched):
    """A replica from its placement to its end. States: placing, starting, running, draining."""

    state: str = "placing"
    actor: Any = None
    pulse: Pulse = field(init=False, repr=False)
    placement: PlacementGroup | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.pulse = Pulse(self.name)


@dataclass(eq=False)
class Gateway(Watched):
    """A gateway; its URL stays when its actor is replaced."""

    kept: KeptGateway = field(kw_only=True)


class RolloutService:
    """Gateways and members. `start`, then `supervise` until cancelled, then `stop`."""

    def __init__(self, config: ServiceConfig, namespace: str):
        self._config, self._namespace = config, namespace
        self._token = read_token(config.auth_token_file)
        self._tls = TlsFiles(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
        self._gateways: list[Gateway] = []
        self.members: list[Member] = []
        self._numbers = 0
        policy = ScalePolicy(
            config.min_replicas, config.max_replicas, config.target_requests_per_replica,
            config.scale_up_seconds, config.scale_down_seconds,
        )  # fmt: skip
        self._scaler = Autoscaler(policy)

    async def start(self) -> list[str]:
        """Start the gateways and the first replicas; returns the gateways' URLs. Replicas come up by themselves."""
        for i in range(self._config.num_gateways):
            kept = self._gateway(i)
            await kept.start()
            self._gateways.append(Gateway(kept.name, kept=kept))
        self._resize(self._scaler.number)
        return self.urls

    @property
    def urls(self) -> list[str]:
        """The gateways' URLs."""
        return [gateway.kept.url for gateway in self._gateways]

    def _gateway(self, number: int) -> KeptGateway:
        config, gateway_class = self._config, GatewayActor
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"namespace": self._namespace, "num_cpus": 0, "scheduling_strategy": here}

        def make() -> Any:
            return gateway_class.options(**options).remote()  # type: ignore[attr-defined]

        canary = canary_of(config.canary_ids, config.canary_interval)
        settings = GatewaySettings(wait=config.version_wait, request=config.request_timeout, canary=canary)
        port = config.gateway_port + number if config.gateway_port else 0
        listening = Listening(config.gateway_host, port, config.run_id, settings, self._token, self._tls)
        return KeptGateway(f"gateway-{number}", make, listening, log.warning)

    # --- members --------------------------------------------------------------------------------

    def _resize(self, number: int) -> None:
        """Start or drain members until there are `number` that are not on their way out."""
        here = [m for m in self.members if m.state != "draining"]
        for _ in range(number - len(here)):
            member = Member(f"replica-{self._numbers}")
            self._numbers += 1
            self.members.append(member)
            member.task = asyncio.create_task(self._bring_up(member), name=f"start {member.name}")
        unfinished_first = sorted(here, key=lambda m: m.state == "running")
        for member in unfinished_first[: max(0, len(here) - number)]:
            self._retire(member, "the load is low")

    async def _bring_up(self, member: Member) -> None:
        config = self._config
        try:
            member.placement = await asyncio.to_thread(
                reserve, f"{self._namespace}-{member.name}", [config.bundle()], "STRICT_PACK", config.placement_timeout
            )
            member.state = "starting"
            options = {
                "namespace": self._namespace,
                "num_cpus": config.rollout_cpus_per_engine,
                "num_gpus": config.rollout_num_gpus_per_engine,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(member.placement, 0),
            }
            actor_class: Any = ServiceReplica
            member.actor = actor_class.options(**options).remote(
                *self._specs(member.name), config.directory / "fetched", config.relay
            )
            url = await call(
                member.actor.start.remote(), f"{member.name}: start its engine", config.engine_start_timeout + 30
            )
            member.state = "running"
            log.info("%s runs at %s", member.name, url)
        except MilesDisaggError as error:
            log.warning("%s could not be started: %s", member.name, error)
            await asyncio.sleep(min(30.0, config.scale_up_seconds))  # before the supervision replaces it
            await self._bury(member)

    def _specs(self, name: str) -> tuple[HostSpec, StagingSpec]:
        config = self._config
        command = EngineCommand(
            kind=config.rollout_engine,
            model_path=str(config.base),
            device="cuda" if config.rollout_num_gpus_per_engine else "cpu",
            log_path=config.directory / "logs" / f"{name}.log",
            python=config.sglang_python,
            args=config.engine_args,
            ranks=max(1, config.rollout_num_gpus_per_engine),
        )
        spec = HostSpec(
            replica_id=name,
            base=None,
            command=command,
            gateways=tuple(self.urls),
            listen=Listen(config.gateway_host, token=self._token, tls=self._tls),
            mode=config.pause_generation_mode,
            max_in_flight=config.max_in_flight,
            start_timeout=config.engine_start_timeout,
            limits=ActivationLimits(drain=config.drain_seconds),
            verify_interval=config.verify_interval,
            checkpoint=config.base,
            zone=config.relay_zone,
        )
        return spec, StagingSpec(config.store, config.directory / "replicas" / name, config.base)

    def _retire(self, member: Member, why: str) -> None:
        log.info("%s leaves: %s", member.name, why)
        if member.task is not None:
            member.task.cancel()
        member.state = "draining"
        member.task = asyncio.create_task(self._drain(member), name=f"drain {member.name}")

    async def _drain(self, member: Member) -> None:
        """Out of the gateways at once, then its requests end, then its resources are given back."""
        seconds = self._config.drain_seconds
        if member.actor is not None:
            with contextlib.suppress(MilesDisaggError):
                await call(member.actor.stop.remote(seconds), f"{member.name}: drain", seconds + _CALL_SECONDS)
        await self._bury(member)

    async def _bury(self, member: Member) -> None:
        if member.actor is not None:
            ray.kill(member.actor)
        if member.placement is not None:
            remove_placement_group(member.placement)
        if member in self.members:
            self.members.remove(member)

    # --- supervision ----------------------------------------------------------------------------

    async def supervise(self) -> None:
        """Follow the load; replace what died or hangs. Until cancelled."""
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                for member in self.members:
                    if member.state == "running":
                        self._begin_look(member, self._look_after)
                for gateway in self._gateways:
                    self._begin_look(gateway, self._look_after_gateway)
                load = await self._load(session)
                if load is not None:
                    self._scaler.observe(time.monotonic(), load)
                self._resize(self._scaler.number)

    def _begin_look(self, watched: Watched, look: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Ask it how it is, unless its answer is still waited for: one that hangs holds up nobody else."""
        if watched.look is not None:
            if not watched.look.done():
                return
            watched.look.result()
        watched.look = asyncio.create_task(look(watched), name=f"look after {watched.name}")

    async def _look_after(self, member: Member) -> None:
        try:
            status = await member.pulse.ask(member.actor.status.remote(), "status")
        except ActorLost as error:
            log.warning("%s died and is replaced: %s", member.name, error)
            await self._bury(member)
        except MilesDisaggError as error:
            log.warning("%s: %s", member.name, error)
        else:
            if status["failure"] and member.state == "running":
                log.warning("%s is given up: %s", member.name, status["failure"])
                self._retire(member, "its engine cannot be kept running")

    async def _look_after_gateway(self, gateway: Gateway) -> None:
        try:
            await gateway.kept.look()
        except MilesDisaggError as error:
            log.warning("%s: %s", gateway.name, error)

    async def _load(self, session: aiohttp.ClientSession) -> int | None:
        """Requests in flight that replicas could work on; None while no gateway says."""
        total, heard = 0, False
        for url in self.urls:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError):
                async with session.get(f"{url}/fleet") as response:
                    fleet = await response.json()
                total += max(0, int(fleet["active_requests"]) - int(fleet["waiting_for_a_version"]))
                heard = True
        return total if heard else None

    async def stop(self) -> None:
        """Drain every replica, then end the gateways."""
        for member in list(self.members):
            if member.state != "draining":
                self._retire(member, "the service ends")
        tasks = [m.task for m in self.members if m.task is not None]
        looks = [w.look for w in (*self.members, *self._gateways) if w.look is not None]
        for look in looks:
            look.cancel()
        await asyncio.gather(*tasks, *looks, return_exceptions=True)
        for gateway in self._gateways:
            await gateway.kept.stop(10.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Check, then serve until SIGINT or SIGTERM. ConfigError for a configuration that cannot work."""
    config = parse_service(list(argv or ()))
    if problems := check_service(config):
        raise ConfigError(problems)
    if config.dry_run:
        print("The configuration is sound. Nothing was started.")
        print(f"{config.num_gateways} gateway(s) on {config.gateway_host}, versions from {config.store}")
        bundle = ", ".join(f"{amount:g} {name}" for name, amount in config.bundle().items())
        print(f"{config.min_replicas} to {config.max_replicas} replica(s), each a placement group of {{{bundle}}}")
        return 0
    log_to_stderr(verbose=True)
    namespace = f"rollout-service-{time.strftime('%Y%m%d-%H%M%S')}"
    cpus = config.max_replicas * config.rollout_cpus_per_engine
    with cluster(address=config.ray_address, namespace=namespace, dashboard=False, num_cpus=cpus, num_gpus=None):
        return asyncio.run(_serve(config, namespace))


async def _serve(config: ServiceConfig, namespace: str) -> int:
    stop = until_signal()
    service = RolloutService(config, namespace)
    try:
        urls = await service.start()
        print(f"miles-disagg serve: {' '.join(urls)}", flush=True)
        supervision = asyncio.create_task(service.supervise(), name="supervise the fleet")
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait({supervision, ended}, return_when=asyncio.FIRST_COMPLETED)
        if supervision.done():
            supervision.result()
        supervision.cancel()
    finally:
        await service.stop()
    return 0
