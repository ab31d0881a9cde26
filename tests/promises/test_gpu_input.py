"""What feeds a GPU: workers by default, samples that are small on the way, copies one step ahead. Without a GPU: by a
device that is the CPU (kit/fake_cuda), on which a run gives the same bits."""

import contextlib
import io
import os
import tarfile
from collections import namedtuple

import numpy as np
import pytest
import torch
from kit.fake_cuda import ON_FAKE
from kit.job import run
from PIL import Image
from torchvision.transforms import v2

from muster.data import loader
from muster.data.loader import LoaderConfig, batches
from muster.data.onto_device import one_ahead, onto
from muster.data.stream import Stream
from muster.errors import ConfigError, DataError
from muster.sample_plan import Plan, Share
from muster.train.data.digits import Digits
from muster.train.data.imagefolder import ImageFolder
from muster.train.data.shards import Shards

GIB = 2**30


def folder_of_images(root):
    (root / "train/cat").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 50, 3), dtype=np.uint8)
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(root / f"train/cat/{number}.png")
    return ImageFolder(train=True, root=str(root), image_size=16, augment=False)


def shards_of_images(root, *, image_size, pixels=None):
    (root / "train").mkdir(parents=True)
    if pixels is None:
        pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 50, 3), dtype=np.uint8)
    with tarfile.open(root / "train/000.tar", "w") as shard:
        for number, each in enumerate(pixels):
            stream = io.BytesIO()
            Image.fromarray(each).save(stream, "png")
            for ending, data in (("png", stream.getvalue()), ("cls", b"1")):
                entry = tarfile.TarInfo(f"{number:03d}.{ending}")
                entry.size = len(data)
                shard.addfile(entry, io.BytesIO(data))
    return Shards(True, root=str(root), input="png", target="cls", image_size=image_size, num_classes=2), pixels


@pytest.mark.unit
def test_pictures_of_shards_expand_to_the_same_bits(tmp_path):
    whole, pixels = shards_of_images(tmp_path / "whole", image_size=None)
    for data in (whole, shards_of_images(tmp_path / "resized", image_size=16)[0]):
        small = data.compact()[1][0]
        assert small.dtype == torch.uint8 and data[1][0].dtype == torch.float32
        assert torch.equal(data.expand(small), data[1][0]) and data[1][0].max() <= 1
    assert torch.equal(whole[1][0], torch.from_numpy(pixels[1]).permute(2, 0, 1).float() / 255)


@pytest.mark.unit
def test_compact_images_expand_to_the_same_bits(tmp_path):
    for data in (Digits(train=True, augment=True), Digits(train=False, augment=False), folder_of_images(tmp_path)):
        compact = data.compact()
        if hasattr(data, "__getitems__"):
            indices, keys = [2, 0, 1] * 9, np.arange(27, dtype=np.uint64)
            small, whole = compact.__getitems__(indices, keys)[0], data.__getitems__(indices, keys)[0]
        else:
            small, whole = compact[1][0], data[1][0]
        assert small.dtype == torch.uint8 and whole.dtype == torch.float32
        assert torch.equal(data.expand(small), whole)
        assert data[0][0].dtype == torch.float32, "the data set itself has not changed"


