"""A GPU that is the CPU: `cuda` tensors are CPU tensors, NCCL is gloo, and what waits for the device is counted.

`python -m kit.fake_gpu OVERRIDES` is `python -m train` on it. It shows where the kit synchronizes and what it asks torch for;
not whether that works on a GPU.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from muster.train.callbacks.base import Callback

READS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "argwhere",
    "masked_select",
    "repeat_interleave",
    "unique",
    "unique_consecutive",
    "is_nonzero",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
}
"""Functions of tensors for which the host waits until the device has computed the value, or the size of the result."""
COPIES = {"to", "cuda", "copy_"}
"""Methods that wait unless they are asked not to block, if one side is in the host's memory."""
waits = Counter[str]()
"""What waited for the device, and where."""


def wait(what: str) -> None:
    """Count a synchronization, with the line of the kit that asked for it."""
    ours = [each for each in traceback.extract_stack() if "/train/" in each.filename or "/muster/" in each.filename]
    waits[f"{what} in {ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}" if ours else what] += 1


class Mapped(TorchFunctionMode):
    """Runs what is asked of a CUDA device on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if func is torch.device or name == "__new__":
            return func(*args, **kwargs)
        if name == "pin_memory":
            return args[0]
        if name in READS and args and isinstance(args[0], torch.Tensor):
            wait(name)
        if name == "__getitem__" and any(map(_is_mask, args[1] if isinstance(args[1], tuple) else args[1:])):
            wait("a boolean mask")
        on_device = any(map(_is_cuda, (*args, kwargs.get("device"))))
        blocks = not kwargs.get("non_blocking") and not any(each is True for each in args)
        if name in COPIES and blocks and (on_device or name != "to"):
            wait(f"{name}, blocking")
        if name == "cuda":
            return args[0]
        if on_device and name == "tensor":
            wait("torch.tensor")  # from memory that is not page-locked
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        args = tuple(_mapped(each) for each in args)
        return func(*args, **{key: _mapped(each) for key, each in kwargs.items()})


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value[:4] == "cuda"
    )


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def _mapped(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value


class Event:
    """An event that has always passed."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        wait("event.synchronize")


class Stream:
    """A stream whose work is done at once."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None: ...  # the device waits, and not the host
    def wait_stream(self, stream: Stream) -> None: ...
    def synchronize(self) -> None:
        wait("stream.synchronize")


def install(count: int = 1) -> None:
    """Give this process `count` GPUs, until it ends."""
    cuda = torch.cuda
    given = {
        "is_available": lambda: True, "device_count": lambda: count, "current_device": lambda: 0, "set_device": lambda _: None,
        "is_initialized": lambda: True, "synchronize": lambda *_: wait("cuda.synchronize"), "Event": Event,
        "Stream": Stream, "current_stream": lambda *_: Stream(), "stream": lambda stream: stream, "get_device_name": lambda *_: "a fake", "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None, "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None,
        "mem_get_info": lambda *_: (79 << 30, 80 << 30), "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
    }  # fmt: skip
    for name, value in given.items():
        mock.patch.object(cuda, name, value).start()
    mock.patch.object(torch.accelerator, "is_available", lambda: False).start()  # a DataLoader would pin in a thread
    mock.patch.object(torch.Tensor, "record_stream", lambda *_: None).start()
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        mock.patch.object(torch.optim.Optimizer, name, lambda self: None, create=True).start()
    autocast, scaler, form = torch.autocast, torch.amp.GradScaler, dist.init_process_group
    wrap = DistributedDataParallel.__init__

    class Autocast(autocast):  # type: ignore[valid-type, misc]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any):
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def init(_: str, *, device_id: Any = None, **kwargs: Any) -> None:
        form("gloo", **kwargs)

    mock.patch.object(torch, "autocast", Autocast).start()
    mock.patch.object(torch.amp, "GradScaler", lambda _, **kwargs: scaler("cpu", **kwargs)).start()
    mock.patch.object(dist, "init_process_group", init).start()
    on_cpu = lambda self, module, device_ids=None, **kwargs: wrap(self, module, **kwargs)  # noqa: E731
    mock.patch.object(DistributedDataParallel, "__init__", on_cpu).start()
    Mapped().__enter__()


class Waits(Callback):
    """Writes waits.json: after each step, how often anything has waited for the device so far, and for how many steps the
    heartbeat says that the device has computed the gradients."""

    def on_start(self, run: Any) -> None:
        self.after: list[dict[str, int]] = []
        self.gradients: list[int] = []

    def on_step_end(self, run: Any) -> None:
        self.after.append(dict(waits))
        self.gradients.append(run.running.peers.heartbeat.phases.now(0).gradients)

    def on_end(self, run: Any) -> None:
        if run.world.is_first:
            Path(run.config.output_dir, "waits.json").write_text(json.dumps([self.after, self.gradients]))


if __name__ == "__main__":
    from kit import fake_gpu  # the module of the callback, which this one is not
    from kit.front import run

    fake_gpu.install(2)
    run()
