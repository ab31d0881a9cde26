"""From the command line to an exit code: compose the config, make one attempt at the run, say in one line how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from train import config as schema
from train.component import arguments, locate
from train.config import Config
from train.errors import ConfigError, MusterError, RankLost, environment_error, nearest
from train.heartbeat import BEAT_S, Heartbeat
from train.preemption import Preemption

if TYPE_CHECKING:
    from train.loop import Run
    from train.world import World

FIRST_CAUSE_WAIT_S = 1.0  # a rank that fails by itself says so at once; one that was killed says nothing
SILENCE_S = 0.3  # and beats no more
FINAL = range(2, 8)


def main(preemption: Preemption | None) -> int:
    """Run `python -m train` with sys.argv and give back the exit code; without `preemption`, only check the config."""
    die_with_launcher()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's own handler prints a traceback and exits 1: let its errors reach us
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first and {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"} & set(sys.argv):
        return 0
    schema.register()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")  # type: ignore[untyped-decorator]
    def job(composed: DictConfig) -> None:
        codes.append(attempt(composed, preemption))

    try:
        job()
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        return attempt(explain(error), preemption)
    return max(codes, default=0)


def conf_folder() -> Path:
    """conf/ of the checkout, or the copy of it inside the installed package."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def attempt(composed: DictConfig | ConfigError, preemption: Preemption | None) -> int:
    """One attempt at one run. A config that did not compose is reported the same way, on all ranks' behalf."""
    config = checked(composed)
    if isinstance(config, ConfigError) and ("RANK" not in os.environ or preemption is None):
        tell(config)
        return config.exit_code
    if preemption is None:
        print(Path(config.output_dir).resolve() if isinstance(config, Config) else "")
        return 0
    from train import world as worlds  # torch: not for --help, and not to report a slip of the keyboard

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
        place = worlds.Place.from_env()
        if isinstance(config, ConfigError):
            worlds.meet(place, config=None, error=config, timeout_s=schema.Dist().start_timeout_s)
            raise config
        folder = Path(config.output_dir)
        world = worlds.start(config, place)
        from train.run import carry_out, prepare

        def on_hang(error: RankLost) -> None:
            code = error.exit_code
            try:
                code = quit_with(error)
            finally:
                os._exit(code)

        heartbeat = Heartbeat(world, timeout_s=config.dist.timeout_s, on_hang=on_hang)
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
        named = type(error).__module__ == "torch.distributed" or re.search(r"\bgloo\b|\bNCCL\b", str(error))
        return quit_with(error, lost=bool(of_torch and named))


def checked(composed: DictConfig | ConfigError) -> Config | ConfigError:
    """The typed config with everything checked that can be checked without other ranks, or what is wrong with it."""
    if isinstance(composed, ConfigError):
        return composed
    try:
        config = schema.from_hydra(composed)
        for group in schema.GROUPS:
            component = getattr(config, group)
            arguments(component, locate(component, key=group), key=group)
    except ConfigError as error:
        return error
    except OmegaConfBaseException as error:
        return explain(error)
    return own_folder(config) if HydraConfig.get().mode == RunMode.MULTIRUN else config


def own_folder(config: Config) -> Config:
    """Each job of a sweep is a run, and each run has a folder of its own, named by what is swept."""
    job = HydraConfig.get()
    if any(re.match(r"\+*(output_dir|name)=", text) for text in job.overrides.task):
        return config
    given = OverridesParser.create().parse_overrides([text for text in sys.argv[1:] if re.match(r"[^-][^=]*=", text)])
    keys = {override.key_or_group for override in given if override.is_sweep_override()}
    swept = ",".join(text for text in job.overrides.task if text.lstrip("+").split("=")[0] in keys) or str(job.job.num)
    name = re.sub(r"[^\w.=,+-]+", "_", swept)
    storage = config.checkpoint.storage
    checkpoint = replace(config.checkpoint, storage=storage and f"{storage.rstrip('/')}/{name}")
    return replace(config, output_dir=f"{config.output_dir}/{name}", checkpoint=checkpoint)


