"""Strategies that record their steps."""

import hashlib
import json
import os
import time
from pathlib import Path

from muster.train.strategies.base import StepResult
from muster.train.strategies.ddp import Ddp


class Plain(Ddp):
    """DDP with the values of its yaml, which a replacement by `_target_` does not inherit."""

    def __init__(self):
        options = {"static_graph": False, "find_unused_parameters": False, "sync_batchnorm": False}
        options |= {"compression": "none", "powersgd_rank": 1, "powersgd_warm_up_steps": 2}
        super().__init__(bucket_cap_mb=25.0, gradient_as_bucket_view=True, **options)


class Watched(Plain):
    """DDP that records a digest of its weights after every step."""

    honours = Ddp.honours

    def step(self, step, batches):
        result = super().step(step, batches)
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())).hexdigest()
        with Path(f"digests-{self.world.rank}").open("a") as file:
            file.write(json.dumps({"step": step, "digest": digest}) + "\n")
        return result


class Recorded(Plain):
    """DDP that records the samples of each step in the folder that LEDGER names.

    Each parameter has a bucket of its own, so that communication overlaps with the backward pass.
    """

    honours = Ddp.honours

    def __init__(self):
        super().__init__()
        self.bucket_cap_mb = 1e-6

    def step(self, step, batches):
        samples = [int(number) for batch in batches for number in batch.inputs[: batch.count, 0]]
        line = {
            "step": step,
            "time": time.time(),
            "attempt": self.world.attempt,
            "rank": self.world.rank,
            "samples": samples,
        }
        with (Path(os.environ["LEDGER"]) / f"{self.world.attempt}-{self.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return super().step(step, batches)


class OwnStep(Plain):
    """A step of its own in place of the kit's."""

    def step(self, step, batches):
        stepping = self.optimizer_step
        stepping.optimizer.zero_grad()
        shares = [stepping.recipe.objective(self.model(batch.inputs), batch.targets) * batch.share for batch in batches]
        loss = sum(shares)
        loss.backward()
        stepping.update(step, None)
        return StepResult(loss.detach(), stepping.norm)


class SaysSo(OwnStep):
    honours = frozenset({"grad_clip", "scheduler"})
