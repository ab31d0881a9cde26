"""One model over several ranks: layers in pieces (tensor_parallel) and layers in turn (pipeline) train as one process does."""

import contextlib
import json
import signal
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.job import finish as end
from kit.job import pace, reached, run, start, wait_for
from torch import nn

from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.models.convnet import ConvNet
from muster.train.models.gpt import Gpt
from muster.train.models.mlp import Mlp
from muster.train.models.resnet import resnet18
from muster.train.models.vit import Vit
from muster.train.strategies.partition.stages import Stages, evenly, subset
from muster.train.strategies.pipeline import Autocast, Flow
from muster.train.strategies.tensor_parallel import divided_layers

TENSOR, PIPELINE = "strategy=tensor_parallel", "strategy=pipeline"
COMMON = ("optimizer=adamw", "grad_clip=0.5", "checkpoint.every_steps=4", "max_steps=8", "batch_size=15")
SMALL = ("model.num_layers=4", "model.num_heads=2", "model.hidden_dim=16")
VIT = ("model=vit", *SMALL, "model.mlp_dim=32", "data=synthetic", "data.num_samples=50", "data.image_shape=[1,8,8]")
OTHER = "checkpoint.accept_changes=true"


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The command line of each model. 50 samples and a batch of 15: the epoch's last batch has 5, uneven on any ranks."""
    text = tmp_path_factory.mktemp("text") / "all.py"
    text.write_bytes(bytes(range(256)) * 4)
    data = ("data=text", f"data.root={text.parent}", "data.block_size=16", "data.pattern=*.py")
    return {"gpt": (*COMMON, "model=gpt", *SMALL, *data, "objective=language_modeling"), "vit": (*COMMON, *VIT)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, lines):
    """The same training in one process."""
    folder = tmp_path_factory.mktemp("model-parallel")
    return {model: run(folder / model, *line) for model, line in lines.items()}


def assert_same_training(result, whole):
    """Every loss, norm and evaluation to a ten-thousandth: sums are made in another order."""
    assert result.losses.keys() == whole.losses.keys()
    for kind in ("train", "eval"):
        assert len(result.lines(kind)) == len(whole.lines(kind))
        for line, expected in zip(result.lines(kind), whole.lines(kind), strict=True):
            for key in {"loss", "grad_norm", "accuracy", "samples"} & expected.keys():
                assert line[key] == pytest.approx(expected[key], rel=1e-4), (key, line)
    assert list(result.weights) == list(whole.weights)
    for name, weight in whole.weights.items():
        assert result.weights[name].shape == weight.shape
        torch.testing.assert_close(
            result.weights[name], weight, rtol=0, atol=3e-3, msg=name
        )  # Adam: noise has its sign


@pytest.mark.nightly(but=["tensor", "gpipe"])
@pytest.mark.parametrize(
    "model, ranks, chosen",
    [
        ("gpt", 2, [TENSOR, "micro_batch_size=3"]),
        ("vit", 4, [TENSOR]),
        ("gpt", 4, [TENSOR, "strategy.shard=true"]),
        ("gpt", 2, [PIPELINE, "strategy.schedule=gpipe"]),
        ("gpt", 4, [PIPELINE, "micro_batch_size=2", "strategy.split=[blocks.1]"]),
        ("vit", 2, [PIPELINE, "strategy.schedule=interleaved", "strategy.num_micro_batches=3"]),
    ],
    ids=["tensor", "data x tensor", "shard x tensor", "gpipe", "data x 1f1b", "interleaved"],
)
def test_losses_are_those_of_one_process(tmp_path, lines, whole, model, ranks, chosen):
    assert_same_training(run(tmp_path / "run", *lines[model], *chosen, ranks=ranks), whole[model])


@pytest.mark.nightly
@pytest.mark.parametrize("chosen", [TENSOR, PIPELINE])
def test_under_bf16_losses_are_near_those_of_one_process(tmp_path, lines, whole, chosen):
    """As near as bf16 has them in one process, and not those of fp32."""
    one = run(tmp_path / "one", *lines["gpt"], "precision=bf16")
    two = run(tmp_path / "two", *lines["gpt"], "precision=bf16", chosen, ranks=2)
    assert two.losses != whole["gpt"].losses
    assert all(two.losses[step] == pytest.approx(loss, rel=1e-2) for step, loss in one.losses.items())


@pytest.mark.nightly
def test_every_layout_resumes_from_every_other(tmp_path, lines, whole):
    layouts = [(2, []), (4, [PIPELINE]), (4, [TENSOR, "strategy.shard=true"]), (2, [])]
    for until, (ranks, chosen) in zip((2, 4, 6, 8), layouts, strict=True):
        result = run(
            tmp_path / "run", *lines["gpt"], *chosen, f"max_steps={until}", OTHER, "eval.every_steps=off", ranks=ranks
        )
    assert [event["step"] for event in result.events("resume")] == [2, 4, 6]
    for step, loss in whole["gpt"].losses.items():
        assert result.losses[step] == pytest.approx(loss, rel=1e-4), step


