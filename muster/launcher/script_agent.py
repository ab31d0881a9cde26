"""torchrun for a user's own script: an agent that exits with what its ranks' exit codes mean.

torchrun exits with 1 for every failure, and a script writes no outcome.json. This agent exits with

    0      all ranks are done
    75     a rank left with 75, or the agent was told to stop before a rank began, or before a script's muster.Job did
    69     the nodes did not meet, or lost each other
    1-74   a rank failed with this code, the largest of several; 1 stands for a signal and for any other code

An error of the script's own code that ends two starts in a row within a minute would end any other: the agent fails at once.
It writes a rank's error to the file CAUSE.

After a failure the agent ends the node's other ranks by SIGTERM. Their exit codes do not count: a script that always fails
and saves on SIGTERM would be run again for ever.

torchrun.py loads this file by its path; so it imports nothing of the kit, either.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from torch.distributed import PrefixStore, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api as launcher

COME_BACK, UNMET, LARGEST = 75, 69, 74  # EX_TEMPFAIL and EX_UNAVAILABLE of sysexits.h
FINAL = range(2, 8)
"""Exit codes of a Job's errors that a restart would only repeat (muster.errors.final)."""
CAUSE = "MUSTER_CAUSE"
"""Variable with the file for the cause; execute.py repeats the name."""
MEETS_AT = "MUSTER_MEETS_AT"
"""Variable with the host of the rendezvous, if there are several nodes; execute.py repeats the name."""
interfaces: Any = None
store_client: Any = None
"""muster/world/rendezvous/interfaces.py and muster/world/store_client.py, which torchrun.py loads by their paths."""
EARLY_S = 60.0
OF_CODE = (
    "ArgumentError|AssertionError|AttributeError|FileNotFoundError|ImportError|IndentationError|IndexError|KeyError|"
    "ModuleNotFoundError|NameError|NotImplementedError|SyntaxError|TabError|TypeError|ValueError|ZeroDivisionError|"
    r"RuntimeError(?!.*(?i:cuda|hip |cudnn|nccl|gloo|memory|connect|peer|time.?out|timed|socket|store|worker))"
)
"""Errors that repeat at every start. Any other may come from the network, a device, a disk or another rank."""
OF_ARGPARSE = 2
TAIL = 40  # lines of a rank's errors that are kept
GROUP_S = 120.0  # a script may prepare its data before it forms a process group
STEADY_S = 600.0
"""After ranks have worked for this long, a failure is the first in a row again."""
POLL_S = 0.2
LEAVES_S = 2.0  # from the first closed connection of a rank that leaves to the end of its process
STUCK_S = 30.0  # longer than any read_timeout that the launchers pass in --rdzv-conf
MOST = 2000  # characters of a line that are kept
LAST_LINES_S = 2.0  # a process that a rank has left behind may hold its output open
LISTENS = "0A"
"""TCP_LISTEN of the kernel, as /proc/net/tcp has it."""
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec


def main() -> int:
    vars(launcher)["LocalElasticAgent"] = ScriptAgent
    vars(api)["get_subprocess_handler"] = Rank
    told = False
    try:
        run.main()
        return 0
    except SignalException:
        told = True
    except ChildFailedError:
        pass
    except Exception:
        if ScriptAgent.newest and ScriptAgent.newest.is_done():
            return 0
        traceback.print_exc()
        return UNMET
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # all that is left is to say how the ranks ended
        agent = ScriptAgent.newest
        ranks = agent.ranks() if agent else []
        for each in ranks:
            each.end_output()
    ended = {each.rank: each.proc.poll() for each in ranks if told or not each.is_told}
    for each in ranks:
        if ended.get(each.rank) not in (0, None):
            print(f"muster: {each.described()}", file=sys.stderr, flush=True)
    _note_cause([each for each in ranks if ended.get(each.rank) not in (0, None, COME_BACK)])
    codes = {
        rank: -signal.SIGKILL if code is None else code for rank, code in ended.items()
    }  # a rank dies with its agent
    if (
        told and agent and agent.is_restarting
    ):  # they had failed before; a rank that no restart helps has told the agent so
        codes = {each.rank: codes[each.rank] for each in ranks if each.is_final()}
    return exit_code(codes, told=told, is_job=agent is not None and agent.makes_job())


