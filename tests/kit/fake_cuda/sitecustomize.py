"""A machine with FAKE_CUDA devices that are its CPU, for runs of what is written for GPUs on a machine without one.

With this folder in PYTHONPATH and FAKE_CUDA=2 in its environment, a process sees two devices. A tensor for a device is a
tensor in memory, NCCL is gloo, streams and events do nothing, and compilation is left out. So it shows that the lines run,
in which order they copy, and nothing of a GPU: no kernel, no speed, no memory, no error of CUDA or NCCL.
"""

import os

NAME = os.environ.get("FAKE_CUDA_NAME", "Fake GPU")


def pretend(number):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.overrides import TorchFunctionMode

    def here(place):
        if isinstance(place, torch.device) and place.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(place, str) and place.startswith("cuda") else place

    class OnCpu(TorchFunctionMode):
        """Creates and copies in memory what a call asks a device for."""

        def __torch_function__(self, called, types, args=(), kwargs=None):
            kwargs = {**(kwargs or {}), **({"pin_memory": False} if (kwargs or {}).get("pin_memory") else {})}
            if called is torch.device or getattr(called, "__name__", "") == "__new__":
                return called(*args, **kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = here(kwargs["device"])
            return called(*[here(each) if isinstance(each, torch.device | str) else each for each in args], **kwargs)

    class Event:
        def __init__(self, **_):
            self.at = 0.0

        def record(self, *_):
            import time

            self.at = time.perf_counter()

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

        def query(self):
            return True

        def synchronize(self):
            pass

    class Stream:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def record_event(self, *_):
            event = Event()
            event.record()
            return event

        def query(self):
            return True

        def wait_event(self, event):
            assert isinstance(event, Event)

        def wait_stream(self, stream):
            assert isinstance(stream, Stream)

        def synchronize(self):
            pass

    class Properties:
        name, uuid, total_memory, major, minor = NAME, "00000000-0000-0000-0000-000000000000", 80 << 30, 9, 0

    current = [0]

    def set_device(device):
        index = device if isinstance(device, int) else torch.device(device).index
        assert index is not None and 0 <= index < number, f"no fake device {device}"
        current[0] = index

    def answer(value=None):  # each a function of its own: torch._dynamo has a table of them
        return lambda *_: value

    cuda = torch.cuda
    cuda.is_available, cuda.is_initialized = answer(True), answer(True)
    cuda.device_count, cuda.current_device, cuda.set_device = answer(number), lambda: current[0], set_device
    cuda.Event, cuda.Stream, cuda.current_stream = Event, Stream, lambda *_: Stream()
    cuda.stream = lambda stream: stream
    for name in (
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_rng_state",
        "reset_peak_memory_stats",
    ):
        setattr(cuda, name, answer())
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.mem_get_info, cuda.max_memory_allocated = answer((79 << 30, 80 << 30)), answer(3 << 30)
    cuda.get_device_name, cuda.get_device_properties = answer(NAME), answer(Properties())
    cuda.nccl.version = answer((2, 0, 0))
    torch.accelerator.is_available = answer(False)  # a DataLoader would pin in a thread
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.compile = lambda model=None, **_: model if model is not None else lambda each: each
    torch.nn.Module.compile = lambda self, *_, **__: None
    for check in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(torch.optim.Optimizer, check, lambda self: None)

    class Autocast(torch.autocast):
        def __init__(self, device_type, *args, **kwargs):
            super().__init__(here(device_type), *args, **kwargs)

    scaler, start, wrap = torch.amp.GradScaler, dist.init_process_group, DistributedDataParallel.__init__
    torch.autocast = torch.amp.autocast = Autocast
    torch.amp.GradScaler = lambda device="cuda", **options: scaler(here(device), **options)

    def init_process_group(backend=None, **options):
        options.pop("device_id", None)
        return start("gloo", **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    DistributedDataParallel.__init__ = lambda self, module, device_ids=None, **options: wrap(self, module, **options)
    OnCpu().__enter__()


if os.environ.get("FAKE_CUDA"):
    pretend(int(os.environ["FAKE_CUDA"]))
