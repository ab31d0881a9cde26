"""What is different on GPUs, as far as it can be seen without one: devices without storage, decisions by device."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muster.checkpoint.optimizer_state import empty_state
from muster.checkpoint.state import _in_one_piece
from muster.checkpoint.trained import SavedTensor
from muster.errors import ConfigError
from muster.train import evaluate_run, evaluation
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.evaluation import EVAL_BATCH, samples_at_once
from muster.train.numerics import set_numerics
from muster.train.optim.meshes import step_by_mesh
from muster.train.strategies.base import check_slices
from muster.train.strategies.model_parallel import ModelParallel
from muster.train.strategies.step.optimizer_step import _prefers_channels_last
from muster.world import group, timeouts
from muster.world.dtensor import own_piece
from muster.world.environment import Environment
from muster.world.flight_recorder import VARIABLES, variable
from muster.world.group_options import GroupOptions
from muster.world.layout import Layout, form_alone
from muster.world.rendezvous.network import choose_interface
from muster.world.store_keys import StoreKeys

pytestmark = pytest.mark.unit


@pytest.fixture
def variables(monkeypatch):
    """The environment of torch and NCCL, without these variables, and put back at the end."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_nccl_takes_the_interface_that_leads_to_the_master_as_gloo_does(variables):
    variables.setenv("MASTER_ADDR", "127.0.0.1")
    keys = StoreKeys(dist.HashStore(), attempt="", rank=0, size=1)
    choose_interface(Environment(rank=0, world_size=2, local_rank=0, local_world_size=1), keys)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    variables.setenv("NCCL_SOCKET_IFNAME", "ib0")
    choose_interface(Environment(rank=0, world_size=2, local_rank=0, local_world_size=1), keys)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "a user's own"


@pytest.mark.parametrize(
    "backend, own, entries",
    [("cpu:gloo,cuda:nccl", None, "2000"), ("cpu:gloo,cuda:nccl", "0", "0"), ("gloo", None, None)],
)
def test_the_flight_recorder_is_on_before_a_group_is_made_on_gpus(variables, backend, own, entries):
    seen, name = [], variable(torch.__version__)
    if own:
        variables.setenv(name, own)
    variables.setattr(group.dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(name)))
    variables.setattr(timeouts, "extend", lambda _: None)
    place, store_keys = (
        Environment(rank=0, world_size=2, local_rank=0, local_world_size=2),
        SimpleNamespace(group_store=None),
    )
    group.form_group(GroupOptions(), place, store_keys, backend=backend, device=torch.device("cuda", 0))
    assert seen == [entries]
    others = [each for each in VARIABLES if each != name and each in os.environ]
    assert not others, "torch warns of a name that it knows no longer"


def test_each_version_of_torch_has_its_name_for_the_flight_recorder_s_entries():
    assert variable("2.13.0") == variable("2.15.0+cu132") == variable("3.0.1") == "TORCH_FR_BUFFER_SIZE"
    assert variable("2.11.0") == variable("2.12.1+cpu") == "TORCH_NCCL_TRACE_BUFFER_SIZE"


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


def test_copies_of_a_checkpoint_lie_in_one_block_each_on_a_line_of_its_own(monkeypatch):
    """The system locks a block of memory slowly, and the device copies to where a line of the cache begins."""
    asked, empty = [], torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **more: asked.append(pin_memory) or empty(*size, **more)
    )
    tensors = [torch.ones(3, 5), torch.tensor(2.0, dtype=torch.bfloat16), torch.arange(130, dtype=torch.uint8)]
    copies = _in_one_piece([*tensors, torch.ones(0)])
    assert asked == [True], "one block, page-locked"
    at = [copy.data_ptr() - copies[0].data_ptr() for copy in copies[:3]]
    assert at == [0, 64, 128] and len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    for copy, tensor in zip(copies, tensors, strict=False):
        copy.copy_(tensor)
    assert all(map(torch.equal, copies, tensors)), "and none overwrites another"
    assert copies[3].shape == (0,)


def test_an_evaluation_on_a_gpu_takes_no_more_samples_at_once_than_training():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert samples_at_once(compose(["batch_size=16"]), cuda, parts=4) == 4
    assert samples_at_once(compose(["batch_size=5"]), cuda, parts=4) == 2
    assert samples_at_once(compose(["batch_size=16"]), cpu, parts=4) == EVAL_BATCH
    assert samples_at_once(compose(["batch_size=100000"]), cuda, parts=4) == EVAL_BATCH


