"""State in pieces: no rank gathers it, any layout and world size loads what another has saved, killed anywhere."""

import json
import os
import signal

import pytest
import torch
from kit.job import run

SHARDED = (
    "strategy._target_=kit.parts.strategies.Sharded",
    "checkpoint.every_steps=3",
    "optimizer=adamw",
    "model.hidden=[30]",
)
OTHER = "checkpoint.accept_changes=true"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twelve steps on one rank."""
    return run(tmp_path_factory.mktemp("sharded") / "whole", *SHARDED[1:], "max_steps=12")


def test_every_layout_loads_what_another_has_saved(tmp_path, whole):
    folder = tmp_path / "run"
    for ranks, until, strategy in ((4, 4, "kit.parts.strategies.Sharded"), (2, 6, "kit.parts.strategies.Sharded"), (1, 8, "kit.parts.strategies.Sharded"), (3, 10, None), (4, 12, "kit.parts.strategies.Sharded")):  # fmt: skip
        chosen = (f"strategy._target_={strategy}",) if strategy else ()
        result = run(folder, *SHARDED[1:], *chosen, f"max_steps={until}", OTHER, ranks=ranks)
    assert [event["step"] for event in result.events("resume")] == [4, 6, 8, 10]
    assert len(result.losses) == 12
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


@pytest.mark.parametrize("point, rank", [("write", 0), ("write", 1), ("manifest", 0), ("rename", 0), ("committed", 0)])
def test_killed_anywhere_a_sharded_run_resumes_exactly(tmp_path, point, rank):
    line = (*SHARDED[:-1], "model._target_=kit.parts.models.Stateful", "max_steps=9")
    undisturbed = run(tmp_path / "whole", *line, ranks=2)
    env = {"KILL_AT": f"{point}:6", "KILL_RANK": str(rank)}
    killed = run(tmp_path / "run", *line, ranks=2, ok=False, env=env, module="kit.killer")
    assert killed.code and f"exitcode  : {-signal.SIGKILL} " in killed.out, killed.out
    result = run(tmp_path / "run", *line, ranks=2)
    assert result.events("resume")[-1]["step"] == (6 if point == "committed" else 3)
    assert result.losses == undisturbed.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in undisturbed.weights.items())
    assert not [name for name in os.listdir(result.folder / "checkpoints") if name.startswith(".")]


def test_another_model_does_not_fit(tmp_path):
    run(tmp_path / "run", *SHARDED[1:], "max_steps=3")
    result = run(tmp_path / "run", *SHARDED[1:], "model.hidden=[31]", "max_steps=4", OTHER, ranks=2, ok=False)
    assert len(result.said) == 1 and "[30, 64] in the checkpoint and [31, 64] in this model" in result.said[0], (
        result.out
    )
    assert "exitcode  : 2 " in result.out


def test_a_backend_of_ones_own_is_one_file(tmp_path):
    kept = f"checkpoint.storage=kit.parts.backends.Sqlite://{tmp_path}/kept.db"
    run(tmp_path / "run", *SHARDED, kept, "checkpoint.keep=2", "max_steps=8", ranks=2)
    result = run(tmp_path / "run", *SHARDED, kept, "checkpoint.keep=2", "max_steps=10", ranks=2)
    assert result.events("resume")[-1]["step"] == 8 and not (result.folder / "checkpoints").exists()
    from kit.parts.backends import Sqlite

    database = Sqlite(kept.partition("=")[2])
    assert database.list() == ["step-00000009", "step-00000010"]
    data = bytearray(database.get("step-00000010/rank-00001.bin").getvalue())
    data[10] ^= 1
    database.do("UPDATE files SET data = ? WHERE name = ?", bytes(data), "step-00000010/rank-00001.bin")
    result = run(tmp_path / "run", *SHARDED, kept, "checkpoint.keep=2", "max_steps=11", ranks=2)
    assert result.events("resume")[-1]["step"] == 9 and "SHA-256 differs" in result.out