def exit_code(ended: Mapping[int, int], *, told: bool, is_job: bool = False) -> int:
    """Return the agent's exit code.

    ended: by rank, negative for a signal; without ranks that the agent ended because another one had failed.
    told: the agent got a stop signal. is_job: see `ScriptAgent.makes_job`.
    """
    codes = [*ended.values()]
    has_not_begun = not codes or (is_job and {*codes} == {-signal.SIGTERM})
    if COME_BACK in codes or (told and has_not_begun):
        return COME_BACK
    failed = [code for code in codes if code != 0]
    if not failed:
        return 0 if told else 1
    return max((code for code in failed if 0 < code <= LARGEST and code != UNMET), default=1)


def _note_cause(failed: list[Rank]) -> None:
    """Write the cause: first an error of a rank's own code, of which the others may be consequences."""
    path = os.environ.get(CAUSE)
    if path and failed:
        first = min(failed, key=lambda each: (not each.is_of_code(), not each.cause()))
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(first.described())


class ScriptAgent(LocalElasticAgent):
    """torch's agent, with a bound on failures in a row, no restart after exit code 75, and an end if it hangs."""

    newest: ScriptAgent | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.began = 0.0
        self.early = ""  # the error of the script's code that has ended the newest start early
        self.is_restarting = False
        """True from a failure, after which all ranks are to restart, until they have been started."""
        self.is_group_seen = False  # or there is nothing to see, or it is said already
        self.looks: int | None = None  # how often it has looked at its ranks; None while it waits for other nodes
        ScriptAgent.newest = self
        threading.Thread(target=self._watch, daemon=True).start()

    def ranks(self) -> list[Rank]:
        """Return this node's ranks, ended ones included."""
        return [*getattr(self._pcontext, "subprocess_handlers", {}).values()]

    def is_done(self) -> bool:
        """Return whether all ranks of this node have ended with 0."""
        return bool(self.ranks()) and all(each.proc.poll() == 0 for each in self.ranks())

    def makes_job(self) -> bool:
        """Return whether the script, as far as its own code shows, trains in a muster.Job, which saves on SIGTERM."""
        words = [str(each) for each in self._worker_group.spec.args]
        at = next((number for number, word in enumerate(words) if word == "-m" or word[:1] != "-"), None)
        if at is None:
            return False
        folder = words[at + 1].replace(".", "/") if words[at] == "-m" and words[at + 1 :] else ""
        for path in (f"{folder}.py", f"{folder}/__main__.py") if folder else (words[at],):
            with contextlib.suppress(OSError, ValueError, SyntaxError):
                return _makes_job(ast.parse(Path(path).read_text(encoding="utf-8")))
        return False

    def _start_workers(self, worker_group: WorkerGroup) -> Any:
        self._choose_interface(worker_group)
        self.began = time.monotonic()
        return super()._start_workers(worker_group)

    def _choose_interface(self, worker_group: WorkerGroup) -> None:
        """Have gloo announce an address that other hosts reach, where this host's own name has a loopback address."""
        host, store, hosts = os.environ.get(MEETS_AT), worker_group.store, worker_group.group_world_size or 1
        if not host or not store or hosts == 1:
            return
        client = store_client.Client(PrefixStore("muster", store), Counter())
        found = interfaces.interface_to(host, partial(client.exchange_address, of=hosts))
        if found and interfaces.is_known_as_loopback():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Restart the ranks, unless one is about to fail by itself: then torch's loop finds its exit code next.

        A rank closes its connections before its process ends. So a rank of another node may fail, and its agent wait for this
        one, while the rank that leaves with 75 here still seems to work.
        """
        others_wait, self.looks = self.looks is not None, None
        if not (others_wait and self._fails_within(LEAVES_S)):
            self.is_restarting = True
            super()._restart_workers(worker_group)
        self.is_restarting = False

    def _fails_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(each.proc.poll() for each in self.ranks()):
                return True
            time.sleep(POLL_S / 2)
        return False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        try:
            result: RunResult = super()._monitor_workers(worker_group)
        except SignalException:  # perhaps while the others are ended, as one has failed
            self.is_restarting = self._remaining_restarts > 0 and any(each.is_told for each in self.ranks())
            raise
        self.looks = (self.looks or 0) + 1 if result.state == WorkerState.HEALTHY else None
        self._see_group(is_over=result.state == WorkerState.SUCCEEDED)
        if result.is_failed():
            self.is_restarting = True
            failed = [each for each in self.ranks() if each.proc.poll() and not each.is_told]
            if any(each.proc.poll() == COME_BACK for each in failed):
                self._remaining_restarts = 0
            elif time.monotonic() - self.began > STEADY_S:
                self._remaining_restarts, self.early = worker_group.spec.max_restarts, ""
            elif self._ended_alike(failed):
                self._remaining_restarts = 0
            self._say_restart(failed, worker_group.spec.max_restarts)
            self.is_restarting = self._remaining_restarts > 0
        return result

    def _see_group(self, *, is_over: bool) -> None:
        """Say once if the ranks seem to train each by itself: nothing listens where rank 0 of a process group does."""
        first = next((each for each in self.ranks() if each.rank == 0), None)
        if self.is_group_seen or first is None or first.world_size == 1:
            return
        self.is_group_seen = listens(first.port)
        if not self.is_group_seen and (is_over or time.monotonic() - self.began > GROUP_S):
            self.is_group_seen = True
            print(
                f"muster: note: the {first.world_size} ranks have formed no process group at MASTER_PORT={first.port}"
                f"{'' if is_over else f' in {GROUP_S:.0f} s'}: unless they meet in another way{'' if is_over else ', or later'}, each trains by "
                "itself, on all samples; a script that is to train on several ranks calls torch.distributed.init_process_group(), or is a muster.Job",
                file=sys.stderr,
                flush=True,
            )

    def _ended_alike(self, failed: list[Rank]) -> bool:
        """Whether this start and the one before ended early with the same error of the script's own code."""
        deadline = time.monotonic() + LAST_LINES_S
        for each in failed:
            each.end_output(deadline)
        before, lasted = self.early, time.monotonic() - self.began
        found = sorted({each.cause() for each in failed if each.is_of_code()})
        self.early = "; ".join(found) if lasted < EARLY_S else ""
        return bool(self.early) and self.early == before

    def _say_restart(self, failed: list[Rank], most: int) -> None:
        if failed and self._remaining_restarts:
            said = "; ".join(each.described() for each in failed)
            number = most - self._remaining_restarts + 1
            print(f"muster: {said}: all ranks restart ({number} of at most {most})", file=sys.stderr, flush=True)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **named: Any) -> None:
        super()._shutdown(signal.SIGTERM, *more, **named)  # after Ctrl-C too: SIGTERM is what a script handles

    def _watch(self) -> None:
        """End the ranks and this process if the agent hangs between two looks at its ranks (see muster/faults/agent.py).

        Meanwhile its ranks would work on beside those of a job that was started again elsewhere.
        """
        unseen_s, before = 0.0, None
        while unseen_s < STUCK_S:
            time.sleep(POLL_S)
            unseen_s = unseen_s + POLL_S if before == self.looks is not None else 0.0
            before = self.looks
        print(
            f"muster: this node has lost the rendezvous store for {STUCK_S:.0f} s: its ranks are ended", file=sys.stderr
        )
        assert self._pcontext
        self._pcontext.close(signal.SIGTERM)
        for each in self.ranks():
            each.end_output()
        os._exit(COME_BACK if COME_BACK in [each.proc.poll() for each in self.ranks()] else UNMET)