@pytest.mark.nightly
@pytest.mark.parametrize(
    "chosen", [["strategy._target_=kit.parts.tensor_parallel.WatchedTensor"], [PIPELINE]], ids=["tensor", "1f1b"]
)
def test_preempted_it_resumes_bit_for_bit_with_its_dropout(tmp_path, lines, chosen):
    line = (*lines["gpt"], *chosen, "model.dropout=0.2", "eval.every_steps=off")
    process = start(tmp_path / "run", *line, "max_steps=100000", *pace(0.4), ranks=2)
    wait_for(tmp_path / "run", reached(3), process=process)
    process.send_signal(signal.SIGTERM)
    stopped = end(process, tmp_path / "run")
    line = (*line, f"max_steps={stopped.outcome['step'] + 15}")
    (tmp_path / "whole").mkdir()
    undisturbed = run(tmp_path / "whole/run", *line, ranks=2)
    assert stopped.outcome["outcome"] == "preempted" and stopped.outcome["exit_code"] == 75, stopped.out
    result = run(tmp_path / "run", *line, ranks=2)
    assert result.events("resume") and result.losses == undisturbed.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in undisturbed.weights.items())
    digests = [path.read_text().splitlines() for path in sorted((tmp_path / "whole").glob("digests-*"))]
    assert len(digests) == (0 if chosen == [PIPELINE] else 2)
    for one, other in zip(*digests, strict=True):
        assert one == other and json.loads(one)["tensors"], "ranks of a tensor group have drifted apart"


