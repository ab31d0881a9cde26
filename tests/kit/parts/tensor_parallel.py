"""Tensor parallelism that records its steps. A file of its own, because DTensors take a second to import."""

import hashlib
import json
import random
from pathlib import Path

from torch.distributed.tensor import DTensor

from muster.train.strategies.tensor_parallel import TensorParallel


class WatchedTensor(TensorParallel):
    """Tensor parallelism over two ranks that records a digest of the full weights after every step."""

    honours = TensorParallel.honours

    def __init__(self):
        super().__init__(tensor=2, shard=False, plan=None)

    def build(self, recipe, world):
        super().build(recipe, world)
        self.model.register_forward_hook(scaled)

    def step(self, step, batches):
        result = super().step(step, batches)
        whole = [p.detach().numpy().tobytes() for p in self.model.parameters() if not isinstance(p, DTensor)]
        line = {"step": step, "digest": hashlib.sha256(b"".join(whole)).hexdigest(), "tensors": len(whole)}
        with Path(f"digests-{self.world.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result


def scaled(model, args, outputs):
    """Draw from Python's generator, which the ranks of a group must do alike, as from torch's."""
    return outputs * (1 + 0.1 * random.random()) if model.training else outputs
