"""A training script of a user's own: plain torch, written into a test's folder, and never a part of this repository."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''\
import argparse, json, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--fault", choices=["none", "always", "once", "again"], default="none")
parser.add_argument("words", nargs="*")
args = parser.parse_args()

told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
saved, done = args.out / "saved.pt", 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    done = state["step"]
print("start", done, json.dumps(sys.argv[1:]), "threads", torch.get_num_threads(), flush=True)
print(sorted({name.split(".")[0] for name in sys.modules} & {"train", "muster", "hydra"}), "are imported", flush=True)
with (args.out / f"attempts-{rank}").open("a") as file:
    file.write(f"{done}\\n")


def leave(code, *, together=True):
    """Leave at once: torch may abort a process that destroys a group alone, or whose interpreter ends while DDP holds one."""
    if together:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(code)


def fault():
    """What happens to the last rank before its third step."""
    first = (args.out / f"attempts-{rank}").read_text().count("\\n") == 1
    if args.fault == "always":
        leave(3, together=False)
    if args.fault == "once" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.fault == "again" and first:
        leave(75, together=False)


for step in range(done, args.steps):
    stop = torch.tensor(len(told))
    dist.all_reduce(stop)  # the ranks agree on where they stop
    if stop:
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, saved)
            print("saved", step, flush=True)
        dist.barrier()
        leave(75)
    if step == 2 and rank == dist.get_world_size() - 1:
        fault()
    model(torch.randn(4, 2)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    if rank == 0:
        with (args.out / "steps").open("a") as file:
            file.write(f"{step}\\n")
    pace = args.out / "pace"
    time.sleep(float(pace.read_text()) if pace.exists() else args.step_s)
print("done", flush=True)
leave(0)
'''


def write(folder: Path, *, name: str = "my script.py") -> Path:
    """Write the script into `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SOURCE)
    return path


def attempts(out: Path, *, rank: int = 0) -> list[int]:
    """The step at which each attempt of a rank began."""
    path = out / f"attempts-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def steps(out: Path) -> list[int]:
    """The steps that rank 0 has made, in order, of all attempts."""
    path = out / "steps"
    return [int(line) for line in path.read_text().splitlines() if line] if path.exists() else []