@pytest.mark.unit
def test_a_forward_for_shapes_alone_leaves_generators_and_buffers_as_they_were():
    """So torch 2.11 begins the first step of each process."""
    stage = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    part = Autocast(stage, contextlib.nullcontext)
    torch.manual_seed(1)
    before, drawn = part.state_dict()["stage.0.running_var"].clone(), torch.get_rng_state()
    with torch.no_grad():
        part(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(part.state_dict()["stage.0.running_var"], before) and torch.equal(torch.get_rng_state(), drawn)
    part(torch.randn(6, 4))
    assert not torch.equal(part.state_dict()["stage.0.running_var"], before)
    stage.eval()
    drawn = torch.get_rng_state()
    with torch.no_grad():
        Autocast(nn.Sequential(stage, Draws()).eval(), contextlib.nullcontext)(torch.zeros(6, 4))
    assert not torch.equal(torch.get_rng_state(), drawn), "an evaluation draws as it likes"


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_what_cannot_be_built_is_one_line_from_all_ranks(tmp_path, lines):
    for chosen, said in (
        ([TENSOR, "model=resnet18", *VIT[5:]], "ResNet has no tensor_parallel_plan"),
        ([PIPELINE, "strategy.split=[bloks.2]", *lines["gpt"]], "did you mean blocks.2?"),
    ):
        result = run(tmp_path / "run", *chosen, ranks=2, ok=False)
        assert "exitcode  : 2 " in result.out and len(result.said) == 1 and said in result.said[0], result.out


@pytest.mark.parametrize(
    "chosen, ranks, said",
    [
        ([TENSOR, "strategy.tensor=3"], 8, "strategy.tensor=3 must divide world size 8: use 1, 2, 4 or 8"),
        ([TENSOR, "compile=true"], 2, "compile=true cannot be combined with strategy=tensor_parallel"),
        ([TENSOR, "precision=fp16"], 2, "use fp32 or bf16"),
        ([PIPELINE], 1, "takes two processes or more, and there is one: use strategy=single"),
        ([PIPELINE, "channels_last=true"], 2, "channels_last=true cannot be combined with strategy=pipeline"),
        ([PIPELINE], 3, "strategy.stages=2 must divide world size 3: use 1 or 3"),
        ([PIPELINE, "precision=fp16"], 2, "use fp32 or bf16"),
        ([PIPELINE, "compile=true"], 2, "compile=true cannot be combined with strategy=pipeline"),
        ([PIPELINE, "strategy.stages_per_rank=2"], 2, "use 1, or strategy.schedule=interleaved"),
        ([PIPELINE, "strategy.schedule=interleaved", "strategy.stages_per_rank=1"], 2, "use 2 or more"),
        ([PIPELINE, "strategy.split=[a,b]"], 2, "there are 2: name 1 layers"),
    ],
)  # fmt: skip
@pytest.mark.unit
def test_what_does_not_go_together_is_told_before_any_process_group(chosen, ranks, said):
    config = compose(chosen)
    with pytest.raises(ConfigError) as raised:
        build(config.strategy).check(config, ranks)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.unit
def test_two_processes_of_two_gpus_each_do_not_train_by_nccl():
    """Its communicator is bound to one device of each process, and DDP would reduce the other's parameters by it."""
    line = ["strategy=model_parallel", "strategy.gpus=[0,1,2,3]", "strategy.split=['3']"]
    several = build(compose(line).strategy)
    with pytest.raises(ConfigError, match=r"write dist.backend=gloo, or use strategy=pipeline"):
        several.check(compose(line), 2)
    for fine, ranks in (([*line, "dist.backend=gloo"], 2), ([*line, "device=cpu"], 2), (line, 1)):
        build(compose(fine).strategy).check(compose(fine), ranks)


GPT = {"input_shape": [16], "num_classes": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "dropout": 0.0}


@pytest.mark.parametrize(
    "plan, ranks, said",
    [
        ({"blocks.*.mlp_out": "rowwise"}, 3, "strategy.tensor=3 must divide blocks.0.mlp_out.in_features=64"),
        (
            {"blocks.*.attention.qkv": "colwise"},
            4,
            "must divide num_heads of blocks.0.attention.qkv=2: use one of 1, 2",
        ),
        ({"blocks.*.mlp_on": "rowwise"}, 2, "did you mean blocks.*.mlp_in?"),
        ({"head": "colwise"}, 2, "whose weight is that of embedding.token and head as well"),
    ],
)
@pytest.mark.unit
def test_a_layer_that_cannot_be_divided_is_named(plan, ranks, said):
    with pytest.raises(ConfigError) as raised:
        divided_layers(Gpt(**GPT), plan, ranks=ranks)
    assert said in str(raised.value) and "\n" not in str(raised.value)


MODELS = {
    "gpt": (lambda: Gpt(**GPT), torch.arange(48).view(3, 16) % 32),
    "vit": (
        lambda: Vit(input_shape=[1, 8, 8], num_classes=10, patch_size=4, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32),
        torch.linspace(-1, 1, 192).view(3, 1, 8, 8),
    ),
    "mlp": (lambda: Mlp(input_shape=[64], num_classes=10, hidden=[32, 16, 16]), torch.linspace(-1, 1, 192).view(3, 64)),
    "resnet18": (lambda: resnet18(input_shape=[1, 8, 8], num_classes=10), torch.linspace(-1, 1, 192).view(3, 1, 8, 8)),
    "convnet": (lambda: ConvNet(input_shape=[1, 8, 8], num_classes=10, width=8), torch.linspace(-1, 1, 192).view(3, 1, 8, 8)),
    "skips": (lambda: Skips(), torch.linspace(-1, 1, 24).view(3, 8)),
}  # fmt: skip


class Skips(nn.Module):
    """A user's own: an input that is used again at the end, a parameter of its own, one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.scale, self.idle = nn.Parameter(torch.ones(8)), nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask=None):
        first = x * self.scale
        for layer in self.layers:
            x = layer(x).relu()
        return x * self.scale + first if mask is None else x


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", [2, 4])
def test_stages_in_turn_are_the_model(name, number):
    make, inputs = MODELS[name]
    model, given, names = make(), (inputs,), set()
    stages = Stages(model, number=number, split=None)
    model.eval()
    for stage in range(number):
        outputs = stages.stage(stage)(*given)
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        part = subset(model, stages.targets(stage))
        assert [n for n in model.state_dict() if n in part.state_dict()] == list(part.state_dict())
        names |= part.state_dict().keys()
    assert torch.equal(given[0], model(inputs)) and names == model.state_dict().keys()


@pytest.mark.unit
def test_a_model_that_cannot_be_cut_says_why():
    class Branching(nn.Sequential):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    class Modal(nn.Sequential):
        def forward(self, x):
            return super().forward(x * 2 if self.training else x)

    for model, said in (
        (Branching(nn.Linear(2, 2), nn.Linear(2, 2)), "cannot follow the forward pass of Branching"),
        (Modal(nn.Linear(2, 2), nn.Linear(2, 2)), "asks self.training"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1 layers to cut it between, too few for 2 stages"),
    ):
        with pytest.raises(ConfigError) as raised:
            Stages(model, number=2, split=None)
        assert said in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="stage 0 of the pipeline has nothing to train"):
        Stages(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), number=2, split=["1"])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
@pytest.mark.unit
def test_runs_are_as_even_as_can_be(sizes, data):
    from itertools import combinations

    number = data.draw(st.integers(1, len(sizes)))

    def largest(starts):
        return max(sum(sizes[a:b]) for a, b in pairwise([*starts, len(sizes)]))

    starts = evenly(sizes, number)
    assert starts[0] == 0 and len(set(starts)) == number and starts == sorted(starts)
    assert largest(starts) == min(largest([0, *rest]) for rest in combinations(range(1, len(sizes)), number - 1))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 4))
@pytest.mark.unit
def test_micro_batches_are_equal_and_count_every_sample_once(sizes, number, stages):
    parts = torch.arange(sum(sizes)).split(sizes)
    flow = Flow.of([Batch(part.float(), part, len(part), 100) for part in parts], number=number, stages=stages)
    assert len(flow.inputs) == flow.number * flow.size and flow.number % stages == 0 and flow.size <= max(sizes)
    counted = [flow.inputs[n * flow.size : n * flow.size + flow.count(n)].tolist() for n in range(flow.number)]
    assert [int(x) for some in counted for x in some] == list(range(sum(sizes)))


@pytest.mark.unit
def test_a_rank_without_samples_weighs_nothing():
    flow = Flow.of([Batch(torch.ones(1, 2), torch.ones(1), 0, 5)], number=8, stages=2)
    assert flow.inputs.shape == (2, 2) and [flow.count(n) for n in range(flow.number)] == [0, 0]
