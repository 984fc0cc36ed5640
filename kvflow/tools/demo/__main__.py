"""The demo's engines as programs: ``python -m kvflow.tools.demo prefill|decode|monolithic``."""

import argparse
import logging
import os
import sys
from pathlib import Path

import uvloop

import kvflow
from kvflow.errors import KvflowError
from kvflow.observability.logs import configure_logging
from kvflow.tools.demo.engine import CompletionService, open_engine, serve

SEEDS = {"prefill": 1, "decode": 2, "monolithic": 3}
"""Of the order of blocks: different on every side, so that nothing is right by accident."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; every flag can be given as an environment variable, for containers."""
    parser = argparse.ArgumentParser(prog="python -m kvflow.tools.demo", description=__doc__)
    parser.add_argument("role", choices=sorted(SEEDS))
    flags = {
        "--layout": ("BHLNC", "layout of the cache"),
        "--kv": ("content", "K and V side by side (content), or apart (split)"),
        "--listen": ("127.0.0.1:0", "host:port for the router's requests"),
        "--bind": ("tcp://127.0.0.1:0", "endpoint of the worker for its peers"),
        "--advertise": (None, "the same as peers reach it; needed if --bind is a wildcard"),
        "--tcp-bind": (None, "endpoint on which the TCP plane listens; the host of --bind and a free port by default"),
        "--tcp-advertise": (None, "the same as peers reach it; needed where a port is mapped"),
        "--tcp-encryption": ("off", "off or tls: whether the TCP plane encrypts; the same on both sides"),
        "--http": (None, "host:port for the worker's metrics; none by default"),
        "--http-public": ("false", "true or false: whether --http may be an address that other hosts reach"),
        "--engine-id": (None, "name of the engine; the role by default"),
        "--log": (None, "file for the log, JSON lines; standard error by default"),
    }
    for flag, (default, text) in flags.items():
        variable = f"KVFLOW_DEMO_{flag.strip('-').replace('-', '_').upper()}"
        parser.add_argument(flag, default=os.environ.get(variable, default), help=f"{text} [{variable}]")
    return parser


async def run(options: argparse.Namespace) -> None:
    """Run one engine until it is told to stop."""
    async with open_engine(layout=options.layout, kv=options.kv, seed=SEEDS[options.role]) as engine:
        if options.role == "monolithic":
            return await serve(CompletionService(engine), options.listen)
        names = ("bind", "advertise", "tcp_bind", "tcp_advertise", "tcp_encryption", "http", "http_public")
        settings = {name: getattr(options, name) for name in names}
        config = kvflow.WorkerConfig.read({"engine_id": options.engine_id or options.role, **settings})
        async with kvflow.open_worker(config, engine.cache) as worker:
            return await serve(CompletionService(engine, worker), options.listen)


def main() -> None:
    """Run the engine that the command line names."""
    options = build_parser().parse_args()
    configure_logging(Path(options.log) if options.log else None)
    if options.log:
        logging.getLogger("kvflow.transfer").setLevel(logging.DEBUG)  # each read and block, for kvflow trace
    try:
        uvloop.run(run(options))
    except KvflowError as error:
        sys.exit(f"python -m kvflow.tools.demo {options.role}: {error}")


if __name__ == "__main__":
    main()