class Rank(SubprocessHandler):
    """A rank's process. It dies with the agent. `is_told`: the agent has sent it a signal to end."""

    is_told = False

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        self.told = env.get("TORCHELASTIC_ERROR_FILE", "")
        self.rank, self.world_size, self.port = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["MASTER_PORT"])
        alone, parent = self.world_size == 1, os.getpid()
        # On a terminal, one rank alone keeps it for its progress bars, and its error stays in sight.
        out = None if alone else subprocess.PIPE
        err = None if alone and sys.stderr.isatty() else subprocess.PIPE
        process = subprocess.Popen(
            args, env=env, stdout=out, stderr=err, start_new_session=True, preexec_fn=lambda: _die_with(parent)
        )
        mark, self.tail = "" if alone else f"[{self.rank}] ", deque[bytes](maxlen=TAIL)
        streams: list[tuple[Any, ...]] = [(process.stdout, sys.stdout.buffer, mark)] if out else []
        if err:
            streams.append((process.stderr, sys.stderr.buffer, mark, self.tail))
        self.output = [threading.Thread(target=_copy, args=each, daemon=True) for each in streams]
        for each in self.output:
            each.start()
        return process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        self.is_told = True
        super().close(death_sig)

    def described(self) -> str:
        """Say how this rank ended, and its error and line if its last lines say so."""
        code = self.proc.poll() or 0
        how = f"left with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        return f"rank {self.rank} {how}" + (f": {self.cause()}" if code > 0 and self.cause() else "")

    def is_final(self) -> bool:
        """Whether a Job has ended for a reason that a restart does not lift: then a rank ends the agent, too, by SIGTERM."""
        return self.proc.poll() in FINAL and bool(told_in(self.told))

    def cause(self) -> str:
        """Return `FILE:LINE: ERROR` of the last traceback on standard error, or else what the rank has told torchrun; empty without either."""
        has_traceback = any(b"Traceback (most recent call last)" in line for line in self.tail)
        return (not has_traceback and told_in(self.told)) or ": ".join(filter(None, self._error()))

    def _error(self) -> tuple[str, str]:
        # torch's excepthook begins each line with the rank.
        lines = [re.sub(r"^\[rank\d+\]: ", "", line.decode(errors="replace").rstrip()) for line in self.tail]
        begins = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        lines = lines[begins[-1] :] if begins else lines
        places = [at for at, line in enumerate(lines) if re.match(r'  File ".+", line \d+', line)]
        if not places:
            return "", next((line for line in lines[-1:] if re.match(r"\S+: error: ", line)), "")  # argparse's
        own = [at for at in places if "site-packages" not in lines[at] and "/lib/python" not in lines[at]] or places
        place = re.match(r'  File "(.+)", line (\d+)', lines[own[-1]])
        error = next((line for line in lines[places[-1] + 1 :] if re.match(r"[A-Za-z_][\w.]*(:|$)", line)), "")
        return (f"{place[1]}:{place[2]}", error) if place and error else ("", "")

    def is_of_code(self) -> bool:
        """Whether this rank ended by an error of the script's own code that no other error caused."""
        chained = any(b"the direct cause of" in line or b"During handling of" in line for line in self.tail)
        place, error = self._error()
        if not place:
            return self.proc.poll() == OF_ARGPARSE and bool(error)
        found = re.match(rf"([\w.]+\.)?({OF_CODE})(:|$)", error)
        return self.proc.poll() == 1 and not chained and bool(found)  # 1 is that of an exception that nobody caught

    def end_output(self, deadline: float | None = None) -> None:
        """Wait for a rank's last lines until `deadline` on the monotonic clock."""
        deadline = deadline or time.monotonic() + LAST_LINES_S
        for each in self.output:
            each.join(max(0.0, deadline - time.monotonic()))


