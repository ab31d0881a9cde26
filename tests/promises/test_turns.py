"""Parts of a model that are trained in turn: what each update changes, at any world size, and what is refused."""

import pytest
import torch
from kit.job import run

OWN = "kit.parts.turns"
BASE = (f"data._target_={OWN}.Data", f"model._target_={OWN}.Two", f"objective._target_={OWN}.loss", "strategy=turns")
BOTH = (*BASE, "strategy.parts=[first,second]", "batch_size=10", "log.every_steps=1", "optimizer.lr=0.1")


def test_an_update_is_the_one_that_is_written_by_hand_at_any_world_size(tmp_path):
    line = (*BOTH, "max_steps=1", "log.train_metrics=true", "optimizer.momentum=0", "optimizer.weight_decay=0")
    one, three = (run(tmp_path / str(n), *line, ranks=n) for n in (1, 3))
    samples = torch.arange(10.0)[:, None]
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for layer, weight in ((first, 0.5), (second, 0.25)):
        torch.nn.init.constant_(layer.weight, weight), torch.nn.init.zeros_(layer.bias)
    of_first = (second(first(samples / 10)) - 1).square().mean()
    for parameter, gradient in zip(
        first.parameters(), torch.autograd.grad(of_first, [*first.parameters()]), strict=True
    ):
        parameter.data -= 0.1 * gradient
    of_second = second(first(samples / 10)).square().mean()
    for parameter, gradient in zip(
        second.parameters(), torch.autograd.grad(of_second, [*second.parameters()]), strict=True
    ):
        parameter.data -= 0.1 * gradient
    for result in (one, three):
        weights, [line] = result.weights, result.lines("train")
        assert weights["first.weight"] == pytest.approx(first.weight.item(), rel=1e-5)
        assert weights["second.weight"] == pytest.approx(second.weight.item(), rel=1e-5)
        assert line["first_loss"] == pytest.approx(of_first.item(), rel=1e-5)
        assert line["second_loss"] == line["loss"] == pytest.approx(of_second.item(), rel=1e-5)


def test_a_part_whose_gradient_is_not_finite_ends_the_run(tmp_path):
    """Its update is left out, and the loss that is logged is another part's."""
    line = (*BOTH, f"model._target_={OWN}.Lost", "max_steps=6", "eval.every_steps=off")
    result = run(tmp_path / "run", *line, ok=False)
    assert result.code == 6 and "not finite at step 3" in result.said[0], result.out


@pytest.mark.parametrize(
    "given, says",
    [
        (BASE, "strategy.parts=[first,second]"),
        ((*BASE, "strategy.parts=[furst]"), "did you mean first?"),
        ((*BOTH, "model._target_=kit.parts.mistakes.Net", "data._target_=kit.parts.mistakes.Data", "strategy.parts=[x]"), "strategy.parts has x"),
        ((*BOTH, f"model._target_={OWN}.Speechless"), "write it, to return the mean loss"),
        ((*BOTH, f"model._target_={OWN}.Vector"), "(turns.py:"),
        ((*BOTH, "precision=bf16"), "precision=bf16 is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_take_turns_is_one_line(tmp_path, given, says):
    result = run(tmp_path / "run", *given, "max_steps=1", ok=False)
    assert result.code == 2 and len(result.said) == 1 and says in result.said[0], result.out
