"""The real loaders on small files in the real formats, and the keyed randomness."""

import pickle
import random
import struct
from functools import partial

import numpy as np
import pytest
import torch
from kit.job import run
from kit.ranks import on_ranks
from PIL import Image

from muster.data.draw_detection import Watch
from muster.data.fetch import Fetch
from muster.data.fingerprint import fingerprint, note_of
from muster.data.generators import kept_generators, seed_generators, state_of_generators
from muster.data.loader import LoaderConfig, batches
from muster.errors import DataError
from muster.sample_plan import MicroBatch, Plan, Share, sample_keys
from muster.train.data.cifar10 import Cifar10, read_cifar_batch
from muster.train.data.digits import Digits
from muster.train.data.imagefolder import ImageFolder
from muster.train.data.images import shift_and_flip
from muster.train.data.mnist import Mnist
from muster.train.data.synthetic import Synthetic
from muster.train.data.text import Text


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def mnist(tmp_path):
    random = np.random.default_rng(0)
    for prefix, count in (("train", 60), ("t10k", 20)):
        write_idx(tmp_path / f"MNIST/raw/{prefix}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)))
        write_idx(tmp_path / f"MNIST/raw/{prefix}-labels-idx1-ubyte", random.integers(0, 10, count))
    return tmp_path


@pytest.fixture
def cifar(tmp_path):
    random = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*Cifar10.TRAIN, *Cifar10.TEST):
        batch = {
            b"data": random.integers(0, 256, (20, 3072), dtype=np.uint8),
            b"labels": random.integers(0, 10, 20).tolist(),
            b"batch_label": b"x",
            b"filenames": [b"a"] * 20,
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for n in range(6):
                Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(
                    tmp_path / split / label / f"{n}.png"
                )
    return tmp_path


@pytest.mark.unit
def test_mnist_reads_idx(mnist):
    data = Mnist(train=True, root=str(mnist), augment=False)
    images, labels = data.__getitems__([0, 59])
    raw = (mnist / "MNIST/raw/train-images-idx3-ubyte").read_bytes()[16:]
    pixels = np.frombuffer(raw, np.uint8).reshape(60, 28, 28)
    assert images.shape == (2, 1, 28, 28) and labels.dtype == torch.int64
    assert torch.allclose(images[1, 0] * 0.3081 + 0.1307, torch.from_numpy(pixels[59] / 255).float(), atol=1e-5)
    assert len(Mnist(train=False, root=str(mnist), augment=False)) == 20


@pytest.mark.unit
def test_cifar_reads_batches(cifar):
    data = Cifar10(train=True, root=str(cifar), augment=False)
    assert len(data) == 100 and data[0][0].shape == (3, 32, 32)
    assert len(Cifar10(train=False, root=str(cifar), augment=False)) == 20


@pytest.mark.unit
def test_a_cifar_batch_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            import os

            return os.system, ("touch evil",)

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}))
    with pytest.raises(DataError, match="system"):
        read_cifar_batch(tmp_path / "data_batch_1")


