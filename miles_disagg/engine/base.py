"""The engine port: everything the rest of the system asks of an inference engine.

One async `Protocol` in SGLang's own vocabulary, and the names of what goes through it. The HTTP adapter is
`engine.sglang`; the server that stands in for SGLang is `engine.embedded`; starting either is `engine.launch`.
What versions mean, who may be served and when to activate is not here: that is `replica`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

PauseMode = Literal["in_place", "retract", "abort"]
PAUSE_MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort")


@runtime_checkable
class Engine(Protocol):
    """An inference engine that speaks SGLang's requests and answers (raw JSON, as dicts).

    Errors, for every method: `EngineUnavailable` when nothing answers (process gone, connection lost, timeout),
    `EngineError` with the HTTP status for any other refusal. Weight updates raise `UpdateFailed`, and then the engine
    serves what it served before. Methods may be called concurrently.
    """

    url: str

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """POST /generate without streaming: one result, or a list of them for a batch (or `n` > 1).

        A result is `{"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens",
        "cached_tokens", "weight_version", "e2e_latency", "output_token_logprobs"?, ...}}`, where
        `output_token_logprobs` is `[[logprob, token_id, text | None], ...]`, natural log.
        """
        ...

    def stream(self, body: Mapping[str, Any], path: str = "/generate") -> AsyncIterator[dict[str, Any]]:
        """Server-sent chunks as dicts. `text`, `output_ids` and logprobs are cumulative in every chunk, or only what is
        new in it where the engine streams incrementally; `completion_tokens` counts all tokens so far either way.

        `meta_info.weight_version` of a chunk is the version that wrote the tokens new in that chunk. Closing the
        iterator early ends the request on the engine. `path` is `/generate` or one of `/v1/*`.
        """
        ...

    async def health(self, timeout: float) -> None:
        """Return if the engine's scheduler answers within `timeout` seconds, paused or not; else EngineUnavailable."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """Launch arguments and state (`version`, `weight_version`, parallel sizes, ...)."""
        ...

    async def model_info(self) -> dict[str, Any]:
        """`model_path`, `weight_version`, `model_type`, `architectures`, ..."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. `in_place` holds requests with their KV, `retract` holds them and recomputes their KV on
        resume, `abort` ends them (HTTP 200, partial output, `finish_reason.type` = `abort`). New requests wait."""
        ...

    async def resume(self) -> None:
        """Continue generating; requests that were held go on."""
        ...

    async def flush_cache(self) -> None:
        """Drop every cached prefix. EngineError (400) if requests are running or held, also after a short wait."""
        ...

    async def abort(self, rid: str | None = None) -> None:
        """End the request `rid` (also the members of a batch it names), or all requests if None."""
        ...

    async def update_from_disk(self, path: str, version: str, *, flush_cache: bool) -> None:
        """Load the complete checkpoint directory `path` (as the engine's host sees it) and stamp it `version`.

        Unpaused, this waits for running requests; paused, it is immediate. flush_cache: drop cached prefixes right
        after; EngineError (400) if new requests keep the engine from it, and then the new weights are served. With
        requests in flight use False and a cache key per version (`extra_key`).
        """
        ...

    async def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join a process group as ranks `rank_offset ...`; rank 0 (the trainer) must be joining at the same time."""
        ...

    async def destroy_group(self, group_name: str) -> None:
        """Leave the group. EngineError if it does not exist."""
        ...

    async def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str,
        flush_cache: bool,
        load_format: str | None = None,
    ) -> None:
        """Receive tensors broadcast by rank 0 of `group_name`, in order, and stamp `version`.

        names: HF names; dtypes: torch names (`bfloat16`). `load_format="flattened_bucket"`: one broadcast of a uint8
        tensor, the tensors' bytes one after another (`engine.tensors.flatten`).
        """
        ...

    async def update_from_tensor(
        self, serialized: Sequence[str], *, load_format: str | None, version: str, flush_cache: bool
    ) -> None:
        """Load pickled `[(name, tensor), ...]`, one base64 string per tensor-parallel rank
        (`engine.tensors.serialize`)."""
        ...

    async def weights_digest(self) -> dict[str, str]:
        """HF tensor name -> xxh3-128 (hex) of its raw bytes as they are served. Embedded engine only."""
        ...

    async def close(self) -> None:
        """Release connections. The engine itself goes on."""
        ...
