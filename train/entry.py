"""From the command line to an exit code: compose the config and make one attempt at the run."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from train.config.compose import run_each
from train.config.keys import Config, Dist
from train.errors import ConfigError, MusterError, RankLost, environment_error
from train.faults import agent
from train.faults.exit import leave, tell
from train.faults.heartbeat import Heartbeat
from train.faults.preemption import Preemption

if TYPE_CHECKING:
    from train.dist.world import World
    from train.loop import Run


def main(preemption: Preemption | None) -> int:
    """Run `python -m train` with sys.argv and give back the exit code; without `preemption`, only check the config."""
    agent.die_with_it()
    return run_each(lambda config: attempt(config, preemption))


def attempt(config: Config | ConfigError, preemption: Preemption | None) -> int:
    """One attempt at one run. A config that did not compose is reported the same way, on all ranks' behalf."""
    if isinstance(config, ConfigError) and ("RANK" not in os.environ or preemption is None):
        tell(config)
        return config.exit_code
    if preemption is None:
        print(Path(config.output_dir).resolve() if isinstance(config, Config) else "", file=sys.__stdout__)
        return 0
    from train.dist.meeting import meet  # torch: not for --help, and not to report a slip of the keyboard
    from train.dist.place import Place
    from train.dist.world import START_S, start

    world: World | None = None
    run: Run | None = None
    folder: Path | None = None
    heartbeat: Heartbeat | None = None
    leaving = threading.Lock()

    def quit_with(error: BaseException, *, lost: bool = False) -> int:
        leaving.acquire()  # the main thread or the heartbeat's, whichever comes first; the other waits for the end
        if run and run.held:  # also where a thread ends the process and nothing is unwound
            run.held.let_go()
        return leave(error, world, folder, step=run.step if run else None, heartbeat=heartbeat, lost=lost)

    try:
        place = Place.from_env()
        if isinstance(config, ConfigError):
            timeout_s = Dist().start_timeout_s
            meet(place, config=None, error=config, timeout_s=timeout_s, stopping=lambda: preemption.signalled)
            raise config
        folder = Path(config.output_dir)
        world = start(config, place, stopping=lambda: preemption.signalled)
        from train.run import carry_out, prepare

        def on_hang(error: RankLost) -> None:
            code = error.exit_code
            try:
                code = quit_with(error)
            finally:
                os._exit(code)

        heartbeat = Heartbeat(world, timeout_s=config.dist.timeout_s, start_s=START_S, on_hang=on_hang)
        if world.size > 1 or "TORCHELASTIC_RUN_ID" in os.environ:  # somebody waits, or starts what was ended again
            heartbeat.start()
        run = prepare(config, world, preemption, heartbeat)
        gc.freeze()  # what has been imported stays: no need ever to look at it again
        gc.enable()
        carry_out(run)
        heartbeat.close()
        world.close()
        return 0
    except MusterError as error:
        return quit_with(error)
    except KeyboardInterrupt:
        return quit_with(RankLost("interrupted from the keyboard; the same command goes on from the last checkpoint"))
    except Exception as error:
        if limit := environment_error(error):
            return quit_with(limit)
        of_torch = isinstance(error, RuntimeError) and world is not None and world.size > 1
        named = type(error).__module__ == "torch.distributed" or re.search(r"\bgloo\b|NCCL|nccl", str(error))
        return quit_with(error, lost=bool(of_torch and named))
