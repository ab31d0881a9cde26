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


def permuted(rank):
    """The same values in another order."""
    return torch.eye(64)[torch.randperm(64, generator=torch.Generator().manual_seed(rank))]


def found_apart(tolerance):
    from kit.stepping import world

    from muster.job.replicas import first_apart

    here = world()
    one_row = torch.zeros(500, 3)
    one_row[77] += 1e-3 * here.rank
    near = torch.ones(40) * (1 + 1e-5 * here.rank)
    cases = {
        "permuted": permuted(here.rank),
        "one_row": one_row,
        "near": near,
        "scalar": torch.tensor(1.0 + here.rank),
        "alike": torch.ones(7, dtype=torch.float16),
        "none": torch.ones(0),
    }
    return {name: first_apart({name: tensor}, here, tolerance=tolerance) for name, tensor in cases.items()}


@pytest.mark.parametrize("tolerance, near", [(0.0, "near"), (1e-3, "")])
def test_any_difference_between_ranks_is_seen(tolerance, near):
    first, second = on_ranks(found_apart, 2, tolerance)
    assert not any(first.values())
    assert second == {
        "permuted": "permuted",
        "one_row": "one_row",
        "near": near,
        "scalar": "scalar",
        "alike": "",
        "none": "",
    }