def leave(
    error: BaseException,
    world: World | None,
    folder: Path | None,
    *,
    step: int | None,
    heartbeat: Heartbeat | None,
    lost: bool = False,
) -> int:
    """Report `error` once for all ranks, write outcome.json, and give the exit code."""
    from train import outcome
    from train.world import Unheard

    code = error.exit_code if isinstance(error, MusterError) else 1
    tell_agent(error)
    if world is None:
        if isinstance(error, Unheard) or os.environ.get("RANK", "0") == "0" or not isinstance(error, MusterError):
            tell(error)
        end_restarts(code)
        return code
    if heartbeat:
        heartbeat.begin("leaving after step", step or 0)
    if lost:
        if heartbeat:
            heartbeat.watch()
        if first := world.first_failure(FIRST_CAUSE_WAIT_S, enough=lambda: heartbeat and heartbeat.silence(SILENCE_S)):
            return quit_group(world, heartbeat, int(first["exit_code"]))
        time.sleep(2 * BEAT_S)  # the store may be gone so suddenly that nobody has noticed yet
        error = (heartbeat and heartbeat.silence(SILENCE_S)) or RankLost(
            f"rank {world.rank} on {socket.gethostname()} lost contact with another rank, which gave no reason: {one_line(error)[:300]}"
        )
    told = outcome.read(folder) if folder else {}
    if isinstance(error, RankLost) and told.get("attempt") == world.attempt and told.get("outcome") != outcome.RUNNING:
        return quit_group(world, heartbeat, int(told["exit_code"]))  # the first cause, from a rank that is gone
    known = isinstance(error, MusterError)
    record = {
        "outcome": error.outcome if isinstance(error, MusterError) else "failed",
        "exit_code": code,
        "step": step,
        "rank": world.rank,
        "failed_host": socket.gethostname(),
        "error": one_line(error) if known else f"{type(error).__name__}: {one_line(error)}",
        "traceback": traceback.format_exc() if lost or not known else None,
    }
    if isinstance(error, RankLost) and error.rank is not None:
        record |= {"rank": error.rank, "failed_host": error.host}
    mine = json.dumps(record)
    first = world.claim_failure(json.loads(mine))
    if json.dumps(first) == mine:
        tell(error)
        if folder and folder.is_dir() and outcome.is_latest(folder, world.attempt):
            kept = {key: value for key, value in outcome.read(folder).items() if key in ("furthest", "idle_attempts")}
            with contextlib.suppress(MusterError):  # it could not be written; the line above said why
                outcome.write(folder, attempt=world.attempt, **{**kept, **first})
    return quit_group(world, heartbeat, int(first["exit_code"]) if known else code)


def quit_group(world: World, heartbeat: Heartbeat | None, code: int) -> int:
    """Leave without waiting for ranks that may be gone: destroying a broken group can block."""
    end_restarts(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if world.size > 1:
        world.hold_store(heartbeat.gone if heartbeat else ())
        os._exit(code)
    return code


def end_restarts(code: int) -> None:
    """Have torchrun's agent stop too, where a restart would only fail the same way again."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if code in FINAL and restarts and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def tell(error: BaseException) -> None:
    """One line for what a person can act on; the traceback for what is a defect."""
    if isinstance(error, MusterError):
        print(f"muster: {error.outcome.replace('_', ' ')}: {one_line(error)}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def tell_agent(error: BaseException) -> None:
    """Give torchrun the reason for its own report, through the file that it names for that."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = one_line(error) if isinstance(error, MusterError) else traceback.format_exc()
        message = {
            "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(message))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def explain(error: Exception) -> ConfigError:
    """Say what Hydra or OmegaConf found in one line, with the nearest valid name."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(error)
    if match := re.search(r"Could not (?:override|delete from config) '([^']+)'", text):
        return unknown_key(match[1])
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, option = match[1], match[2]
        options = available(group)
        if not options:
            return ConfigError(f"{group}={option}: there is no config group {group}; {nearest(group, schema.GROUPS)}")
        own = f", or {group}._target_=your.Own" if group in schema.GROUPS else ""
        return ConfigError(f"{group}={option} is unknown; {nearest(option, options)}{own}")
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        return unknown_key(match[1])
    if key := getattr(cause, "full_key", None):
        reason = one_line(cause).split(" full_key:")[0]
        if "Interpolation" in type(cause).__name__ or "nterpolation" in reason:
            return ConfigError(f"{key}: {reason}")
        return ConfigError(f"{key}: {reason}; see `python -m train --help` for its type")
    if (
        override := getattr(error, "override", None)
        or (re.findall(r"Error parsing override '(.*)'", text) or [None])[0]
    ):
        return ConfigError(
            f"cannot read the override {override!r}: write key=value, with quotes around a value that has = or blanks in it: key=\"'a=b'\""
        )
    return ConfigError(f"{one_line(error)}: write overrides as key=value")


def unknown_key(key: str) -> ConfigError:
    parent, _, last = key.rpartition(".")
    names = known_keys(parent)
    if elsewhere := [known for known in all_keys() if known.endswith(f".{last}")]:
        return ConfigError(f"unknown key {key}; did you mean {' or '.join(elsewhere[:3])}?")
    if names is None:
        return ConfigError(f"unknown key {key}; {nearest(key.split('.')[0], known_keys('') or [])}")
    own = f"; for a parameter of your own class write +{key}=..." if parent in schema.GROUPS else ""
    return ConfigError(f"unknown key {key}; {nearest(last, names)}{own}")


def known_keys(parent: str) -> list[str] | None:
    """Keys below `parent`; of a group, those of all its options. None if there is no such place."""
    tree: Any = schema.to_dict(Config())
    if parent in schema.GROUPS:
        return sorted({key for option in schema.SCHEMAS[parent].values() for key in schema.to_dict(option())})
    for part in parent.split(".") if parent else []:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return sorted(tree) if isinstance(tree, dict) else None


def all_keys() -> list[str]:
    """Every key of the schema by its full name, those of all options included."""
    options = [f"{group}.{key}" for group in schema.GROUPS for key in known_keys(group) or [] if key != "_target_"]
    return sorted({*options, *schema.flatten(Config())})


def available(group: str) -> list[str]:
    folder = conf_folder() / group
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder.is_dir() else []


def die_with_launcher() -> None:
    """Under torchrun, die when the agent dies: an orphan would train on beside the worker that replaces it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
