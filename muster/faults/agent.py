"""Interaction of a worker with its torchrun agent: die with it, report to it, stop its restarts, end it if it hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from muster import process
from muster.errors import final, say
from muster.faults import lost_output
from muster.redact import redacted

POLL_S = 0.1
STUCK_S = 30.0  # longer than any read_timeout that the launchers pass in --rdzv-conf
LAST_WORDS_S = 10.0
ASLEEP_S = 0.5
_goes_on = False


def die_with_it() -> None:
    """Under torchrun, die when the agent dies: an orphan would train on beside the worker that replaces it."""
    if _is_there():
        process.die_with_parent()


def tell(text: str) -> None:
    """Write the reason to torchrun's error file: its own report then ends with it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = redacted(text)
        message = {
            "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(message), encoding="utf-8")


def goes_on(yes: bool) -> None:
    """Set whether this process goes on with a sweep's next run when one has ended."""
    global _goes_on
    _goes_on = yes


def end_restarts(code: int, *, process_ends: bool = True) -> None:
    """Stop torchrun's agent, too, if a restart would fail in the same way. `process_ends`: a sweep does not go on after this end."""
    if _goes_on and not process_ends:
        return
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if code in final() and restarts and os.environ.get("LOCAL_RANK") == "0":
        terminate(process.launcher_pid())


def terminate(pid: int) -> None:
    """Send SIGTERM to an agent while it sleeps between two looks at its workers.

    A running one may be in `subprocess.Popen.poll`, where its handler's exception can leave a lock taken (see
    `take_signals_between_looks` in launcher/torchrun.py): in a simulation on a busy machine 5 of 16,600 were.
    """
    deadline = time.monotonic() + ASLEEP_S
    while _state(pid)[0] == "R" and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(pid, signal.SIGTERM)


def end_if_stuck() -> None:
    """End the agent if it has not noticed its worker's end after `STUCK_S`.

    If the rendezvous store's host vanishes without closing its connections (power, link), an agent whose read timed out waits
    for the answer without a timeout (`TCPStore::doWait`), until the kernel gives up after about 15 minutes (tcp_retries2 in
    tcp(7)). Meanwhile its keep-alive thread holds the lock of its main loop (`DynamicRendezvousHandler.num_nodes_waiting`).
    """
    if _is_there() and os.environ.get("LOCAL_RANK") == "0":  # all ranks of the node leave
        process.start_detached("muster.faults.agent", str(process.worker_pid()), str(process.launcher_pid()))


def main() -> None:
    """`python -m muster.faults.agent WORKER AGENT`: pids of a worker that is about to leave, and of the agent that must notice it."""
    worker, agent = map(int, sys.argv[1:])
    unseen_s = 0.0
    while unseen_s < STUCK_S:
        state, parent = _state(worker)
        if parent != agent:
            return
        if state == "Z" and _state(agent)[0] != "T":
            unseen_s += POLL_S
        time.sleep(POLL_S)
    say(
        "muster: torchrun's agent hangs, perhaps because the host of the rendezvous store is lost: killing the agent, "
        "so that its launcher restarts it"
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGTERM)
        deadline = time.monotonic() + LAST_WORDS_S
        while _state(worker)[1] == agent and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if _state(worker)[1] == agent:
            os.kill(agent, signal.SIGKILL)


def _is_there() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux"


def _state(pid: int) -> tuple[str, int]:
    """Return a process's state and its parent's pid; ("", 0) if it is gone."""
    state, parent, *_ = process.stat_of(pid) or ("", "0")
    return state, int(parent)


if __name__ == "__main__":
    lost_output.endure()
    main()
