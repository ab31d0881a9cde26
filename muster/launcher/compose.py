"""docker/compose.yaml: node containers, and a rendezvous store in a container of its own."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from muster.errors import ConfigError
from muster.launcher.script import script_of
from muster.launcher.spec import Dynamic, Spec, Timings
from muster.launcher.variables import text, whole

STORE_PORT = 29400
TIMINGS = Timings(join_timeout=120, last_call_timeout=2, keep_alive_max_attempt=3, read_timeout=10)  # one machine
MAX_RESTARTS = 100  # nodes are killed deliberately here


def own_address() -> str:
    """Return this container's address, preferably of IPv4; unlike its name, the whole network knows it."""
    found = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)]
    return str(min(found, key=lambda address: ":" in str(address)))


def spec(env: Mapping[str, str], *, address: Callable[[], str] = own_address) -> Spec:
    """Raises ConfigError."""
    return Spec(
        nnodes=f"1:{whole(env, 'NODES', least=1)}",
        nproc=text(env, "NPROC"),
        max_restarts=MAX_RESTARTS,
        rendezvous=Dynamic(
            endpoint=f"store:{STORE_PORT}", id=text(env, "RUN"), is_host=False, timings=TIMINGS, awaits_host=False
        ),
        local_addr=address(),
        grace_s=whole(env, "GRACE_S"),
        threads=whole(env, "OMP_NUM_THREADS", default=1, least=1),
        job=f"compose:{env.get('PROJECT', '')}/{text(env, 'RUN')}",
    )


def overrides(env: Mapping[str, str], given: Sequence[str] = ()) -> list[str]:
    """Return the words of `ARGS`, split as by a shell, and `given`; for the trainer after the run's name. Raises ConfigError."""
    try:
        words = [*shlex.split(env.get("ARGS", "")), *given]
    except ValueError as error:
        raise ConfigError(f"ARGS={env['ARGS']} cannot be split into overrides: {error}; close every quote") from None
    return words if script_of(words) else [f"name={text(env, 'RUN')}", *words]


def end_of_script(env: Mapping[str, str]) -> Path:
    """Return the file that a node writes when a script has ended, for the store. Raises ConfigError."""
    return Path("runs", text(env, "RUN"), "launch.json")
