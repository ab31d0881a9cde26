"""`python -m train`, and `muster`: the entry point of every rank under every launcher."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.faults import lost_output
from muster.faults.preemption import Preemption
from muster.process import end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muster.errors import ConfigError
    from muster.train.config.keys import Config


def main() -> None:
    """Run what sys.argv describes and end this process with the run's exit code (see muster/errors.py)."""
    lost_output.endure()
    preemption = Preemption()
    preemption.install()  # before the slow imports: a signal during startup is handled like any other
    gc.disable()  # until training begins: collections take a sixth of the time to import torch
    from muster.errors import Preempted
    from muster.faults import agent
    from muster.world.rendezvous import port

    port.hold()  # likewise: see there
    from muster.train.config.compose import run_each

    agent.die_with_it()
    jobs: list[tuple[str | None, int, Mapping[str, str]]] = []

    cut = 0

    def job(config: Config | ConfigError, values: Mapping[str, str]) -> int:
        nonlocal cut
        if cut:
            return cut
        agent.goes_on(bool(values))
        ended = run_attempt(config, preemption, is_swept=bool(values))
        jobs.append((getattr(config, "output_dir", None), ended, values))
        if values and ends_sweep(ended, getattr(config, "output_dir", None)):
            cut = ended
        return ended

    code = run_each(job)
    code = cut or code
    if jobs and jobs[-1][2]:  # a sweep, which has gone on after a run that a restart would not help
        agent.end_restarts(code)
    if len(jobs) > 1 and cut in (0, Preempted.exit_code) and os.environ.get("RANK", "0") == "0":
        from muster.report.sweep import SweptJob, print_table

        print_table([SweptJob(*each) for each in jobs])
    end(code)


def run_attempt(config: Config | ConfigError, preemption: Preemption, *, is_swept: bool) -> int:
    """Run one attempt. A config error is reported at once if there are no other ranks to inform.

    With other ranks, each run of a sweep is in a child of its own: the next one finds no threads, group or RPC of a run before.
    """
    from muster.errors import ConfigError, tell

    if isinstance(config, ConfigError) and "RANK" not in os.environ:
        tell(config)
        return config.exit_code
    from muster.recovery.supervisor import journal_for
    from muster.train.run import attempt  # imports torch, which --help does without

    journal = "" if isinstance(config, ConfigError) else journal_for(lambda: why_not_asked(config))
    if isinstance(journal, str) and not (is_swept and may_fork(config)):
        return attempt(config, preemption, why_no_survival=journal)
    from muster.errors import say, traceback_of
    from muster.recovery.journal import StepJournal
    from muster.recovery.supervisor import supervise
    from muster.recovery.survival import Survival
    from muster.world.rendezvous.meeting import code_hash
    from muster.world.rendezvous.network import store_for_supervisor

    code_hash()  # once for all incarnations
    most = 0 if isinstance(config, ConfigError) else config.dist.max_survivals_per_hour

    kept = (
        StepJournal(last=0) if isinstance(journal, str) else journal
    )  # without a journal a rank is not restarted in place
    store = store_for_supervisor() if meets_by_port(config) else None
    incarnation = supervise(kept, preemption=preemption, most_per_hour=most, store=store)
    if isinstance(incarnation, int):
        return incarnation
    code = 1
    try:
        how: dict[str, Any] = (
            {"why_no_survival": journal} if isinstance(journal, str) else {"survival": Survival(incarnation)}
        )
        code = attempt(config, preemption, **how)
    except BaseException as error:
        say(traceback_of(error))
    end(code)


def ends_sweep(code: int, folder: str | None) -> bool:
    """Return whether the rest of a sweep has to wait for the same command to be run again, as torchrun's agent does.

    It has after a request to stop; and after a rank was lost or has failed, which a restart may help: the other ranks would wait
    for it in each of the other runs. Without restarts left, a run that fails costs the sweep no other.
    """
    from muster import outcome
    from muster.errors import Preempted, RankLost, final
    from muster.world.environment import restarts_left

    if code in (0, *final()):
        return False
    is_lost = bool(folder) and outcome.last(Path(str(folder))).outcome == RankLost.outcome
    return code == Preempted.exit_code or is_lost or restarts_left()


def may_fork(config: Config | ConfigError) -> bool:
    """Return whether a run of several ranks works in a child of this process. Not seen on a GPU: there it runs here."""
    from muster.errors import ConfigError
    from muster.recovery.supervisor import why_no_fork
    from muster.recovery.survival import why_no_child
    from muster.world.environment import Environment

    try:
        environment = Environment.from_env("env://" if isinstance(config, ConfigError) else config.dist.init_method)
    except ConfigError:  # which the attempt reports
        return False
    has_gpu = Path("/dev/nvidiactl").exists() or (not isinstance(config, ConfigError) and config.device.name == "cuda")
    return (
        environment.world_size > 1
        and not has_gpu
        and not (meets_by_port(config) and why_no_child())
        and not why_no_fork()
    )


def meets_by_port(config: Config | ConfigError) -> bool:
    """Return whether the ranks meet at a port, and not through a file."""
    from muster.errors import ConfigError

    return isinstance(config, ConfigError) or config.dist.init_method == "env://"


def why_not_asked(config: Config) -> str | None:
    """Return why a rank that dies is not restarted in place; empty if it is, and None if the config does not ask for it."""
    from muster.loggers.tensorboard import import_writer
    from muster.train.in_process_restart import why_not
    from muster.world.environment import Environment

    if not config.dist.survive or Environment.from_env(config.dist.init_method).world_size == 1:
        return None
    if not (why := why_not(config)) and config.log.tensorboard and os.environ["RANK"] == "0":
        import_writer()
    return why


if __name__ == "__main__":
    main()
