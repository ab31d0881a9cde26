"""What is different on GPUs, as far as it can be seen without one: devices without storage, decisions by device."""

import pytest
import torch

from muster.checkpoint.optimizer_state import empty_state
from muster.checkpoint.trained import SavedTensor
from muster.train.config.compose import compose
from muster.train.evaluation import EVAL_BATCH, samples_at_once
from muster.train.numerics import set_numerics

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("fused", [False, True])
def test_the_count_of_steps_is_read_where_the_optimizer_wants_it(fused):
    """On the device, an optimizer that is not fused would wait for it at each step, once for each parameter."""
    parameter = torch.nn.Parameter(torch.empty(3, 4, device="meta"))
    optimizer = torch.optim.Adam([parameter], fused=fused)
    saved = {"step": SavedTensor(torch.Size([]), torch.float32), "exp_avg": SavedTensor(parameter.shape, torch.float32)}
    state = {name: empty_state(name, facts, parameter) for name, facts in saved.items()}
    groups = [{**optimizer.param_groups[0], "params": [0]}]
    optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
    loaded = optimizer.state[parameter]
    assert loaded["step"].device.type == ("meta" if fused else "cpu")
    assert loaded["exp_avg"].device.type == "meta" and loaded["exp_avg"].shape == (3, 4)


def test_an_evaluation_on_a_gpu_takes_no_more_samples_at_once_than_training():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert samples_at_once(compose(["batch_size=16"]), cuda, parts=4) == 4
    assert samples_at_once(compose(["batch_size=5"]), cuda, parts=4) == 2
    assert samples_at_once(compose(["batch_size=16"]), cpu, parts=4) == EVAL_BATCH
    assert samples_at_once(compose(["batch_size=100000"]), cuda, parts=4) == EVAL_BATCH


@pytest.mark.parametrize(
    "line, uses",
    [([], True), (["deterministic=true"], False), (["virtual_world_size=4"], False), (["tf32=false"], False),
     (["deterministic=true", "tf32=true"], True)],
)  # fmt: skip
def test_products_are_rounded_to_tf32_unless_bits_are_promised(line, uses, monkeypatch):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_numerics(compose(line))
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is uses