def _makes_job(script: ast.Module) -> bool:
    nodes = [*ast.walk(script)]
    names = {
        "muster",
        *(
            each.asname
            for node in nodes
            if isinstance(node, ast.Import)
            for each in node.names
            if each.name == "muster"
        ),
    }
    return any(
        (node.module in ("muster", "muster.job") and any(each.name == "Job" for each in node.names))
        if isinstance(node, ast.ImportFrom)
        else isinstance(node, ast.Attribute) and node.attr == "Job" and getattr(node.value, "id", "") in names
        for node in nodes
    )


def told_in(path: str) -> str:
    """Return the message in an error file of torchrun's, in one line; empty without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        return " ".join(str(told["message"] if isinstance(told, dict) else told).split())
    return ""


def listens(port: int) -> bool:
    """Whether a process in this network namespace listens at `port`; True if that cannot be known."""
    found = False
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            found = True
            for _, local, _, state, *_ in map(str.split, lines):
                if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                    return True
    return not found


def _die_with(parent: int) -> None:
    """Between fork and exec: die with the agent. See PR_SET_PDEATHSIG in prctl(2)."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _copy(source: IO[bytes], sink: IO[bytes], before: str, tail: deque[bytes] | None = None) -> None:
    """Copy a rank's output, each line in one write after `before`, and the last ones to `tail`. `\\r` ends a line: progress bars.

    An unfinished line is searched only where it has grown: the rank waits while this reads.
    """
    mark, rest = before.encode(), list[bytes]()
    while chunk := source.read1():  # type: ignore[attr-defined]
        *lines, last = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", chunk)
        if lines:
            lines[0] = b"".join([*rest, lines[0]])
            _write(sink, b"".join(mark + line for line in lines))
            if tail is not None:
                tail.extend(line[:MOST] for line in lines)
            rest = []
        rest += [last] if last else []
    _write(sink, mark + b"".join(rest) + b"\n" if rest else b"")


def _write(sink: IO[bytes], text: bytes) -> None:
    with contextlib.suppress(OSError):  # no reader is left: the rank must not block on a full pipe
        sink.write(text)
        sink.flush()
