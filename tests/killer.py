"""The kit's entry, with a SIGKILL at a chosen point of the checkpoint protocol: KILL_AT=point:step."""

import os
import signal

from front import run

from train.checkpoint.backends import folder as storage

point, step = os.environ["KILL_AT"].split(":")


def die_before(function, when):
    def wrapper(*args, **kwargs):
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapper


def die_in_the_middle_of_writing(path, value):
    result = write_tensors(path, value)
    if f"{int(step):08d}" in str(path) and path.name == "state.pt":
        os.truncate(path, result["size"] // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    return result


write_tensors, rename = storage.write_tensors, os.rename
if point == "write":
    storage.write_tensors = die_in_the_middle_of_writing
elif point == "manifest":
    storage.sync_folder = die_before(storage.sync_folder, lambda folder: f"{int(step):08d}" in str(folder))
elif point == "rename":
    storage.os.rename = die_before(rename, lambda source, target: str(target).endswith(f"/step-{int(step):08d}"))
elif point == "prune":
    storage.shutil.rmtree = die_before(
        storage.shutil.rmtree,
        lambda doomed, **_: (
            str(doomed).endswith(".old")
            and os.path.exists(os.path.join(os.path.dirname(doomed), f"step-{int(step):08d}"))
        ),
    )

if __name__ == "__main__":
    run()
