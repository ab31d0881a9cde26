"""What is different on GPUs, as far as it can be seen without one: devices without storage, decisions by device."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muster.checkpoint.optimizer_state import empty_state
from muster.checkpoint.trained import SavedTensor
from muster.dist import world
from muster.dist.options import GroupOptions
from muster.dist.pieces import own_piece
from muster.dist.place import Place
from muster.dist.recorder import VARIABLES
from muster.dist.rendezvous import network
from muster.dist.rendezvous.network import choose_interface
from muster.train.config.compose import compose
from muster.train.evaluation import EVAL_BATCH, samples_at_once
from muster.train.numerics import set_numerics
from muster.train.optim.meshes import step_by_mesh

pytestmark = pytest.mark.unit


@pytest.fixture
def variables(monkeypatch):
    """The environment of torch and NCCL, without these variables, and put back at the end."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_nccl_takes_the_interface_that_leads_to_the_master_as_gloo_does(variables):
    variables.setattr(network, "own_address", lambda: "127.0.0.1")
    choose_interface(Place(rank=0, world_size=2, local_rank=0, local_world_size=1))
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    variables.setenv("NCCL_SOCKET_IFNAME", "ib0")
    choose_interface(Place(rank=0, world_size=2, local_rank=0, local_world_size=1))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "a user's own"


@pytest.mark.parametrize(
    "backend, own, entries",
    [("cpu:gloo,cuda:nccl", None, "2000"), ("cpu:gloo,cuda:nccl", "0", "0"), ("gloo", None, None)],
)
def test_the_flight_recorder_is_on_before_a_group_is_made_on_gpus(variables, backend, own, entries):
    seen = []
    if own:
        variables.setenv(VARIABLES[0], own)
    variables.setattr(world.dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(VARIABLES[0])))
    variables.setattr(world.dist, "set_timeout", lambda _: None, raising=False)
    variables.setattr(world.dist.distributed_c10d, "_set_pg_timeout", lambda _: None)
    place, board = Place(rank=0, world_size=2, local_rank=0, local_world_size=2), SimpleNamespace(group_store=None)
    world.form_group(GroupOptions(), place, board, backend=backend, device=torch.device("cuda", 0))
    assert seen == [entries]


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


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def stepped(build, *, mesh=None):
    """Three parameters after two steps, the first and the last in pieces if there is a mesh; the calls of fused kernels."""
    torch.manual_seed(0)
    plain = [torch.randn(4, 4) for _ in range(3)]
    cut = [distribute_tensor(each, mesh, [Shard(0)]) if mesh and at != 1 else each for at, each in enumerate(plain)]
    parameters = [torch.nn.Parameter(each) for each in cut]
    optimizer = build(parameters)
    step_by_mesh(optimizer)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.1
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [3]
    return [own_piece(parameter.detach()) for parameter in parameters]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_sharded_layers_and_plain_ones_are_stepped_by_two_kernels(mesh, options, monkeypatch):
    """Tensor parallelism has both, and torch's fused and foreach kernels take no mixture."""
    build = lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **options)  # noqa: E731
    name, calls = {"fused": "_fused_adamw_", "foreach": "_foreach_addcdiv_"}[next(iter(options))], []
    kernel = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args, **more: [calls.append(len(args[0])), kernel(*args, **more)])
    whole = stepped(build)
    assert calls == [3, 3]
    assert all(map(torch.equal, stepped(build, mesh=mesh), whole)) and calls[2:] == [2, 1, 2, 1]
