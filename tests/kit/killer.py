"""The kit's entry, with the points of the checkpoint protocol at which FAULTS kills a rank (kit/faults.py)."""

import os

from kit.faults import fault, planned
from kit.front import run
from muster.checkpoint import commit as protocol
from muster.checkpoint.backends import folder as storage

[(_, point, step, _)] = planned()
name = f"step-{step:08d}"


def die():
    fault(point, step)


def die_before(function, when):
    def wrapper(*args, **kwargs):
        if when(*args):
            die()
        return function(*args, **kwargs)

    return wrapper


class Half(protocol.Hashing):
    """A file of whose data only half reaches the disk."""

    def write(self, data):
        stream = self._stream
        if name in getattr(stream, "name", "") and ".bin" in stream.name:
            stream.write(memoryview(data).cast("B")[: len(memoryview(data).cast("B")) // 2])
            stream.flush()
            die()
        return super().write(data)


if point == "write":
    protocol.Hashing = Half
elif point == "index":
    put = storage.Directory.put
    storage.Directory.put = die_before(put, lambda _, file: name in file and file.endswith("index.json"))
elif point == "manifest":
    storage.sync_folder = die_before(storage.sync_folder, lambda folder: name in str(folder))
elif point == "rename":
    storage.os.rename = die_before(os.rename, lambda source, target: str(target).endswith(f"/{name}"))
elif point == "committed":
    protocol.Storage.prune = die_before(
        protocol.Storage.prune, lambda where: os.path.exists(os.path.join(where.root, name))
    )
elif point == "prune":
    storage.shutil.rmtree = die_before(
        storage.shutil.rmtree,
        lambda doomed, **_: ".old-step-" in str(doomed) and os.path.exists(os.path.join(os.path.dirname(doomed), name)),
    )

if __name__ == "__main__":
    run()
