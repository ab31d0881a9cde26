"""Ranks of a user's own loop that drift apart are refused, and what they have of their own is not taken for everybody's."""

import pytest
import torch
from kit.ranks import on_ranks


def normed(folder):
    import muster

    data = torch.utils.data.TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    with muster.Job(folder, tensorboard=False) as job:
        net = torch.nn.BatchNorm1d(4)
        model = torch.nn.parallel.DistributedDataParallel(net)
        job.track(model=model)
        for (x,) in job.batches(data, batch_size=8, epochs=1):
            model(x)
            job.step()
        own = net.running_mean.clone()
        found = [
            job.evaluate(data, lambda batch, of=of: {"mean": of(batch[0]).pow(2).mean(1)}, batch_size=7)
            for of in (net, model)
        ]
        assert torch.equal(net.running_mean, own), "training goes on with its own"
    return [each["mean"] for each in found], own.tolist()


def test_an_evaluation_is_one_of_the_model_that_is_saved(tmp_path):
    """On two ranks the statistics of batch norm differ, and evaluations of rank 1 were by its own."""
    (found, own), (_, others) = on_ranks(normed, 2, str(tmp_path / "run"))
    assert own != others
    saved = torch.nn.BatchNorm1d(4)
    saved.load_state_dict(torch.load(tmp_path / "run/model.pt", weights_only=True))
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    assert found == pytest.approx([float(saved.eval()(data).pow(2).mean().detach())] * 2, abs=1e-6)
