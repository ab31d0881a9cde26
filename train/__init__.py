"""The trainer: a Hydra-configured training job, the first user of the runtime in `muster`.

Its modules are `muster.train.*`. The name `train` has the commands of entry/ and nothing else: imported by two names, a
module would be there twice.
"""

if __name__ == "train":
    import muster.train

    __path__ = [f"{path}/entry" for path in muster.train.__path__]

    def __dir__() -> list[str]:
        return ["muster.train"]  # what an error names as valid, for an import path such as train.models.mlp.Mlp
