"""Brings one trainer rank into the world: ranks meet with a deadline, then the process groups and model-parallel state.

Which tensors live where is `convert.py`; nothing here knows the model.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from miles_disagg.domain.errors import DeadlineExceeded
from miles_disagg.trainer.base import RankSpec, TrainerSpec


@dataclass(frozen=True)
class Layout:
    """This rank's coordinates and groups. `tp`, `pp`, `dp`, `ep` are ranks, `*_size` group sizes.

    Experts are spread over `ep_size` neighbouring data parallel ranks.
    """

    rank: int
    tp: int
    tp_size: int
    pp: int
    pp_size: int
    dp: int
    dp_size: int
    device: torch.device
    tp_group: Any
    dp_group: Any
    pp_group: Any
    ep: int = 0
    ep_size: int = 1
    ep_group: Any = None

    @property
    def first_stage(self) -> bool:
        return self.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.pp == self.pp_size - 1

    @property
    def is_source(self) -> bool:
        """The rank of its pipeline stage that exports weights."""
        return self.tp == 0 and self.dp == 0

    @property
    def exports(self) -> bool:
        """True on the ranks that hold, together, one copy of this stage's weights."""
        return self.dp < self.ep_size


def initialize(spec: TrainerSpec, rank: RankSpec) -> Layout:
    """Join all ranks and build Megatron's groups. DeadlineExceeded names the ranks that did not come.

    ValueError: the world size is no multiple of TP x PP, or the data parallel size none of EP.
    """
    model_parallel = spec.tensor_parallel * spec.pipeline_parallel
    if rank.world_size % model_parallel:
        raise ValueError(
            f"{rank.world_size} trainer ranks are no multiple of "
            f"TP {spec.tensor_parallel} x PP {spec.pipeline_parallel}"
        )
    if rank.world_size // model_parallel % spec.expert_parallel:
        raise ValueError(
            f"{rank.world_size // model_parallel} data parallel ranks are no multiple of EP {spec.expert_parallel}"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank.local_rank)
        torch.cuda.set_device(device)
    store = meet(rank, spec.meet_timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("trainer", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=datetime.timedelta(seconds=spec.collective_timeout),
    )
    ps.initialize_model_parallel(
        tensor_model_parallel_size=spec.tensor_parallel,
        pipeline_model_parallel_size=spec.pipeline_parallel,
        expert_model_parallel_size=spec.expert_parallel,
        expert_tensor_parallel_size=1 if spec.expert_parallel > 1 else None,
        distributed_timeout_minutes=math.ceil(spec.collective_timeout / 60),
    )
    torch.manual_seed(spec.seed)
    model_parallel_cuda_manual_seed(spec.seed)
    return Layout(
        rank=rank.rank,
        tp=ps.get_tensor_model_parallel_rank(),
        tp_size=spec.tensor_parallel,
        pp=ps.get_pipeline_model_parallel_rank(),
        pp_size=spec.pipeline_parallel,
        dp=ps.get_data_parallel_rank(),
        dp_size=rank.world_size // model_parallel,
        device=device,
        tp_group=ps.get_tensor_model_parallel_group(),
        dp_group=ps.get_data_parallel_group(),
        pp_group=ps.get_pipeline_model_parallel_group(),
        ep=ps.get_expert_model_parallel_rank(),
        ep_size=spec.expert_parallel,
        ep_group=ps.get_expert_model_parallel_group(),
    )


def meet(rank: RankSpec, timeout: float) -> dist.Store:
    """Every rank says that it is here and waits for all others, at most `timeout` seconds, before any group exists."""
    where = f"{rank.master_address}:{rank.master_port}"
    deadline = time.monotonic() + timeout
    try:
        store = dist.TCPStore(
            rank.master_address,
            rank.master_port,
            world_size=None,
            is_master=rank.rank == 0,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
        )
        store.set(f"here/{rank.rank}", "1")
    except dist.DistError as e:
        raise DeadlineExceeded(f"trainer rank 0 to listen on {where}", timeout, _first_line(e)) from e
    everyone = [f"here/{r}" for r in range(rank.world_size)]
    try:
        store.wait(everyone, datetime.timedelta(seconds=max(0.01, deadline - time.monotonic())))
    except dist.DistError as e:
        absent = [r for r, key in enumerate(everyone) if not store.check([key])]
        detail = f"ranks {absent} of {rank.world_size} did not come" if absent else _first_line(e)
        raise DeadlineExceeded(f"all trainer ranks to meet at {where}", timeout, detail) from e
    return store


def shutdown() -> None:
    """Leave Megatron's groups and the default process group."""
    if dist.is_initialized():
        ps.destroy_model_parallel()
        dist.destroy_process_group()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
