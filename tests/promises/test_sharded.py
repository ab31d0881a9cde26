"""State in pieces: no rank gathers it, any layout and world size loads what another has saved, killed anywhere."""

import json
import os
import signal

import pytest
import torch
from kit.faults import fail_at
from kit.job import finish, pace, reached, run, start, wait_for
from kit.ranks import on_ranks
from torch import nn

from bench.steps import Steps, held
from muster.errors import ConfigError
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.strategies.fsdp import named_units, units_of

SHARDED = ("strategy=fsdp", "checkpoint.every_steps=3", "optimizer=adamw", "model.hidden=[30]")
OTHER = "checkpoint.accept_changes=true"
STRATEGIES = {"fsdp": "strategy=fsdp", "hybrid": "strategy=hybrid", "zero": "strategy=zero"}
MLP = ("model.hidden=[64]", "batch_size=31", "micro_batch_size=3", "grad_clip=0.5")
GPT = (
    "data=text", "data.block_size=16", "model=gpt", "model.num_layers=2", "model.hidden_dim=32", "model.dropout=0.2",
    "objective=language_modeling", "optimizer=adamw", "grad_clip=0.5", "batch_size=10", "micro_batch_size=2",
)  # fmt: skip
CHOICES = {
    "whole gradients between": ("reshard_after_forward=false",),
    "recomputed": ("activation_checkpointing=true",),
    "units by class": ("units=[Block]",),
    "in bf16": ("param_dtype=bf16",),
    "reduced in bf16": ("reduce_dtype=bf16",),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twelve steps on one rank."""
    return run(tmp_path_factory.mktemp("sharded") / "whole", *SHARDED[1:], "max_steps=12")


def trained(text):
    """Six steps of every strategy on both models, of which ddp has the last batch of an epoch uneven as the others."""
    found = {}
    gpt = (*GPT, f"data.root={text}", "data.pattern=*.txt")
    for name, chosen in {"ddp": "strategy=ddp", **STRATEGIES}.items():
        for model, line in {"mlp": MLP, "gpt": gpt, "fp16": (*MLP, "precision=fp16")}.items():
            steps = Steps(chosen, *line, steps=6)
            found[model, name] = steps.losses(), held(steps.strategy)
    for name, choice in CHOICES.items():
        options = [f"strategy.{each}" for each in choice]
        found["gpt", name] = Steps("strategy=fsdp", *options, *gpt, steps=6).losses(), {}
    return found


@pytest.fixture(scope="module", params=[2, 4])
def steps(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(
        "to be or not to be, that is the question: " * 15
    )  # 4 batches an epoch, the last uneven
    return on_ranks(trained, request.param, str(folder))


@pytest.mark.nightly(
    but=[
        "2-mlp-fsdp",
        "2-mlp-hybrid",
        "2-mlp-zero",
        "2-gpt-fsdp",
        "2-gpt-hybrid",
        "2-gpt-zero",
        "2-fp16-fsdp",
        "2-fp16-hybrid",
        "2-fp16-zero",
    ]
)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "gpt", "fp16"])
def test_losses_and_gradients_are_those_of_ddp(steps, model, name):
    (ours, _), (theirs, _) = steps[0][model, name], steps[0][model, "ddp"]
    assert len(ours) == 6
    if name == "zero":
        assert ours == theirs
    tolerance = 1e-3 if model == "fp16" else 1e-5
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=0), (ours, theirs)


@pytest.mark.nightly(
    but=["2-whole gradients between", "2-recomputed", "2-units by class", "2-in bf16", "2-reduced in bf16"]
)
@pytest.mark.parametrize("choice", CHOICES)
def test_how_it_is_carried_out_changes_no_loss(steps, choice):
    (ours, _), (theirs, _) = steps[0]["gpt", choice], steps[0]["gpt", "ddp"]
    tolerance = 5e-3 if "in bf16" in choice else 1e-5
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=0), (ours, theirs)
    assert (ours == steps[0]["gpt", "fsdp"][0]) == ("in bf16" not in choice)


@pytest.mark.nightly(but=["2"])
def test_every_rank_holds_its_part_alone(steps):
    size = len(steps)
    whole = steps[0]["gpt", "ddp"][1]
    parts = {"fsdp": (size, size), "hybrid": (2, 2), "zero": (1, size)}
    for name, (parameters, state) in parts.items():
        each = [rank["gpt", name][1] for rank in steps]
        assert max(rank["parameters"] for rank in each) < 1.1 * whole["parameters"] / parameters, (name, each)
        assert max(rank["optimizer"] for rank in each) < 1.3 * whole["optimizer"] / state, (name, each)


def gathered(text, *options):
    """The first parameter of what is gathered in a step that is not the first, in order; which units each unit prefetches."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    gathers, prefetched, gather = [], {"forward": [], "backward": []}, group.foreach_all_gather

    def note(parameters, *args, **options):
        gathers.append(parameters[0]._param_fqn)
        return gather(parameters, *args, **options)

    group.foreach_all_gather = note
    for each, seen in prefetched.items():
        setattr(
            FSDPModule, f"set_modules_to_{each}_prefetch", lambda unit, ahead, seen=seen: seen.append((unit, ahead))
        )
    line = ("strategy=fsdp", *options, *GPT, "batch_size=4", "model.num_layers=4", f"data.root={text}")
    steps = Steps(*line, "data.pattern=*.txt", steps=2)
    for _ in steps:
        last, gathers[:] = [*gathers], []
    number = {unit: at for at, unit in enumerate(units_of(steps.strategy.model))}
    ahead = {
        each: [(number[unit], [number[one] for one in to]) for unit, to in seen] for each, seen in prefetched.items()
    }
    return last, ahead


@pytest.mark.nightly(but=["True-2"])
@pytest.mark.parametrize("reshards, times", [(True, 2), (False, 1)])
def test_a_unit_is_gathered_for_forward_and_for_backward_and_the_rest_once_a_step(tmp_path, reshards, times):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question: " * 15)
    prefetch = 2 if reshards else 0
    options = (f"strategy.reshard_after_forward={reshards}", f"strategy.prefetch={prefetch}")
    last, ahead = on_ranks(gathered, 2, str(tmp_path), *options)[0]
    rest = [name for name in last if "blocks" not in name]
    assert len(rest) == 1 and len(last) == 1 + 4 * times and len({*last}) == 5, last
    if prefetch:
        assert ahead["forward"] == [(0, [1, 2]), (1, [2, 3]), (2, [3]), (3, [])]
        assert ahead["backward"] == [(3, [2, 1]), (2, [1, 0]), (1, [0]), (0, [])]
    else:
        assert ahead == {"forward": [], "backward": []}, "torch's own way"


@pytest.mark.unit
def test_units_are_what_a_model_is_a_row_of():
    models = {"gpt": (16,), "mlp": (1, 8, 8), "resnet18": (3, 32, 32), "vit": (3, 32, 32)}
    counted = {}
    for name, shape in models.items():
        model = build(compose([f"model={name}"]).model, input_shape=shape, num_classes=10)
        counted[name] = [type(unit).__name__ for unit in units_of(model)]
    assert counted["gpt"] == ["Block"] * 4 and counted["resnet18"] == ["BasicBlock"] * 8
    assert set(counted["mlp"]) == {"Linear"} and counted["vit"].count("EncoderBlock") == len(counted["vit"]) - 1


@pytest.mark.unit
def test_a_module_that_shares_a_parameter_is_no_unit():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    assert units_of(model) == [model[1]]
    assert named_units(model, ["1"]) == [model[1]]
    with pytest.raises(ConfigError, match="units: 2 shares a parameter"):
        named_units(model, ["Lin*"])
    nested = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
    assert units_of(nested) == list(nested[0]) and named_units(nested, ["0*"]) == [
        nested[0][1],
        nested[0][0],
        nested[0],
    ]
    with pytest.raises(ConfigError, match="is called Block; this model's classes are Embedding, Linear"):
        named_units(model, ["Block"])


@pytest.mark.parametrize(
    "line, said",
    [
        ("strategy=hybrid strategy.shard=3", r"strategy.shard=3 must divide world size 4: use 1, 2 or 4"),
        ("strategy=fsdp strategy.param_dtype=bf16 precision=fp16", "use precision=fp32 or bf16"),
        ("strategy=hybrid strategy.reduce_dtype=bf16 precision=fp16", "strategy.reduce_dtype=bf16 cannot be combined"),
        ("strategy=fsdp channels_last=true", "use false"),
        ("strategy=hybrid strategy.cpu_offload=true device=cpu", "needs CUDA devices"),
    ],
)
@pytest.mark.unit
def test_what_does_not_go_together_is_refused_at_once(line, said):
    config = compose(line.split())
    with pytest.raises(ConfigError, match=said):
        build(config.strategy).check(config, 4)


CHAIN = [(4, "fsdp"), (2, "fsdp"), (3, "ddp"), (4, "hybrid"), (2, "zero"), (1, "ddp"), (4, "fsdp")]


@pytest.mark.nightly
def test_every_layout_loads_what_another_has_saved(tmp_path, whole):
    folder = tmp_path / "run"
    for until, (ranks, strategy) in enumerate(CHAIN, 6):
        result = run(folder, *SHARDED[1:], f"strategy={strategy}", f"max_steps={until}", OTHER, ranks=ranks)
    assert [event["step"] for event in result.events("resume")] == list(range(6, 12))
    assert len(result.losses) == 12
    assert result.weights.keys() == whole.weights.keys()
    for step, loss in whole.losses.items():
        assert result.losses[step] == pytest.approx(loss, rel=1e-4), step


def test_a_sharded_state_is_written_in_equal_parts_and_read_bit_for_bit(tmp_path):
    folder = tmp_path / "run"
    sharded = run(folder, *SHARDED, "model.hidden=[400]", "max_steps=5", ranks=4)
    step = folder / "checkpoints/step-00000005"
    index = json.loads((step / "index.json").read_text())
    weight = index["tensors"]["model/1.weight"]
    assert [piece["file"] for piece in weight["pieces"]] == [f"rank-0000{rank}.bin" for rank in range(4)]
    assert sorted(index["tensors"]["optimizer/1.weight/exp_avg"]) == ["dtype", "pieces", "size"]
    sizes = [(step / f"rank-0000{rank}.bin").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.2 * min(sizes), sizes  # ten classes on four ranks are not even
    for ranks in (None, 2):
        (folder / "model.pt").unlink()
        again = run(
            folder, *SHARDED[1:], "model.hidden=[400]", OTHER, "max_steps=5", ranks=ranks
        )  # plain DDP writes what it has loaded
        assert again.events("resume") and len(again.losses) == 5
        assert again.weights.keys() == sharded.weights.keys()
        assert all(torch.equal(weight, again.weights[name]) for name, weight in sharded.weights.items())


def test_replicated_state_is_written_once_and_by_all(tmp_path):
    result = run(tmp_path / "run", *SHARDED[1:], "model.hidden=[4000,30]", "max_steps=3", ranks=3)
    step = result.folder / "checkpoints/step-00000003"
    sizes = [(step / f"rank-0000{rank}.bin").stat().st_size for rank in range(3)]
    state = 3 * sum(weight.nbytes for weight in result.weights.values())  # the weights and Adam's two averages
    assert state < sum(sizes) < 1.1 * state and max(sizes) < 0.5 * state, (sizes, state)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Nine steps of a strategy, run once."""
    known = {}

    def once(strategy, ranks):
        if strategy not in known:
            known[strategy] = run(tmp_path_factory.mktemp(strategy) / "whole", *stateful(strategy), ranks=ranks)
        return known[strategy]

    return once


def stateful(strategy):
    return (STRATEGIES[strategy], *SHARDED[1:-1], "model._target_=kit.parts.models.Stateful", "max_steps=9")


@pytest.mark.nightly(but=["fsdp-write-1"])
@pytest.mark.parametrize(
    "strategy, point, rank",
    [
        ("fsdp", "write", 0), ("fsdp", "write", 1), ("fsdp", "manifest", 0), ("fsdp", "rename", 0), ("fsdp", "committed", 0),
        ("zero", "write", 1), ("hybrid", "write", 2),
    ],
)  # fmt: skip
def test_killed_anywhere_a_sharded_run_resumes_exactly(tmp_path, undisturbed, strategy, point, rank):
    ranks = 4 if strategy == "hybrid" else 2
    line, before = stateful(strategy), undisturbed(strategy, ranks)
    env = {"FAULTS": fail_at(rank, 6, point, supervisor=True)}
    killed = run(tmp_path / "run", *line, ranks=ranks, ok=False, env=env, module="kit.killer")
    assert killed.code and f"exitcode  : {-signal.SIGKILL} " in killed.out, killed.out
    result = run(tmp_path / "run", *line, ranks=ranks)
    assert result.events("resume")[-1]["step"] == (6 if point == "committed" else 3)
    assert result.losses == before.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in before.weights.items())
    assert not [name for name in os.listdir(result.folder / "checkpoints") if name.startswith(".")]


@pytest.mark.nightly
def test_preempted_a_sharded_run_saves_and_resumes_exactly(tmp_path):
    line = ("strategy=fsdp", "optimizer=adamw", "data._target_=kit.parts.data.Numbered")
    line = (*line, "model._target_=kit.parts.models.Slow", "checkpoint.every_steps=1000")
    process = start(tmp_path / "run", *line, "max_steps=100000", *pace(0.1), ranks=2)
    wait_for(tmp_path / "run", reached(3), process=process)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, tmp_path / "run")
    at = stopped.events("preempted")[0]["step"]
    assert stopped.code and stopped.outcome["exit_code"] == 75, stopped.out
    line = (*line, f"max_steps={at + 20}")
    result = run(tmp_path / "run", *line, ranks=2)
    assert [event["step"] for event in result.events("resume")] == [at]
    once = run(tmp_path / "whole", *line, ranks=2)
    assert result.losses == once.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in once.weights.items())


def test_another_model_does_not_fit(tmp_path):
    run(tmp_path / "run", *SHARDED[1:], "max_steps=3")
    result = run(tmp_path / "run", *SHARDED[1:], "model.hidden=[31]", "max_steps=4", OTHER, ranks=2, ok=False)
    assert len(result.said) == 1 and "[30, 64] in the checkpoint and [31, 64] in this model" in result.said[0], (
        result.out
    )
    assert "exitcode  : 2 " in result.out


@pytest.mark.nightly
def test_a_backend_of_ones_own_is_one_file(tmp_path):
    kept = f"checkpoint.storage=kit.parts.backends.Sqlite://{tmp_path}/kept.db"
    run(tmp_path / "run", *SHARDED, kept, "checkpoint.keep=2", "max_steps=8", ranks=2)
    result = run(tmp_path / "run", *SHARDED, kept, "checkpoint.keep=2", "max_steps=10", ranks=2)
    assert result.events("resume")[-1]["step"] == 8 and not (result.folder / "checkpoints").exists()
    from kit.parts.backends import Sqlite

    database = Sqlite(kept.partition("=")[2])
    assert [name for name in database.list() if name.startswith("step-")] == ["step-00000009", "step-00000010"]
    data = bytearray(database.get("step-00000010/rank-00001.bin").getvalue())
    data[10] ^= 1
    database.do("UPDATE files SET data = ? WHERE name = ?", bytes(data), "step-00000010/rank-00001.bin")
    result = run(tmp_path / "run", *SHARDED, kept, "checkpoint.keep=2", "max_steps=11", ranks=2)
    assert result.events("resume")[-1]["step"] == 9 and "SHA-256 differs" in result.out
