"""The trainer: a Hydra-configured training job, the first user of the runtime in `muster`.

Its modules are `muster.train.*` everywhere. In a clone, `train` is another name of the same package, for
`python -m train` and for import paths in older configs (see former.py).
"""

if __name__ == "train":
    from muster.train import former

    former.lend()
