"""Configuration of `miles-disagg serve`: a fleet of replicas behind gateways, independent of any training job.

Flags over YAML files over defaults, as for a run. What the values mean at run time is `cluster.service`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from pydantic import ValidationError

from miles_disagg.config.base import NonNegativeInt, Port, PositiveFloat, PositiveInt, Seconds, Section, bounds_of
from miles_disagg.config.flags import closest, flag, read_yaml, take_config_files
from miles_disagg.config.machine import port_problem
from miles_disagg.config.resolve import is_url
from miles_disagg.config.secrets import exposure_problems, token_problems
from miles_disagg.domain.errors import ConfigError, InvalidVersionRef
from miles_disagg.domain.versions import check_run_id


class ServiceConfig(Section):
    """Serve rollout requests with a fleet that follows a version store and grows and shrinks with the load.

    Values come from flags, then from the YAML files given with --config FILE (the last one wins), then from the
    defaults shown here.
    """

    version_store: str | None = None
    """Store to follow: a directory or an S3 prefix."""
    base_checkpoint: str | None = None
    """Hugging Face checkpoint directory on every replica's node: version 0 of the runs that are served."""
    service_dir: str = "service"
    """Directory on every node for logs and materialized versions."""
    run_id: str | None = None
    """Serve only this run; unset: the newest that the store names."""
    rollout_engine: Literal["embedded", "sglang"] = "embedded"
    """The embedded torch engine, or stock SGLang servers."""
    rollout_num_gpus_per_engine: NonNegativeInt = 0
    """GPUs of one engine; 0: engines on CPU."""
    rollout_cpus_per_engine: PositiveFloat = 1.0
    """CPU cores reserved for each engine."""
    rollout_node_resource: str | None = None
    """Custom Ray resource that marks nodes for replicas; unset: any node."""
    sglang_python: str | None = None
    """Python of the virtual environment that SGLang runs from; unset: this one."""
    engine_args: tuple[str, ...] = ()
    """Further arguments of the engine's server, as on its own command line."""
    min_replicas: PositiveInt = 1
    """Replicas that are always there."""
    max_replicas: PositiveInt = 1
    """Replicas at most."""
    target_requests_per_replica: PositiveFloat = 32.0
    """Requests in flight for each replica that the fleet is sized for."""
    scale_up_seconds: Seconds = 10.0
    """How long the load must ask for more replicas before there are more."""
    scale_down_seconds: Seconds = 300.0
    """How long the load must ask for fewer before one is drained and removed."""
    drain_seconds: Seconds = 60.0
    """For the requests of a replica that is removed to end."""
    num_gateways: PositiveInt = 1
    """Gateways, on consecutive ports; clients may use any of them."""
    gateway_host: str = "127.0.0.1"
    """Address that gateways and replicas listen on."""
    gateway_port: Port = 8000
    """Port of the first gateway; 0: any free ports."""
    auth_token_file: str | None = None
    """File with a bearer token, asked of clients and used between gateways and replicas."""
    tls_cert: str | None = None
    """PEM file of the certificate chain that gateways and replicas present."""
    tls_key: str | None = None
    """PEM file of its private key."""
    pause_generation_mode: Literal["in_place", "retract"] = "in_place"
    """In-flight requests at a weight update: continue on the new weights, or recompute their cache."""
    max_in_flight: PositiveInt = 1024
    """Requests admitted by one replica; 429 above."""
    request_timeout: Seconds = 3600.0
    """For one whole answer."""
    version_wait: Seconds = 10.0
    """For a compatible replica to appear, then 409."""
    relay: bool = False
    """Replicas fetch versions from each other, so that the store is read a few times, not once a node."""
    relay_zone: str = ""
    """Where these nodes are; nodes of one zone fetch from each other, and the zone's first from another zone."""
    verify_interval: Seconds = 60.0
    """Between looks at a replica's live weights."""
    canary_ids: tuple[int, ...] = ()
    """Token ids of a prompt that every replica answers, greedily; one that answers unlike the others is refused."""
    canary_interval: Seconds | None = None
    """Between asking a replica for it (also asked at each version); unset: 60 s."""
    placement_timeout: Seconds = 900.0
    """For Ray to place a replica; an autoscaler needs minutes to add a node."""
    engine_start_timeout: Seconds = 600.0
    """For an engine to answer its first health check."""
    ray_address: str | None = None
    """Running Ray cluster to join (`auto` or HOST:PORT); unset: RAY_ADDRESS, else a cluster of its own."""
    dry_run: bool = False
    """Check everything, print all problems and the placement, start nothing."""

    def bundle(self) -> dict[str, float]:
        """Resources of one replica's placement group, in Ray's form."""
        out = {"CPU": self.rollout_cpus_per_engine}
        if self.rollout_num_gpus_per_engine:
            out["GPU"] = float(self.rollout_num_gpus_per_engine)
        if self.rollout_node_resource:
            out[self.rollout_node_resource] = 0.001
        return out

    @property
    def directory(self) -> Path:
        """Absolute `service_dir`."""
        return Path(self.service_dir).expanduser().absolute()

    @property
    def store(self) -> str:
        """The store's URL or absolute directory."""
        store = self.version_store or ""
        return store if is_url(store) else str(Path(store).expanduser().absolute())

    @property
    def base(self) -> Path:
        """Absolute base checkpoint."""
        return Path(self.base_checkpoint or "").expanduser().absolute()


