"""A training loop of your own: resumable, preemptible, the same at every number of ranks. Each `job` is muster's."""

import torch
from torch.nn.parallel import DistributedDataParallel

import muster


def points(seed: int, size: int = 4096) -> torch.utils.data.TensorDataset:
    """Points in the plane, labelled by the sign of x times y."""
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main(job: muster.Job) -> None:
    """Train, and evaluate after each epoch."""
    layers = torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)

    def right(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs, targets = batch
        return {"accuracy": (model(inputs).argmax(1) == targets).float()}

    for inputs, targets in job.batches(points(0), batch_size=64, epochs=5):  # of all ranks together
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        (loss * job.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)
        if job.ends_epoch:
            job.evaluate(points(1), right)


if __name__ == "__main__":
    muster.Job("runs/my-loop", save_every=50).run(main)
