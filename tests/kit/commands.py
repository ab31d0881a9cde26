"""`python`, `torchrun` and `muster` for the lines of a shell, which start warm (see `kit.warm`)."""

from __future__ import annotations

import contextlib
import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from kit import warm

MODULES = {"torchrun": ["torch.distributed.run"], "muster": ["muster"], "python": []}
CLIENT = """\
#!{python} -IS
import json, os, socket, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "python" and words[:2] not in (["-m", "train"], ["-m", "muster"]):
    os.execv(sys.executable, [sys.executable, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendall(json.dumps([name, words, dict(os.environ), os.getcwd(), os.getpid()]).encode() + b"\\n")
sys.exit(int(server.makefile().readline()))
"""
starts = threading.Lock()


@contextlib.contextmanager
def warm_commands(folder: Path) -> Iterator[Path]:
    """Write the three commands into `folder`, for a PATH, and start what they are called with."""
    address = str(folder / "starts")
    for name in MODULES:
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
    with socketserver.ThreadingUnixStreamServer(address, _Start) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder
        server.shutdown()


class _Start(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        name, words, env, cwd, pid = json.loads(self.rfile.readline())
        line = [sys.executable, "-m", *MODULES[name], *(words if MODULES[name] else words[1:])]
        with starts:
            process = warm.Popen(line, env=env, cwd=Path(cwd), log=Path(f"/proc/{pid}/fd/1"))
        code = process.wait()
        self.wfile.write(f"{code if code >= 0 else 128 - code}\n".encode())
