"""Run a rendezvous store in a process of its own: `muster launch store`.

c10d rendezvous keeps its state in a store that one of the agents hosts, and the job dies with that node. With the store
here, and `is_host=0` for every agent, any training node may die, including the first.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from muster import outcome
from muster.errors import final
from muster.launcher.compose import STORE_PORT
from muster.launcher.script import script_of

# After these outcomes no agent comes back by itself, so the store is no longer needed.
ENDED = ("done", *final().values())
POLL_S = 1.0
# After any other outcome a new attempt begins within this time, or none does.
LONGEST_PAUSE_S = 60.0


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="muster launch store", description=__doc__)
    parser.add_argument("--port", type=int, default=STORE_PORT)
    parser.add_argument("--host", default="", help="listen only at this address: the store has no authentication")
    parser.add_argument("--until-end-of", type=Path, metavar="OUTPUT_DIR", help="exit when this run has ended")
    parser.add_argument("--until-written", type=Path, metavar="FILE", help="exit when this file has been written")
    parser.add_argument(
        "--linger", type=float, default=5.0, metavar="S", help="seconds to wait after the end (default: 5)"
    )
    arguments = parser.parse_args(given)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    from datetime import timedelta

    from torch.distributed import TCPStore

    listener = _listener(arguments.host, arguments.port)  # torch's own socket would listen on all interfaces
    store = TCPStore(
        arguments.host or "0.0.0.0",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    print(f"rendezvous store on {socket.gethostname()}:{store.port}", flush=True)
    # A script's own muster.Job may write there, too, and the script goes on after it.
    ended = () if script_of(shlex.split(os.environ.get("ARGS", ""))) else ENDED
    started, since, last = time.time(), time.monotonic(), None
    while not stop.wait(POLL_S):
        if arguments.until_written and _written(arguments.until_written) > started:
            stop.wait(arguments.linger)
            return
        record = outcome.read(arguments.until_end_of) if arguments.until_end_of else {}
        word = record.get("outcome") if float(record.get("time", 0)) > started else None
        if word != last:
            since, last = time.monotonic(), word
        patience = arguments.linger if word in ended else LONGEST_PAUSE_S
        is_over = word in ended or word not in (None, outcome.RUNNING, *ENDED)
        if is_over and time.monotonic() - since >= patience:
            print(f"the run has ended: {word}", flush=True)
            return


def _listener(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
