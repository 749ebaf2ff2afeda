"""Flags and life that the gateway and replica commands share: where to listen, token, TLS, logging, until a signal.

No routes and no rules here; plumbing of the HTTP servers themselves is `server`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles_disagg.config.machine import port_problem
from miles_disagg.config.secrets import exposure_problems, read_token, token_problems
from miles_disagg.domain.errors import ConfigError


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a server certificate (chain) and its private key."""

    certificate: str
    key: str

    def context(self) -> ssl.SSLContext:
        """For a server; ConfigError names the files."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(Path(self.certificate).expanduser(), Path(self.key).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise ConfigError([f"--tls-cert {self.certificate}, --tls-key {self.key}: {error}"]) from None
        return context


@dataclass(frozen=True)
class Listen:
    """Where a server listens and how it is reached. token: asked of clients and sent to peers."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    token: str | None = None
    tls: TlsFiles | None = None


def add_arguments(parser: argparse.ArgumentParser, *, port: int, what: str) -> None:
    """Declare the shared flags."""
    group = parser.add_argument_group("listening")
    group.add_argument("--host", default="127.0.0.1", help=f"address that the {what} listens on (default: loopback)")
    group.add_argument("--port", type=int, default=port, help=f"0: any free one (default: {port})")
    group.add_argument("--advertise-host", help="name under which others reach it, if it is not --host")
    group.add_argument("--auth-token-file", help="file with a bearer token, asked of clients and sent to peers")
    group.add_argument("--tls-cert", help="PEM file of the server's certificate chain")
    group.add_argument("--tls-key", help="PEM file of its private key")
    parser.add_argument("--verbose", action="store_true", help="log at INFO instead of WARNING")


def listen_problems(args: argparse.Namespace) -> Iterator[str]:
    """What is wrong with the shared flags."""
    if not 0 <= args.port < 65536:
        yield f"--port {args.port} is not in [0, 65535]"
    elif args.port and (problem := port_problem(args.host, args.port)):
        yield f"--host {args.host} --port {args.port}: {problem}"
    if args.auth_token_file:
        yield from token_problems("--auth-token-file", args.auth_token_file)
    yield from exposure_problems("--host", args.host, args.auth_token_file)
    if bool(args.tls_cert) != bool(args.tls_key):
        yield "--tls-cert and --tls-key go together: give both"


def listen_from(args: argparse.Namespace) -> Listen:
    """The checked flags. ConfigError for all problems at once is the caller's."""
    tls = TlsFiles(args.tls_cert, args.tls_key) if args.tls_cert else None
    return Listen(args.host, args.port, args.advertise_host, read_token(args.auth_token_file), tls)


def log_to_stderr(verbose: bool) -> None:
    """Reasons go to standard error, one line each; never the text of a request."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form)
    logging.getLogger("miles_disagg").setLevel(logging.INFO if verbose else logging.WARNING)


def until_signal() -> asyncio.Event:
    """An event that SIGINT or SIGTERM sets."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