@pytest.mark.unit
@pytest.mark.unit
def test_pictures_of_16_bits_are_divided_and_not_cut_off(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    data, _ = shards_of_images(tmp_path, image_size=None, pixels=[ramp])
    assert torch.equal(data[0][0][2], torch.from_numpy((ramp // 257).astype(np.float32)) / 255)


@pytest.mark.unit
def test_a_picture_of_16_bits_in_a_folder_is_divided_too(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    (tmp_path / "train/cat").mkdir(parents=True)
    Image.fromarray(ramp).save(tmp_path / "train/cat/0.png")
    Image.fromarray((ramp // 257).astype(np.uint8)).save(tmp_path / "train/cat/1.png")
    data = ImageFolder(train=True, root=str(tmp_path), image_size=8, augment=False)
    assert torch.equal(data[0][0], data[1][0])
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "train/cat/2.tif")
    with pytest.raises(DataError, match=r"2\.tif: its pixels are of PIL's mode F"):
        ImageFolder(train=True, root=str(tmp_path), image_size=8, augment=False)[2]


def test_pictures_are_normalized_as_torchvision_does(tmp_path):
    data = folder_of_images(tmp_path)
    by_torchvision = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    )
    assert torch.equal(by_torchvision(data.compact()[0][0]), data[0][0])


@pytest.mark.unit
def test_one_item_is_made_ahead_and_an_error_comes_in_its_turn():
    made = []

    def items():
        for number in range(4):
            if number == 3:
                raise OSError("broken")
            made.append(number)
            yield number

    seen = one_ahead(items())
    assert next(seen) == 0 and made == [0, 1]
    assert next(seen) == 1 and made == [0, 1, 2]
    assert next(seen) == 2
    with pytest.raises(OSError, match="broken"):
        next(seen)
    assert list(one_ahead(iter([]))) == [] and list(one_ahead(iter([5]))) == [5]


class Recording:
    """A stream that notes in `calls` what it is asked for, with its own name."""

    def __init__(self, name, calls):
        self.name, self.calls, self.events = name, calls, 0

    def record_event(self):
        self.events += 1
        self.calls.append(f"{self.name} records {self.events}")
        return self.events

    def wait_event(self, event):
        self.calls.append(f"{self.name} waits for {event}")


@pytest.mark.unit
def test_a_step_waits_for_its_copy_and_holds_its_memory(monkeypatch):
    """Else a step would read what is not there yet, or the next copy overwrite what the step before still reads."""
    calls, current = [], []
    side, main = Recording("side", calls), Recording("main", calls)

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: [main, *current][-1])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, by: calls.append(f"{by.name} holds {int(self)}"))

    def move(item):
        calls.append(f"{[main, *current][-1].name} copies {int(item)}")
        return item

    items = iter(torch.tensor([7, 8]))
    for item in onto(torch.device("cuda", 0), items, move, tensors=lambda item: {"inputs": item}, ahead=False):
        calls.append(f"step {int(item)}")
    assert calls == [
        *("side copies 7", "side records 1", "main waits for 1", "main holds 7", "step 7"),
        *("side copies 8", "side records 2", "main waits for 2", "main holds 8", "step 8"),
    ]


@pytest.mark.unit
def test_small_samples_travel_and_the_device_expands_them(monkeypatch):
    data, travelled = Digits(train=True, augment=False), []
    monkeypatch.setattr(loader, "onto", lambda _, steps, move, **__: map(move, steps))
    monkeypatch.setattr(loader, "to", lambda _, value: travelled.append(value.dtype) or value)
    config = LoaderConfig(Share(0, 1), torch.device("cuda", 0))
    (batch,) = next(batches(data, Plan(8, 4, shuffle=False), range(1), config))
    assert travelled == [torch.uint8, torch.int64], "inputs and targets"
    assert torch.equal(batch.inputs, torch.stack([data[index][0] for index in range(4)]))


@pytest.fixture
def host(monkeypatch):
    """A host whose cores, ranks and free shared memory a test sets."""

    def has(*, cores, ranks, free):
        usage = namedtuple("usage", "free")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr(loader.os.path, "isdir", lambda _: True)
        monkeypatch.setattr(loader.shutil, "disk_usage", lambda _: usage(free))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return has


@pytest.mark.unit
def test_a_rank_has_its_share_of_the_cores_as_far_as_shared_memory_has_room(host):
    host(cores=96, ranks=8, free=1000 * GIB)
    assert loader.by_default(GIB // 64) == 12
    host(cores=256, ranks=8, free=1000 * GIB)
    assert loader.by_default(GIB // 64) == loader.MOST
    host(cores=96, ranks=8, free=GIB)  # of which half are for 8 ranks: 4 batches each, one of them at the trainer
    assert loader.by_default(GIB // 64) == 1
    host(cores=4, ranks=8, free=64 << 20)  # docker's default
    assert loader.by_default(GIB // 64) == 0


@pytest.mark.unit
def test_shared_memory_is_checked_for_all_ranks_of_a_host(host):
    host(cores=8, ranks=1, free=GIB)
    loader.check_shared_memory(GIB // 16, num_workers=4)
    host(cores=8, ranks=2, free=GIB)
    with pytest.raises(ConfigError, match=r"the 2 ranks of this host need about 1152\.0 MiB of /dev/shm, and 1024\.0"):
        loader.check_shared_memory(GIB // 16, num_workers=4)


class Numbers(torch.utils.data.IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter([(torch.tensor(float(number)), number) for number in range(8)])


@pytest.mark.parametrize("dataset, number", [(Digits(train=True, augment=False), 3), (Stream(Numbers()), 0)])
@pytest.mark.unit
def test_only_samples_that_can_be_read_by_index_have_workers_unasked(dataset, number, monkeypatch):
    """Each worker of a stream would read all of it."""
    chosen = []
    monkeypatch.setattr(loader, "by_default", lambda _: 3)
    monkeypatch.setattr(loader, "check_shared_memory", lambda _, num_workers: None)
    monkeypatch.setattr(loader, "DataLoader", lambda *_, num_workers, **__: chosen.append(num_workers) or [])
    monkeypatch.setattr(loader, "onto", lambda _, steps, *__, **___: steps)
    config = LoaderConfig(Share(0, 1), torch.device("cuda", 0), num_workers=None)
    list(batches(dataset, Plan(8, 4), range(0), config))
    assert chosen == [number]


LINE = ("data.augment=true", "batch_size=20", "micro_batch_size=7", "max_steps=8", "optimizer=adam")


def test_a_run_on_a_device_gives_the_bits_of_a_run_on_the_cpu(tmp_path):
    """Compact on the way, expanded there, copied a step ahead, loaded by workers: the samples are the same."""
    cpu = run(tmp_path / "cpu", *LINE)
    fake = run(tmp_path / "fake", *LINE, env=ON_FAKE | {"FAKE_CUDA_NAME": "NVIDIA H100 80GB HBM3"}, cold=True)
    assert fake.events("start")[0]["device"] == "cuda" and cpu.events("start")[0]["device"] == "cpu"
    assert fake.sha256 == cpu.sha256 and fake.losses == cpu.losses
    assert all("mfu" in line for line in fake.lines("train"))
    assert {line["peak_memory_gib"] for line in fake.lines("train")} == {3.0}  # what the fake device says


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_has_the_samples_of_a_run_on_the_cpu(tmp_path):
    cpu, gpu = (run(tmp_path / kind, *LINE, f"device={kind}", "tf32=false", cold=True) for kind in ("cpu", "cuda"))
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-3)
