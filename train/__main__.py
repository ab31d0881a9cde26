"""`python -m train`, and `muster`: the entry point of every rank under every launcher."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import TYPE_CHECKING

from muster.faults import output
from muster.faults.preemption import Preemption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muster.errors import ConfigError
    from muster.faults.keeper import Life
    from muster.faults.notes import Notes
    from muster.train.config.keys import Config


def main() -> None:
    """Run what sys.argv describes and end this process with the run's exit code (see muster/errors.py)."""
    output.endure()
    preemption = Preemption()
    preemption.install()  # before the slow imports: a signal during startup is handled like any other
    gc.disable()  # until training begins: collections take a sixth of the time to import torch
    from muster.faults import agent
    from muster.train.config.compose import run_each

    agent.die_with_it()
    jobs: list[tuple[str | None, int, Mapping[str, str]]] = []

    def job(config: Config | ConfigError, values: Mapping[str, str]) -> int:
        ended = run_attempt(config, preemption)
        jobs.append((getattr(config, "output_dir", None), ended, values))
        return ended

    code = run_each(job)
    if len(jobs) > 1 and os.environ.get("RANK", "0") == "0":
        from muster.report.sweep import SweptJob, print_table

        print_table([SweptJob(*each) for each in jobs])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter teardown: it restores SIGTERM's default action, so that the launcher's signal would hide the exit
    # code, and torch's C++ threads may abort the process during it ("terminate called without an active exception").
    os._exit(code)


def run_attempt(config: Config | ConfigError, preemption: Preemption) -> int:
    """Run one attempt. A config error is reported at once if there are no other ranks to inform."""
    from muster.errors import ConfigError
    from muster.job.exit import tell

    if isinstance(config, ConfigError) and "RANK" not in os.environ:
        tell(config)
        return config.exit_code
    from muster.train.run import attempt  # imports torch, which --help does without

    if isinstance(config, ConfigError) or not (notes := notes_of(config)):
        return attempt(config, preemption)
    from muster.dist.place import Place
    from muster.dist.rendezvous.meeting import code_hash
    from muster.dist.rendezvous.network import host_store
    from muster.faults.keeper import keep
    from muster.job.survival import Survival

    code_hash()  # once for all lives
    most = config.dist.max_survivals_per_hour
    store = host_store if Place.from_env().hosts_store else None

    def live(life: Life) -> int:
        return attempt(config, preemption, Survival(life))

    return keep(live, notes, preemption=preemption, most_per_hour=most, store=store)


def notes_of(config: Config) -> Notes | None:
    """Return memory for the notes of a rank that is born again if it dies; None for one that is not.

    Rank 0 prints why it is not although the config asks for it.
    """
    from muster.dist.place import Place
    from muster.errors import ConfigError, say
    from muster.faults.notes import Notes
    from muster.train.live import why_not

    try:
        if not config.dist.survive or Place.from_env(config.dist.init_method).world_size == 1:
            return None
    except ConfigError:  # which the attempt reports
        return None
    why = why_not(config)
    why = why or ("" if sys.platform == "linux" else f"{sys.platform} is not Linux")
    why = why or ("" if "TORCHELASTIC_RUN_ID" in os.environ else "it is not started by torchrun")
    with contextlib.suppress(OSError):
        if not why:
            return Notes()
    if os.environ.get("RANK") == "0":
        why = why or "the system gives no memory for its notes"
        say(f"muster: dist.survive=true has no effect: a rank that dies restarts all ranks ({why})")
    return None


if __name__ == "__main__":
    main()
