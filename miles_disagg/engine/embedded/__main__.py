"""`miles-disagg engine`: the embedded engine as a process of its own.

Parses and checks its arguments before importing torch; exits by itself when its parent dies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_disagg.domain.errors import MilesDisaggError


def parser() -> argparse.ArgumentParser:
    """Flags, named as SGLang's where SGLang has them."""
    p = argparse.ArgumentParser(prog="miles-disagg engine", description="SGLang-compatible engine for CPU and GPU")
    p.add_argument("--model-path", required=True, type=Path, help="Hugging Face checkpoint directory")
    p.add_argument("--port", type=int, default=30000, help="0 picks a free one and prints it")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    p.add_argument("--max-running-requests", type=int, default=64, help="sequences decoded together")
    p.add_argument("--context-length", type=int, help="default: what the model was made for")
    p.add_argument("--max-total-tokens", type=int, help="size of the KV cache in tokens; default: by memory")
    p.add_argument("--max-prefill-tokens", type=int, default=8192, help="prompt tokens run in one forward pass")
    p.add_argument("--stream-interval", type=int, default=1, help="tokens between two chunks of a stream")
    p.add_argument(
        "--decode-interval", type=float, default=0.0, help="least seconds per decode step: imitates a slower engine"
    )
    p.add_argument("--weight-version", default="default", help="version stamp of the checkpoint at start")
    p.add_argument("--served-model-name", help="default: the model path")
    p.add_argument("--api-key", help="demand it as a bearer token")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of one forward pass")
    p.add_argument("--update-timeout", type=float, default=300.0, help="seconds a weight-update group may wait")
    p.add_argument("--parent-pid", type=int, help="exit when this process is no longer the parent")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status; a start that cannot work is one line on stderr."""
    args = parser().parse_args(argv)
    if problem := _check(args):
        print(f"miles-disagg engine: {problem}", file=sys.stderr)
        return 2
    if args.parent_pid is not None:
        threading.Thread(target=_exit_with_parent, args=(args.parent_pid,), daemon=True).start()
    try:
        return asyncio.run(_serve(args))
    except (MilesDisaggError, OSError) as e:
        print(f"miles-disagg engine: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _check(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, found before anything heavy is imported."""
    for name in ("max_running_requests", "max_prefill_tokens", "stream_interval", "threads"):
        if getattr(args, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
    if not 0 <= args.decode_interval < 60:
        return f"--decode-interval {args.decode_interval} is not in [0, 60) seconds"
    for name in ("context_length", "max_total_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 2:
            return f"--{name.replace('_', '-')} must be at least 2, got {getattr(args, name)}"
    if not 0 <= args.port < 65536:
        return f"--port {args.port} is not in [0, 65535]"
    if not args.model_path.is_dir():
        return f"--model-path {args.model_path} is not a directory"
    try:
        family, _, _, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        return f"--host {args.host} --port {args.port} cannot be listened on: {e.strerror or e}; choose another --port"
    return None


def _exit_with_parent(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(0.5)
    os._exit(0)


async def _serve(args: argparse.Namespace) -> int:
    started = time.monotonic()
    scheduler, text, limits, groups, launched = await asyncio.to_thread(_load, args)
    from miles_disagg.engine.embedded.control import Control
    from miles_disagg.engine.embedded.generation import Generation
    from miles_disagg.engine.embedded.server import build_app, serve

    control = Control(scheduler, groups, launched)
    app = build_app(Generation(scheduler, text, limits), control, args.api_key)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready(port: int) -> None:
        seconds = time.monotonic() - started
        print(f"miles-disagg engine: serving {args.model_path} on {args.host}:{port} ({seconds:.1f} s)", flush=True)

    async def watch() -> None:
        while scheduler.fatal is None:
            await asyncio.sleep(0.2)
        stop.set()

    scheduler.start()
    watcher = asyncio.create_task(watch())
    try:
        await serve(app, args.host, args.port, ready, stop)
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    if scheduler.fatal is not None:
        print(f"miles-disagg engine: the scheduler failed: {scheduler.fatal!r}", file=sys.stderr, flush=True)
        return 1
    await asyncio.to_thread(scheduler.stop)
    return 0


def _load(args: argparse.Namespace) -> tuple[Any, Any, Any, Any, Any]:
    """Everything heavy: imports, checkpoint, model."""
    import torch

    torch.set_num_threads(args.threads)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise MilesDisaggError(f"--device {args.device}: no CUDA device is visible to this process")
    from importlib.metadata import version

    from miles_disagg.engine.embedded.control import Launched
    from miles_disagg.engine.embedded.requests import Limits
    from miles_disagg.engine.embedded.runner import ModelRunner
    from miles_disagg.engine.embedded.scheduler import Scheduler
    from miles_disagg.engine.embedded.text import Text, end_tokens
    from miles_disagg.engine.embedded.weights import UpdateGroups
    from miles_disagg.engine.tensors import dtype_name

    runner = ModelRunner(
        args.model_path,
        device=args.device,
        dtype=args.dtype,
        max_running_requests=args.max_running_requests,
        context_length=args.context_length,
        max_total_tokens=args.max_total_tokens,
        max_prefill_tokens=args.max_prefill_tokens,
    )
    text = Text(args.model_path)
    eos = end_tokens(args.model_path, runner.config, text)
    scheduler = Scheduler(runner, text, eos, args.weight_version, args.stream_interval, args.decode_interval)
    launched = Launched(
        model_path=str(args.model_path),
        served_model_name=args.served_model_name or str(args.model_path),
        architectures=runner.config.architectures,
        model_type=runner.config.model_type,
        dtype=dtype_name(runner.dtype),
        device=args.device,
        context_length=runner.context_length,
        max_running_requests=args.max_running_requests,
        max_total_tokens=runner.cache.max_tokens,
        version=version("miles-disagg"),
    )
    groups = UpdateGroups(runner.device, args.update_timeout)
    return scheduler, text, Limits(runner.vocab_size, runner.context_length), groups, launched


if __name__ == "__main__":
    sys.exit(main())
