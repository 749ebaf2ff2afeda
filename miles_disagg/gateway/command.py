"""`miles-disagg gateway`: the single rollout endpoint as a process of its own, without Ray.

Any number may run side by side; replicas register with each. Routing is `router`, HTTP `app`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence

from miles_disagg.config.service import canary_problems
from miles_disagg.domain.errors import ConfigError, InvalidVersionRef
from miles_disagg.domain.versions import check_run_id
from miles_disagg.gateway.app import GatewaySettings, serve
from miles_disagg.gateway.canary import canary_of
from miles_disagg.replica.listen import (
    Listen,
    add_arguments,
    listen_from,
    listen_problems,
    log_to_stderr,
    until_signal,
)

_DEFAULT = GatewaySettings()


def parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    p = argparse.ArgumentParser(prog="miles-disagg gateway", description="The endpoint in front of a rollout fleet")
    add_arguments(p, port=8000, what="gateway")
    p.add_argument("--run-id", help="serve only this run (default: the newest that the replicas' store names)")
    p.add_argument("--wait", type=float, default=_DEFAULT.wait, help="seconds for a compatible replica, then 409")
    p.add_argument("--expiry", type=float, default=_DEFAULT.expiry, help="silent seconds until a replica leaves")
    p.add_argument("--request-timeout", type=float, default=_DEFAULT.request, help="seconds for a whole answer")
    p.add_argument("--max-in-flight", type=int, default=_DEFAULT.max_in_flight, help="requests; 429 above")
    p.add_argument("--max-body-bytes", type=int, default=_DEFAULT.max_body_bytes, help="of one request; 413 above")
    p.add_argument("--canary-ids", type=int, nargs="+", help="token ids of a prompt that replicas must answer alike")
    p.add_argument("--canary-interval", type=float, help="seconds between asking a replica for it (default: 60)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. ConfigError for flags that cannot work."""
    args = parser().parse_args(argv)
    if problems := list(_problems(args)):
        raise ConfigError(problems)
    log_to_stderr(args.verbose)
    settings = GatewaySettings(
        wait=args.wait,
        request=args.request_timeout,
        expiry=args.expiry,
        max_in_flight=args.max_in_flight,
        max_body_bytes=args.max_body_bytes,
        canary=canary_of(args.canary_ids, args.canary_interval),
    )
    return asyncio.run(_serve(listen_from(args), settings, args.run_id))


def _problems(args: argparse.Namespace) -> Iterator[str]:
    yield from listen_problems(args)
    for name in ("wait", "expiry", "request_timeout", "max_in_flight", "max_body_bytes"):
        if getattr(args, name) <= 0:
            yield f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}"
    yield from canary_problems(args.canary_ids, args.canary_interval)
    if args.run_id is not None:
        try:
            check_run_id(args.run_id)
        except InvalidVersionRef as error:
            yield f"--run-id: {error}"


async def _serve(listen: Listen, settings: GatewaySettings, run_id: str | None) -> int:
    stop = until_signal()
    server = await serve(
        host=listen.host,
        port=listen.port,
        advertise_host=listen.advertise_host,
        settings=settings,
        token=listen.token,
        run_id=run_id,
        tls=listen.tls.context() if listen.tls else None,
    )
    print(f"miles-disagg gateway: {server.url}", flush=True)
    await stop.wait()
    await server.stop()
    return 0
