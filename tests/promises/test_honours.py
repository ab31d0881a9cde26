"""A key of the kit that was given takes effect, or is refused in one line: whatever strategy trains, the user's own included."""

import pytest
from kit.job import ROOT, run

OWN = "strategy._target_=kit.parts.strategies."
SMALL = ("max_steps=2", "model.hidden=[8]", "batch_size=16", "eval.every_steps=off")
KEYS = (
    "grad_clip=0.001",
    "precision=bf16",
    "on_nonfinite=skip",
    "log.train_metrics=true",
    "virtual_world_size=2",
)


@pytest.mark.nightly(but=["grad_clip=0.001", "virtual_world_size=2"])
@pytest.mark.parametrize("key", KEYS)
def test_a_step_of_ones_own_is_refused_what_it_does_not_honour(tmp_path, key):
    result = run(tmp_path / "run", *SMALL, f"{OWN}OwnStep", key, ok=False)
    assert result.code == 2 and len(result.said) == 1 and key.split("=")[0] in result.said[0], result.out


@pytest.mark.nightly
def test_what_it_says_that_it_honours_and_what_it_inherits_is_not_refused(tmp_path):
    run(tmp_path / "said", *SMALL, f"{OWN}SaysSo", "grad_clip=0.5", "scheduler=cosine")
    plain, clipped = (
        run(tmp_path / name, *SMALL, f"{OWN}Watched", *more).losses
        for name, more in (("plain", ()), ("clipped", ("grad_clip=0.001", "log.train_metrics=true")))
    )
    assert plain != clipped


@pytest.mark.nightly
def test_the_documented_gan_clips_and_is_refused_what_it_does_not_honour(tmp_path):
    folder = ROOT / "examples/gan"
    line = ("+experiment=gan", "--config-dir", str(folder / "conf"), "max_steps=2", "grad_clip=0.001")
    compiled = run(tmp_path / "other", *line[:-1], "compile=true", ok=False, cwd=folder)
    assert compiled.code == 2 and "compile=true is not supported" in compiled.said[0], compiled.out
    clipped, plain = run(tmp_path / "run", *line, cwd=folder), run(tmp_path / "plain", *line[:-1], cwd=folder)
    assert clipped.sha256 != plain.sha256


@pytest.mark.nightly
def test_train_metrics_are_refused_where_a_strategy_has_none(tmp_path):
    for strategy in ("pipeline", "parameter_server"):
        result = run(tmp_path / strategy, *SMALL, f"strategy={strategy}", "log.train_metrics=true", ranks=2, ok=False)
        assert len(result.said) == 1 and "log.train_metrics=true is not supported" in result.said[0], result.out


def test_a_run_goes_on_under_another_strategy(tmp_path):
    line = SMALL
    whole = run(tmp_path / "whole", *line, "max_steps=6")
    run(tmp_path / "run", *line, ranks=2)
    for strategy, steps in (("zero", 4), ("fsdp", 6)):
        result = run(tmp_path / "run", *line, f"strategy={strategy}", f"max_steps={steps}", ranks=2)
    assert [event["step"] for event in result.events("resume")] == [2, 4]
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)
    other = run(tmp_path / "run", *line, "strategy.compression=bf16", "max_steps=8", ranks=2, ok=False)
    assert "Traceback" not in other.out


@pytest.mark.parametrize(
    "more, says",
    [
        (("model._target_=kit.parts.models.Stateful", "strategy.units=['*']", "strategy.activation_checkpointing=true"), "batch norm"),
        (("model._target_=kit.parts.models.Odd", "+model.kind=scalar"), "scale, which is a scalar"),
        (("model._target_=kit.parts.models.Odd", "+model.kind=mixed"), "float32 and float64"),
        (("model._target_=kit.parts.models.Odd", "+model.kind=lazy"), "a lazy layer"),
        (("model._target_=kit.parts.models.Odd", "+model.kind=sparse"), "the model's graph is sparse"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_sharded_is_one_line(tmp_path, more, says):
    line = [part for part in SMALL if "hidden" not in part]
    result = run(tmp_path / "run", *line, "strategy=fsdp", *more, ok=False)
    assert result.code == 2 and len(result.said) == 1 and says in result.said[0], result.out
