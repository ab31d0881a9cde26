"""One rank of `muster.launch(function)`: `python -m muster.launcher.rank FOLDER`, started by the agent in elastic.py."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

from muster.errors import ConfigError, MusterError, final, one_line, say, traceback_of
from muster.faults import agent, lost_output
from muster.process import end, launcher_pid


def main(given: list[str]) -> None:
    lost_output.endure()
    agent.die_with_it()
    folder, rank = Path(given[0]), int(os.environ["RANK"])
    failed = folder / f"failed-{rank}"
    failed.unlink(missing_ok=True)  # of the previous attempt
    try:
        value = packed(call(folder))
    except Exception as error:
        if not isinstance(error, MusterError):
            say(traceback_of(error))
        kind = "" if isinstance(error, MusterError) else f"{type(error).__name__}: "
        code = error.exit_code if isinstance(error, MusterError) else 1
        said = {"time": time.monotonic(), "rank": rank, "exit_code": code, "message": f"{kind}{one_line(error)}"}
        draft = folder / f".failed-{rank}"
        draft.write_text(json.dumps(said), encoding="utf-8")
        draft.rename(failed)
        if code in final():
            os.kill(launcher_pid(), signal.SIGTERM)  # end the agent: a restart would fail in the same way
        end(code)  # without the teardown of a broken process group: it may hang or abort
    (folder / f"value-{rank}").write_bytes(value)


def call(folder: Path) -> Any:
    """Call the function; destroy a process group that it has left open."""
    function, args = pickle.loads((folder / "call").read_bytes())
    value = function(*args)
    if "torch.distributed" in sys.modules:
        dist = sys.modules["torch.distributed"]
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return value


def packed(value: Any) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigError(
            f"a {type(value).__name__} cannot be sent back: {one_line(error)}; return numbers, text, CPU tensors or "
            "containers of them"
        ) from error


if __name__ == "__main__":
    main(sys.argv[1:])
