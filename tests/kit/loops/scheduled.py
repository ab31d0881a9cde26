"""A loop that sets the rate of each step from an array of NumPy's, as many do: `python scheduled.py FOLDER`.

KIND: the array's dtype. OTHER: what an object of the loop's own holds from step 6 on, a key of OTHERS. Its other numbers are NumPy's, too,
of 16 bits, which overflow.
"""

import os
import sys

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.faults import fault, saved

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
OTHERS = {"float64": np.float64(0.5), "datetime64": np.datetime64("2026-01-01"), "function": lambda: 0.5}


class Last:
    rate = 0.0

    def __init__(self):
        self.total, self.seen = np.int16(0), np.zeros((2, 2), dtype=np.int16, order="F")

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)
        assert self.seen.flags.f_contiguous  # another order of summands would be another sum

    def add(self):
        """Return a small number that depends on all before, and on how these overflow."""
        self.total += np.int16(20_000)
        self.seen[0, 1] += self.total
        return self.seen.sum(dtype=np.int16) / np.float32(1e6)


class Counting(torch.optim.AdamW):
    """Has an array and a text in its state, which torch does not load, and a list of tensors, which it would cast."""

    def step(self):
        super().step()
        for state in self.state.values():
            state["seen"], state["kind"] = state.get("seen", np.zeros(2, dtype=np.int16)) + 1, "counted"
            state["sums"] = [state.get("sums", [torch.zeros((), dtype=torch.float64)])[0] + 0.1]


def main(job):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = Counting(model.parameters(), lr=0.1)
    own = {"last": Last()} if "OTHER" in os.environ else {}
    job.track(model=model, optimizer=optimizer, **own)
    for state in optimizer.state.values():
        assert [*state["seen"]] == [job.steps_done] * 2 and state["kind"] == "counted"
        assert state["sums"][0].dtype == torch.float64 and abs(state["sums"][0] - 0.1 * job.steps_done) < 1e-9
    rates = np.linspace(0.1, 0.01, 16).astype(os.environ.get("KIND", "float64"))
    for x in job.batches(INPUTS, batch_size=8, epochs=2):
        for group in optimizer.param_groups:
            group["lr"] = rates[job.steps_done]
        if own and job.steps_done >= 6:
            own["last"].rate = OTHERS[os.environ["OTHER"]]
        fault("forward", job.steps_done, ready=saved(job.steps_done, 4))
        loss = model(x).pow(2).mean() * (1 + float(own["last"].add() if own else 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)


if __name__ == "__main__":
    muster.Job(sys.argv[1], save_every=4, log_every=1, tensorboard=False, timeout_s=20).run(main)