@pytest.mark.parametrize(
    "device, trained_in, batch_size",
    [("cuda", 1, 4 * 64), ("cuda", 8, 4 * 32), ("cuda", 2, 4 * 64), ("cpu", 8, 4 * EVAL_BATCH)],
)
def test_a_batch_of_an_evaluation_is_as_large_as_the_ranks_of_training_took_it(
    device, trained_in, batch_size, monkeypatch
):
    sizes = []
    monkeypatch.setattr(
        evaluation, "micro_batches", lambda config, test, plan, *_, **__: sizes.append(plan.batch_size) or []
    )
    world, strategy = SimpleNamespace(device=torch.device(device)), SimpleNamespace(data_shard=(0, 4))
    how = {"begin": lambda: False, "trained_in": trained_in}
    evaluation.measure(compose(["batch_size=256"]), range(10_000), strategy, world, None, **how)
    assert sizes == [batch_size]


@pytest.mark.parametrize("ranks, slices, parts", [(2, 8, 8), (8, "null", 8)])
def test_muster_evaluate_knows_into_how_many_parts_training_cut_its_batches(
    ranks, slices, parts, tmp_path, monkeypatch
):
    (tmp_path / "outcome.json").write_text(f'{{"outcome": "done", "world_size": {ranks}}}')
    (tmp_path / "model.pt").touch()
    (tmp_path / "config.yaml").write_text("model: {_target_: mine.Net}\n")
    monkeypatch.setattr(evaluate_run, "of_run", lambda *_: compose([f"virtual_world_size={slices}"]))
    monkeypatch.setattr(evaluate_run, "attempt", lambda *_, trained_in, **__: trained_in)
    assert evaluate_run.evaluate(tmp_path, [], None) == parts


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


@pytest.mark.parametrize(
    "line, device, prefers",
    [([], "cuda", True), (["tf32=false"], "cuda", False), (["tf32=false", "precision=bf16"], "cuda", True), ([], "cpu", False),
     (["deterministic=true"], "cuda", False)],
)  # fmt: skip
def test_convolutions_are_channels_last_where_tensor_cores_compute_them(line, device, prefers, monkeypatch):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    config = compose(line)
    set_numerics(config)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1))
    assert _prefers_channels_last(model, SimpleNamespace(precision=config.precision), torch.device(device)) is prefers
    assert not _prefers_channels_last(
        torch.nn.Linear(1, 1), SimpleNamespace(precision=config.precision), torch.device("cuda")
    )


@pytest.mark.parametrize("line, is_refused", [([], True), (["deterministic=true"], False), (["device=cpu"], False)])
def test_one_hash_on_gpus_requires_deterministic_kernels(line, is_refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = compose(["virtual_world_size=4", *line])
    with pytest.raises(ConfigError, match="deterministic=true") if is_refused else contextlib.nullcontext():
        check_slices(config, build(config.strategy), 2)


@pytest.mark.parametrize("backend, device_id", [("cpu:gloo,cuda:nccl", torch.device("cuda", 3)), ("gloo", None)])
def test_a_group_of_one_rank_knows_its_device(backend, device_id, monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **more: given.append(more["device_id"]))
    form_alone(backend, device_type="cuda")
    assert given == [device_id]


def test_the_groups_of_a_mesh_wait_as_long_as_the_default_group(mesh, monkeypatch):
    monkeypatch.setattr(timeouts, "_extended", [])
    timeouts.extend(60.0)
    given = []
    monkeypatch.setattr(
        dist, "set_timeout", lambda timeout, group: given.append((timeout.total_seconds(), group)), raising=False
    )
    found = Layout.of(1, data=1, tensor=1).mesh("cpu")
    expected = timeouts.LAST_RESORT_S + 60.0
    assert given == [(expected, found.get_group("data")), (expected, found.get_group("tensor"))]


def test_the_second_device_of_a_process_draws_its_own_numbers_by_step_as_well(monkeypatch):
    generators = [torch.Generator() for _ in range(4)]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    place = Environment(rank=1, world_size=2, local_rank=1, local_world_size=2)
    strategy = ModelParallel(split=["last"], gpus=[0, 1, 2, 3])
    strategy.world = SimpleNamespace(device=torch.device("cuda", 1), rank=1, environment=place)
    strategy.optimizer_step = SimpleNamespace(recipe=SimpleNamespace(seed=5, slices=None))
    before = generators[1].initial_seed()
    seeds = []
    for step in (7, 8, 7):
        strategy.seed(step)
        seeds.append(generators[3].initial_seed())
    assert seeds[0] == seeds[2] != seeds[1] and generators[1].initial_seed() == before
