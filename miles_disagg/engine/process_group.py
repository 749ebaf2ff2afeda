"""Joining the torch.distributed group of a weight update, as SGLang joins it.

The group stands beside the default one (or without any) and is found through a TCP store at `master_address:port`,
under a prefix that is the group's name. Rank 0 is the sender and hosts the store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from miles_disagg.domain.errors import DeadlineExceeded


def join(
    *, master_address: str, master_port: int, rank: int, world_size: int, name: str, backend: str, timeout: float
) -> Any:
    """Join group `name`, waiting up to `timeout` seconds for the others; also the deadline of each collective in it.

    Compatible with SGLang's `init_weights_update_group` on the other side. Raises DeadlineExceeded.
    """
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous(f"tcp://{_host(master_address)}:{master_port}", rank, world_size, timeout=limit))
        store.set_timeout(limit)
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=limit,
        )
    except dist.DistStoreError as e:
        waited = f"{world_size} ranks of group {name!r} at {master_address}:{master_port}"
        raise DeadlineExceeded(waited, timeout, f"this is rank {rank}; {e}") from None
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave(group: Any) -> None:
    """Destroy a group that `join` returned."""
    dist.destroy_process_group(group)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