def service_flags() -> list[str]:
    """Every flag of the command."""
    return sorted(["--config", *(flag(field) for field in ServiceConfig.model_fields)])


def parse_service(argv: Sequence[str]) -> ServiceConfig:
    """Parse a command line. ConfigError for problems in a YAML file; usage errors exit with status 2."""
    argv, files = take_config_files(list(argv))
    config = _load(files)
    settings = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
    return tyro.cli(ServiceConfig, prog="miles-disagg serve", args=argv, default=config, config=settings)


def _load(paths: Sequence[str]) -> ServiceConfig:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for path in paths:
        read: Mapping[str, Any] = read_yaml(path)
        for key, value in read.items():
            field = str(key).replace("-", "_")
            if field not in ServiceConfig.model_fields:
                problems.append(f"{path}: unknown key {key}{closest(field, list(ServiceConfig.model_fields))}")
            values[field] = value
    if problems:
        raise ConfigError(problems)
    try:
        return ServiceConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            [f"{flag(str(item['loc'][0]))}: {item['msg']}, got {item['input']!r}" for item in error.errors()]
        ) from None


def check_service(config: ServiceConfig) -> list[str]:
    """All problems, each naming its flag and the remedy. Nothing is started."""
    problems = []
    for field, info in ServiceConfig.model_fields.items():
        bounds, value = bounds_of(info.annotation, info.metadata), getattr(config, field)
        if bounds is not None and value is not None and not bounds.allows(value):
            problems.append(f"{flag(field)} is {value:g}, must be {bounds}")
    return [*problems, *_wiring(config), *_network(config)]


def _wiring(config: ServiceConfig) -> Iterator[str]:
    if config.version_store is None:
        yield "--version-store is missing: the directory or S3 prefix that the trainer publishes to"
    elif is_url(config.version_store) and not config.version_store.startswith(("s3://", "file://")):
        yield f"--version-store {config.version_store}: only a directory, file:// and s3:// are supported"
    if config.base_checkpoint is None:
        yield "--base-checkpoint is missing: the checkpoint directory that the runs start from"
    elif not config.base.is_dir():
        yield f"--base-checkpoint {config.base_checkpoint}: no such directory"
    if config.min_replicas > config.max_replicas:
        yield f"--min-replicas {config.min_replicas} is above --max-replicas {config.max_replicas}"
    if config.rollout_engine == "embedded":
        if config.rollout_num_gpus_per_engine > 1:
            yield "--rollout-engine embedded runs on one device: use --rollout-engine sglang for several GPUs"
        if config.sglang_python:
            yield "--sglang-python has no effect without --rollout-engine sglang: give both"
    yield from canary_problems(config.canary_ids, config.canary_interval)
    if config.relay_zone and not config.relay:
        yield "--relay-zone has no effect without --relay: give both"
    if config.run_id is not None:
        try:
            check_run_id(config.run_id)
        except InvalidVersionRef as error:
            yield f"--run-id: {error}"


def canary_problems(ids: Sequence[int] | None, interval: float | None) -> Iterator[str]:
    """What is wrong with --canary-ids and --canary-interval."""
    if any(token < 0 for token in ids or ()):
        yield f"--canary-ids {' '.join(map(str, ids or ()))}: must be token ids, none below 0"
    if interval is not None and not ids:
        yield "--canary-interval has no effect without --canary-ids: give both"
    if interval is not None and interval <= 0:
        yield f"--canary-interval must be above 0, got {interval:g}"


def _network(config: ServiceConfig) -> Iterator[str]:
    if config.auth_token_file:
        yield from token_problems("--auth-token-file", config.auth_token_file)
    yield from exposure_problems("--gateway-host", config.gateway_host, config.auth_token_file)
    if bool(config.tls_cert) != bool(config.tls_key):
        yield "--tls-cert and --tls-key go together: give both"
    for port in range(config.gateway_port, config.gateway_port + config.num_gateways) if config.gateway_port else ():
        if problem := port_problem(config.gateway_host, port):
            yield f"--gateway-host {config.gateway_host} --gateway-port {port}: {problem}"