@pytest.mark.unit
def test_image_folder(folder):
    data = ImageFolder(train=True, root=str(folder), image_size=16, augment=True)
    assert (len(data), data.num_classes, data[0][0].shape, data[11][1]) == (12, 2, (3, 16, 16), 1)
    (folder / "train/cat/0.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"0\.png"):
        data[0]


@pytest.mark.nightly
def test_text_defaults_to_the_standard_library():
    data = Text(train=True, root=None, pattern="**/*.py", block_size=64)
    inputs, targets = data.__getitems__([0, len(data) - 1])
    assert len(data) > 50_000 and inputs.shape == targets.shape == (2, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    test = Text(train=False, root=None, pattern="**/*.py", block_size=64)
    assert not set(test.starts) & set(data.starts)


@pytest.mark.unit
def test_synthetic_is_computed_by_index():
    data = Synthetic(train=True, num_samples=10**12, image_shape=[3, 4, 5], num_classes=7)
    images, labels = data.__getitems__([0, 10**12 - 1, 0])
    assert images.shape == (3, 3, 4, 5) and torch.equal(images[0], images[2]) and labels.max() < 7
    many, labels = data.__getitems__(range(2000))
    assert abs(many.mean()) < 0.1 and abs(many.std() - 1) < 0.1
    assert len(many.flatten(1).unique(dim=0)) > 1950, "nearly all are different"
    assert all(torch.equal(data[index][0], many[index]) for index in (0, 7, 1999))
    patterns = torch.stack([many[labels == label].mean(dim=0).flatten() for label in range(7)])
    nearest = torch.cdist(many.flatten(1), patterns).argmin(dim=1)
    assert (nearest == labels).float().mean() > 0.9, "a class can be told by its pattern"


def fetch(indices, epoch, *, dataset, order=None):
    micro = MicroBatch(epoch, np.array(indices), len(indices))
    return Fetch(dataset, seed=1).__getitems__(micro)[0]


@pytest.mark.parametrize("kind", ["whole batches", "one by one"])
@pytest.mark.unit
def test_augmentation_depends_on_sample_and_epoch_not_on_company(kind, folder):
    dataset = (
        Digits(train=True, augment=True)
        if kind == "whole batches"
        else ImageFolder(train=True, root=str(folder), image_size=16, augment=True)
    )
    torch.manual_seed(0)
    together = fetch([3, 4, 5], 0, dataset=dataset)
    torch.manual_seed(99)
    alone = fetch([4], 0, dataset=dataset)
    assert torch.equal(together[1], alone[0])
    epochs = [fetch([4], epoch, dataset=dataset) for epoch in range(12)]
    assert any(not torch.equal(epochs[0], other) for other in epochs[1:])


@pytest.mark.unit
def test_a_watch_restores_also_another_generator_of_numpy():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        watch, first = Watch(), np.random.rand()
        assert watch.drawn()
        watch.restore()
        assert not watch.drawn() and np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.unit
def test_fetching_leaves_the_generators_alone(folder):
    dataset = ImageFolder(train=True, root=str(folder), image_size=16, augment=True)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    fetch([1, 2], 0, dataset=dataset)
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


@pytest.mark.unit
def test_shift_and_flip_moves_whole_images():
    image = torch.arange(2 * 9.0).view(1, 2, 3, 3).repeat(64, 1, 1, 1)
    moved = shift_and_flip(image, np.arange(64, dtype=np.uint64), shift=1, flip=True, fill=torch.zeros(1, 2, 1, 1))
    padded = torch.nn.functional.pad(image[0], (1, 1, 1, 1))
    crops = [padded[:, r : r + 3, c : c + 3] for r in range(3) for c in range(3)]
    valid = [tuple(crop.flatten().tolist()) for crop in crops] + [
        tuple(crop.flip(-1).flatten().tolist()) for crop in crops
    ]
    seen = {tuple(one.flatten().tolist()) for one in moved}
    assert seen <= set(valid) and len(seen) > 12


class Pictured(torch.utils.data.Dataset):
    """Samples one by one through a random transform, as torchvision's datasets are."""

    def __init__(self, size=40):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.rand(3) + index, index % 2


@pytest.mark.unit
def test_a_subset_of_random_samples_is_keyed_by_sample_too():
    """torch's Subset has `__getitems__`, which draws for a whole batch: losses would depend on the world size."""
    subset = torch.utils.data.Subset(Pictured(), range(10, 30))
    together, alone = fetch([3, 4, 5], 0, dataset=subset), fetch([4], 0, dataset=subset)
    assert torch.equal(together[1], alone[0])
    assert torch.equal(together, fetch([3, 4, 5], 0, dataset=subset))


@pytest.mark.unit
def test_what_samples_draw_is_of_their_keys_whichever_generator_they_draw_from():
    """Only the generators that samples have drawn from are seeded; some draw from another one than those before."""

    class Various(Pictured):
        def __getitem__(self, index):
            first = [torch.rand(()), np.random.standard_normal(), random.gauss(0, 1), torch.initial_seed() % 1000][
                index % 4
            ]
            return torch.tensor([float(first), float(torch.rand(())) if index % 8 < 4 else 0.0]), 0

    data, before = Various(), state_of_generators()
    reader = Fetch(data, seed=1)
    for epoch, indices in enumerate([[0, 4], [1, 0], [3, 8], [2, 5, 9], [6, 7, 1, 2, 3], [0, 1, 2, 3]]):
        keys = sample_keys(seed=1, epoch=epoch, indices=np.array(indices))
        found, _, _ = reader.__getitems__(MicroBatch(epoch, np.array(indices), len(indices)))
        with kept_generators():
            for row, index, key in zip(found, indices, keys.tolist(), strict=True):
                seed_generators(key)
                assert torch.equal(row, data[index][0]), (epoch, index)
        assert state_of_generators() == before


@pytest.mark.unit
@pytest.mark.parametrize("form", ["forks", "derives", "copies", "forks alone", "forks torch alone", "seeds its own"])
def test_a_sample_that_draws_and_puts_the_state_back_is_of_its_key(form):
    """The state is as it was afterwards, so nothing seems to have been drawn from the generator."""

    class Putting(Pictured):
        def __getitem__(self, index):
            if form == "forks torch alone":
                with torch.random.fork_rng(devices=[]):
                    return torch.rand(()), 0
            if form == "seeds its own":
                return torch.rand((), generator=torch.Generator().manual_seed(torch.initial_seed() % 1000 + index)), 0
            first = torch.tensor(0.0) if form == "forks alone" else torch.rand(())
            if form == "derives":
                return first + np.random.default_rng(np.random.get_state()[1][:4]).random(), 0
            if form == "copies":
                own = random.Random()
                own.setstate(random.getstate())
                return first + own.random(), 0
            state = np.random.get_state()
            noise = np.random.rand()
            np.random.set_state(state)
            return first + noise, 0

    def read(state, size):
        seed_generators(state)
        reader = Fetch(Putting(), seed=1)
        parts = [reader.__getitems__(MicroBatch(0, np.arange(at, at + size), size))[0] for at in range(0, 12, size)]
        return torch.cat(parts)

    assert torch.equal(read(0, 4), read(1, 4)) and torch.equal(read(0, 4), read(2, 12))
    assert len({*read(0, 4).tolist()}) == 12


@pytest.mark.unit
@pytest.mark.parametrize("drawing", [(2,), (2, 5)])
def test_a_sample_that_puts_a_state_back_late_is_of_its_key_too(drawing):
    """The first micro-batches show none of it, or draw from another generator."""

    class Late(Pictured):
        def __getitem__(self, index):
            if index == 1 and len(drawing) == 2:
                return torch.rand(()), 0
            if index not in drawing:
                return torch.tensor(float(index)), 0
            state = np.random.get_state()
            noise = np.random.rand()
            np.random.set_state(state)
            return torch.tensor(noise), 0

    def read(state, order):
        seed_generators(state)
        reader = Fetch(Late(), seed=1)
        return {index: float(reader.__getitems__(MicroBatch(0, np.array([index]), 1))[0]) for index in order}

    found = read(0, range(8))
    assert found == read(1, range(8)) == read(2, [5, 7, 2, 0, 1, 3, 4, 6])
    assert np.random.get_state.__name__ == "get_state", "what looks is gone after each micro-batch"


@pytest.mark.unit
@pytest.mark.parametrize("form, said", [("none", 0), ("draws", 0), ("forks", 0), ("hides", 1), ("own", 0)])
def test_draws_that_cannot_be_seeded_are_known(form, said):
    own = np.random.default_rng(0)

    class Drawing(Pictured):
        def __getitem__(self, index):
            if form == "hides":  # as by `from torch import get_rng_state`
                state = torch.default_generator.get_state()
                noise = torch.rand(())
                torch.default_generator.set_state(state)
                return noise, index
            with torch.random.fork_rng(devices=[], enabled=form == "forks"):
                noise = (
                    {"none": 0.0, "own": own.random()}.get(form) if form in ("none", "own") else float(torch.rand(()))
                )
            return torch.tensor(noise), index

    assert bool(note_of(fingerprint(Drawing()))) == said


@pytest.mark.unit
def test_a_data_set_that_reads_another_one_in_its_samples_is_of_its_key_too():
    """Whether the inner one asks for a state cannot be told within the outer one, so it is seeded."""

    class Inner(Pictured):
        def __getitem__(self, index):
            with torch.random.fork_rng(devices=[]):
                return torch.rand(()), 0

    class Outer(Pictured):
        inner = Fetch(Inner(), seed=2)

        def __getitem__(self, index):
            return self.inner.__getitems__(MicroBatch(0, np.array([index]), 1))[0][0], 0

    def read(state, size):
        seed_generators(state)
        reader = Fetch(Outer(), seed=1)
        parts = [reader.__getitems__(MicroBatch(0, np.arange(at, at + size), size))[0] for at in range(0, 8, size)]
        return torch.cat(parts)

    assert torch.equal(read(0, 2), read(1, 4)) and len({*read(0, 2).tolist()}) == 8
    assert np.random.get_state.__name__ == "get_state" and torch.get_rng_state.__name__ == "get_rng_state"


@pytest.mark.unit
def test_a_sample_that_fails_by_what_it_draws_fails_by_its_key():
    """What is drawn before a generator is known to be drawn from, and seeded, ends no run and counts as no bad sample."""

    class Failing(Pictured):
        def __getitem__(self, index):
            if random.random() < 0.1:
                raise ValueError("an unlucky crop")
            return torch.rand(3), 0

    def outcome(state, max_bad):
        random.seed(state)
        reader, found = Fetch(Failing(), seed=1, max_bad=max_bad), []
        for first in range(0, 40, 4):
            try:
                batch, _, _ = reader.__getitems__(MicroBatch(0, np.arange(first, first + 4), 4))
                found.append(batch.tolist())
            except DataError as error:
                found.append(str(error))
        return found, reader.bad

    for max_bad in (None, 5):
        assert outcome(0, max_bad) == outcome(1, max_bad) == outcome(2, max_bad)
    assert any("no sample can be read in place of" in str(each) for each in outcome(0, 1000)[0])


@pytest.mark.unit
def test_a_whole_batch_with_a_bad_sample_is_read_one_by_one():
    class Whole(Pictured):
        def __getitems__(self, indices, keys=None):
            if 4 in indices:
                raise OSError("truncated")
            return torch.tensor(indices).float()[:, None], torch.tensor(indices) % 2

    micro = MicroBatch(0, np.array([3, 4, 8]), 3)
    assert Fetch(Whole(), seed=1, max_bad=1).__getitems__(micro)[0].flatten().tolist() == [3, 5, 8]
    with pytest.raises(OSError):
        Fetch(Whole(), seed=1).__getitems__(micro)


@pytest.mark.unit
def test_indices_that_are_called_keys_are_no_keys():
    """As in Hugging Face's Dataset."""

    class Foreign(torch.utils.data.TensorDataset):
        def __getitems__(self, keys):
            assert isinstance(keys, list)
            return [self[index] for index in keys]

    dataset = Foreign(torch.arange(20.0), torch.arange(20))
    micro = Plan(20, 4, seed=1).share(0, Share(0, 1))[0]
    inputs, targets, count = Fetch(dataset, seed=1).__getitems__(micro)
    assert targets.tolist() == micro.indices.tolist() and inputs.shape == (4,) and count == 4


class Read(Pictured):
    """Notes how it is read; draws from `draw` for the samples in `drawing`, each way that a data set may."""

    def __init__(self, *, draw=lambda: 0.0, drawing=(), pads=False):
        super().__init__()
        self.draw, self.drawing, self.pads, self.ways = draw, drawing, pads, []

    def __getitem__(self, index):
        self.ways.append("one")
        return torch.tensor([index + (float(self.draw()) if index in self.drawing else 0.0)]), index

    def __getitems__(self, indices):
        samples = [self[index] for index in indices]
        self.ways = [*self.ways[: -len(indices)], "all"]
        return [(values + self.pads * max(indices), label) for values, label in samples]


@pytest.mark.unit
def test_the_generators_of_a_sample_draw_independently():
    """A flip by NumPy must not follow one by torch; those that the data set holds itself neither."""

    class Flipped(Pictured):
        def __init__(self):
            self.own = [
                torch.Generator(),
                torch.Generator(),
                np.random.default_rng(0),
                np.random.RandomState(0),
                random.Random(0),
            ]

        def __getitem__(self, index):
            whole = [torch.randint(2, ()), np.random.randint(2), random.randint(0, 1)]
            two = [torch.randint(2, (), generator=each) for each in self.own[:2]]
            return torch.tensor(
                [*whole, *two, self.own[2].integers(2), self.own[3].randint(2), self.own[4].randint(0, 1)]
            ), index

        def __len__(self):
            return 600

    reader = Fetch(Flipped(), seed=1)
    flips = torch.cat([reader.__getitems__(MicroBatch(0, np.arange(at, at + 50), 50))[0] for at in range(0, 600, 50)])
    among = torch.corrcoef(flips.double().T) - torch.eye(8)
    assert among.abs().max() < 0.2, among  # five deviations of what chance gives


@pytest.mark.unit
def test_samples_are_read_together_and_not_seeded_while_nothing_draws(monkeypatch):
    monkeypatch.setattr("muster.data.fetch.seed_generators", lambda *_: pytest.fail("seeded"))
    dataset = Read()
    fetch = Fetch(dataset, seed=1)
    for indices in ([3, 4, 5], [6, 7], [8]):
        inputs, targets, _ = fetch.__getitems__(MicroBatch(0, np.array(indices), len(indices)))
        assert inputs.flatten().tolist() == targets.tolist() == indices
    assert dataset.ways == [*["one"] * 3, "all", "all", "all"]


@pytest.mark.unit
def test_samples_that_depend_on_their_company_are_read_alone():
    dataset = Read(pads=True)
    fetch = Fetch(dataset, seed=1)
    for indices in ([3, 4, 5], [6, 7]):
        assert fetch.__getitems__(MicroBatch(0, np.array(indices), 2))[0].flatten().tolist() == indices


@pytest.mark.parametrize(
    "draw",
    [random.random, partial(random.gauss, 0, 1), np.random.rand, np.random.randn, partial(torch.rand, 1), partial(torch.randn, 1)],
    ids=["random", "gauss", "rand", "randn", "torch.rand", "torch.randn"],
)  # fmt: skip
@pytest.mark.parametrize("kept", [False, True], ids=["", "a normal number is kept"])
@pytest.mark.unit
def test_a_sample_that_draws_late_is_drawn_by_its_key_in_any_company(draw, kept):
    """The first micro-batch draws nothing; sample 7 draws one number, perhaps the one that a generator has kept."""

    def values(*micro_batches, keep):
        random.seed(5)
        np.random.seed(5)
        if keep:
            random.gauss(0, 1)
            np.random.randn()
        before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
        fetch = Fetch(Read(draw=draw, drawing=(7, 9)), seed=1)
        got = [fetch.__getitems__(MicroBatch(0, np.array(indices), 1))[0] for indices in micro_batches]
        after = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
        assert before[:2] == after[:2] and torch.equal(before[2], after[2])
        return torch.cat(got).flatten().tolist()

    whole = values([1, 2], [3, 7], [4, 9], keep=kept)
    assert whole == [*values([1], [2], [3], [7, 4], keep=False), *values([9], keep=True)]
    assert whole[3] != 7 and whole[5] != 9 and whole[3] - 7 != whole[5] - 9


@pytest.mark.unit
def test_a_fingerprint_reads_something_of_the_data():
    """Two data sets of the same length are not the same; random transforms and the generators do not matter."""
    before = torch.get_rng_state()
    one, other = fingerprint(torch.utils.data.Subset(Pictured(), range(20))), fingerprint(Pictured(20))
    assert one == other == fingerprint(Pictured(20))
    assert fingerprint(torch.utils.data.Subset(Pictured(), range(1, 21))) != one
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "kind",
    [
        np.float32,
        np.array,
        lambda value: np.array([[value, 1], [2, 3]]).T,
        lambda value: np.datetime64(value, "D"),
        lambda value: np.array([(1, value)], dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        lambda value: Image.new("L", (2, 2), value),
        lambda value: {"x": [np.array([value])]},
    ],
)
@pytest.mark.unit
def test_a_fingerprint_reads_samples_that_are_no_tensors(kind):
    one, again, other = ([(kind(3 * index + change), 0) for index in range(20)] for change in (0, 0, 1))
    assert fingerprint(one) == fingerprint(again) != fingerprint(other)


@pytest.mark.unit
@pytest.mark.parametrize(
    "is_path, text",
    [
        *((True, text) for text in ("/{}/my files/{}", "{}/{}.png", "../{}/my files/{}", "C:\\{}\\my files\\{}")),
        *(
            (False, text)
            for text in ("{} {}", "{} and/or {}", "{} of it: yes/no", "C/C{1}=C/{0}", r"\frac{1}{{{0}}}", "//{0}")
        ),
    ],
)
def test_a_fingerprint_without_folders_has_other_texts(is_path, text):
    one, other = ([(np.str_(text.format(place, index)), index) for index in range(20)] for place in ("a", "b"))
    assert fingerprint(one) != fingerprint(other)
    assert (fingerprint(one, paths=False) == fingerprint(other, paths=False)) == is_path


@pytest.mark.nightly
def test_samples_that_are_no_pairs_are_refused(tmp_path):
    """(a, b, y) would lose y without a word."""
    (tmp_path / "triples.py").write_text(
        "import torch\nclass Triples(torch.utils.data.TensorDataset):\n    num_classes = 2\n    def __init__(self, train):\n"
        "        super().__init__(torch.rand(20, 3), torch.rand(20, 3), torch.zeros(20).long())\n"
    )
    result = run(tmp_path / "run", "data._target_=triples.Triples", ok=False)
    assert result.code == 3 and "a pair (input, target) or a dict, and the data gives 3 parts" in result.said[0], (
        result.out
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(workers):
    dataset, plan = Digits(train=True, augment=True), Plan(1437, 100, seed=3)
    loader = LoaderConfig(Share(1, 3, 20), torch.device("cpu"), seed=3, num_workers=workers)
    got = list(batches(dataset, plan, range(12, 18), loader))
    assert [[batch.count for batch in step] for step in got][:2] == [[17, 16], [17, 16]]
    reference = Fetch(dataset, seed=3)
    for step, micro_batches in zip(range(12, 18), got, strict=True):
        for micro, batch in zip(plan.share(step, Share(1, 3, 20)), micro_batches, strict=True):
            assert torch.equal(reference.__getitems__(micro)[0], batch.inputs)


class Whole(torch.utils.data.Dataset):
    """Gives batches at once, notes which, and fails where it is told to; `buffer` is written over each time."""

    def __init__(self, fails=None, buffer=None):
        self.fails, self.buffer, self.asked = fails, buffer, []

    def __len__(self):
        return 400

    def __getitems__(self, indices, keys):
        if self.fails in indices:
            raise OSError("truncated")
        self.asked.append(indices)
        inputs = torch.tensor(indices).float()[:, None]
        return inputs if self.buffer is None else self.buffer.copy_(inputs), torch.tensor(indices) % 2


def in_turn(dataset, **more):
    loader = LoaderConfig(Share(0, 1), torch.device("cpu"), seed=3, **more)
    return batches(dataset, Plan(400, 4, seed=3), range(250), loader)


@pytest.mark.unit
def test_batches_that_depend_on_keys_alone_are_made_ahead_and_come_in_their_order():
    dataset, plan = Whole(), Plan(400, 4, seed=3)
    for step, (batch,) in enumerate(in_turn(dataset)):
        assert batch.targets.tolist() == (plan.batch(step) % 2).tolist(), step
        assert batch.inputs[:, 0].tolist() == plan.batch(step).tolist(), step
        assert step > 1 or len(dataset.asked) == step + 1, "the first ones are not waited for"
    assert step == 249 == len(dataset.asked) - 1


@pytest.mark.unit
def test_a_failure_ahead_costs_no_step_before_it():
    plan = Plan(400, 4, seed=3)
    dataset, taken = Whole(fails=int(plan.batch(90)[2])), []
    with pytest.raises(OSError):
        for (batch,) in in_turn(dataset):
            taken.append(batch.inputs[:, 0].tolist())
    assert taken == [plan.batch(step).tolist() for step in range(90)]


@pytest.mark.parametrize("more", [{"adapter": lambda batch: batch}, {"max_bad": 3}, {}], ids=["own", "skips", "buffer"])
@pytest.mark.unit
def test_what_may_depend_on_when_it_is_asked_is_not_asked_ahead(more):
    dataset, plan = Whole(buffer=None if more else torch.empty(4, 1)), Plan(400, 4, seed=3)
    for step, (batch,) in enumerate(in_turn(dataset, **more)):
        assert batch.inputs[:, 0].tolist() == plan.batch(step).tolist(), step
        assert len(dataset.asked) == (step + 1) * (4 if "max_bad" in more else 1), "with max_bad sample by sample"


def order_of_preparing(folder):
    import os
    import time
    from pathlib import Path

    from muster.world.environment import Environment
    from muster.world.group import start
    from muster.world.group_options import GroupOptions

    world = start(GroupOptions(), Environment.from_env())
    with world.local_first():
        if world.rank == 0:
            time.sleep(0.5)
        (Path(folder) / f"{time.monotonic_ns()}-{world.rank}").touch()
    world.close()
    return os.getpid()


def test_one_rank_of_a_node_downloads_while_the_others_wait(tmp_path):
    on_ranks(order_of_preparing, 3, str(tmp_path))
    assert sorted(tmp_path.iterdir())[0].name.endswith("-0")


@pytest.mark.nightly(but=["imagefolder", "mnist"])
@pytest.mark.parametrize("name", ["mnist", "cifar10", "imagefolder"])
def test_real_formats_through_the_front_door(tmp_path, name, request):
    root = request.getfixturevalue({"mnist": "mnist", "cifar10": "cifar", "imagefolder": "folder"}[name])
    small = ["data.image_size=16"] if name == "imagefolder" else []
    result = run(
        tmp_path / "run",
        f"data={name}",
        f"data.root={root}",
        *small,
        "model=convnet",
        "batch_size=5",
        "max_steps=4",
        "loader.num_workers=1",
        ranks=2,
    )
    assert len(result.losses) == 4 and result.lines("eval")


def test_a_truncated_file_is_a_data_error(tmp_path, mnist):
    path = mnist / "MNIST/raw/t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-5])
    result = run(tmp_path / "run", "data=mnist", f"data.root={mnist}", ranks=2, ok=False)
    assert "t10k-images-idx3-ubyte" in result.said[0] and len(result.said) == 1, result.out
    assert "exitcode  : 3 " in result.out
