"""What cannot work with engines that somebody else runs, and with a router in front of them."""

from collections.abc import Iterable, Iterator

from miles_disagg.config.run import RunConfig


def attached(config: RunConfig) -> Iterator[str]:
    """Addresses that are none or are given twice, and a router without engines, or with a transport that it hides."""
    engines = config.engines
    if engines.rollout_external and not engines.rollout_external_engine_addrs:
        yield "--rollout-external needs --rollout-external-engine-addrs HOST:PORT ..."
    if engines.rollout_external_engine_addrs and not engines.rollout_external:
        yield "--rollout-external-engine-addrs has no effect without --rollout-external: give both"
    yield from _external_addresses(engines.rollout_external_engine_addrs)
    yield from _router(config)


def _external_addresses(addresses: Iterable[str]) -> Iterator[str]:
    seen = set()
    for address in addresses:
        host, colon, port = address.removeprefix("http://").rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            yield f"--rollout-external-engine-addrs: {address!r} is not HOST:PORT"
        if address in seen:
            yield f"--rollout-external-engine-addrs: {address} is given twice"
        seen.add(address)


def _router(config: RunConfig) -> Iterator[str]:
    engines, weights = config.engines, config.weights
    if (engines.sglang_router_ip is None) != (engines.sglang_router_port is None):
        yield "--sglang-router-ip and --sglang-router-port go together: give both or neither"
        return
    if engines.router_url is None:
        return
    if engines.topology != "attached":
        yield (
            "--sglang-router-ip is a router in front of attached engines: add --rollout-external and the addresses of "
            "all of them with --rollout-external-engine-addrs, or drop it (engines of this job need no router)"
        )
    if engines.router_url in engines.engine_urls:
        yield (
            f"--sglang-router-ip: {engines.router_url} is also in --rollout-external-engine-addrs: give the engines "
            "behind the router there"
        )
    if weights.transport == "p2p":
        yield (
            "--update-weight-transfer-mode p2p writes into one engine at a time, but engines behind --sglang-router-ip "
            "are updated together: use --update-weight-transfer-mode disk-delta, disk-full or broadcast"
        )
    if weights.activation == "in-place":
        yield "--activation in-place is for single engines: with --sglang-router-ip use --activation reload or auto"
