"""`miles-disagg replica`: puts a running SGLang-compatible server into a rollout fleet. No Ray on its host.

The server belongs to somebody else and is never restarted; this process follows the version store, loads versions into
it and answers for it at the gateways. What it does is `host`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from miles_disagg.config.secrets import read_token, token_problems
from miles_disagg.domain.errors import ConfigError, EngineUnavailable, InvalidRequest
from miles_disagg.engine.base import PAUSE_MODES
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.replica.activation import ActivationLimits
from miles_disagg.replica.listen import add_arguments, listen_from, listen_problems, log_to_stderr, until_signal
from miles_disagg.replica.relay_links import relayed
from miles_disagg.replica.staging import DiskStager
from miles_disagg.replica.wire import parse_rid
from miles_disagg.rollout.host import EngineHost, HostSpec
from miles_disagg.store.base import StoreError, open_store
from miles_disagg.store.shared import shared_fetch
from miles_disagg.store.versions import VersionStore
from miles_disagg.store.watch import PollingSource


def parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    p = argparse.ArgumentParser(prog="miles-disagg replica", description="Put a running engine into a rollout fleet")
    p.add_argument("--engine", required=True, help="URL of the running SGLang-compatible server")
    p.add_argument("--store", required=True, help="version store: a directory or s3://bucket/prefix")
    p.add_argument("--gateway", required=True, action="append", help="URL of a gateway; may be given several times")
    p.add_argument("--base-checkpoint", help="the run's base checkpoint here (default: the engine's model path)")
    p.add_argument("--local-checkpoint-dir", required=True, help="directory for materialized versions, this one's own")
    p.add_argument("--shared-fetch-dir", help="directory that replicas on this host share: they fetch a version once")
    p.add_argument("--relay", action="store_true", help="fetch versions from other replicas, and pass them on")
    p.add_argument("--relay-zone", default="", help="where this host is: hosts of one zone fetch from each other")
    p.add_argument("--replica-id", help="its name everywhere (default: made of host name and engine port)")
    p.add_argument("--engine-api-key-file", help="file with the engine's API key")
    p.add_argument("--pause-generation-mode", choices=PAUSE_MODES, default="in_place", help="requests at an update")
    p.add_argument("--max-in-flight", type=int, default=1024, help="requests admitted; 429 above")
    p.add_argument("--drain-seconds", type=float, default=30.0, help="for requests to end, when it stops or updates")
    p.add_argument("--start-timeout", type=float, default=300.0, help="seconds for the engine to answer")
    p.add_argument("--verify-interval", type=float, default=60.0, help="seconds between looks at the live weights")
    add_arguments(p, port=0, what="replica")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, then drain. ConfigError for flags that cannot work."""
    args = parser().parse_args(argv)
    if problems := list(_problems(args)):
        raise ConfigError(problems)
    log_to_stderr(args.verbose)
    return asyncio.run(_serve(args))


def _problems(args: argparse.Namespace) -> Iterator[str]:
    yield from listen_problems(args)
    for name in ("engine", *("gateway" for _ in args.gateway)):
        for url in args.gateway if name == "gateway" else (args.engine,):
            if not url.startswith(("http://", "https://")):
                yield f"--{name} {url} is not an http:// or https:// URL"
    try:
        open_store(args.store)
    except StoreError as error:
        yield f"--store: {error}"
    if args.base_checkpoint and not Path(args.base_checkpoint).expanduser().is_dir():
        yield f"--base-checkpoint {args.base_checkpoint}: no such directory"
    if args.relay_zone and not args.relay:
        yield "--relay-zone has no effect without --relay: give both"
    if args.replica_id is not None:
        try:
            parse_rid(args.replica_id, "--replica-id")
        except InvalidRequest as error:
            yield str(error)
    if args.engine_api_key_file:
        yield from token_problems("--engine-api-key-file", args.engine_api_key_file)
    for name in ("max_in_flight", "start_timeout", "verify_interval"):
        if getattr(args, name) <= 0:
            yield f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}"


async def _serve(args: argparse.Namespace) -> int:
    stop = until_signal()
    api_key = read_token(args.engine_api_key_file, "--engine-api-key-file")
    base = await _base_checkpoint(args, api_key)
    url = args.engine.rstrip("/")
    replica_id = args.replica_id or f"{socket.gethostname()}-{url.rpartition(':')[2]}"
    spec = HostSpec(
        replica_id=replica_id,
        base=None,
        command=None,
        engine_url=url,
        api_key=api_key,
        gateways=tuple(args.gateway),
        listen=listen_from(args),
        mode=args.pause_generation_mode,
        max_in_flight=args.max_in_flight,
        limits=ActivationLimits(drain=args.drain_seconds),
        verify_interval=args.verify_interval,
        checkpoint=base,
        zone=args.relay_zone,
    )
    directory = Path(args.local_checkpoint_dir).expanduser()
    objects, relay = open_store(args.store), None
    if args.relay:
        kept = directory.with_name(f"{directory.name}.relay")
        objects, relay = relayed(objects, kept, replica_id, token=spec.listen.token)
    if args.shared_fetch_dir:
        objects = shared_fetch(objects, Path(args.shared_fetch_dir).expanduser())
    store = VersionStore(objects)
    host = EngineHost(
        spec,
        source=PollingSource(store),
        stager=lambda: DiskStager(store, directory, base, reader=replica_id),
        sink=None,
        relay=relay,
    )
    print(f"miles-disagg replica: {await host.start()} ({replica_id}, process {os.getpid()})", flush=True)
    await stop.wait()
    await host.stop(args.drain_seconds)
    return 0


async def _base_checkpoint(args: argparse.Namespace, api_key: str | None) -> Path:
    """Wait for the engine, and say where the base checkpoint is: as given, else what the engine was started from."""
    engine, begun = SGLangEngine(args.engine, api_key=api_key), time.monotonic()
    try:
        while True:
            try:
                await engine.health(5.0)
                info = await engine.model_info()
                break
            except EngineUnavailable as error:
                if time.monotonic() - begun > args.start_timeout:
                    raise EngineUnavailable(
                        f"--engine {args.engine} did not answer within {args.start_timeout:g} s: {error}"
                    ) from None
                await asyncio.sleep(0.5)
    finally:
        await engine.close()
    path = Path(args.base_checkpoint or info.get("model_path") or "").expanduser()
    if not path.is_dir():
        raise ConfigError(
            [f"the engine's model path {info.get('model_path')!r} is no directory here: give --base-checkpoint DIR"]
        )
    return path
