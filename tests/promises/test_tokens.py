"""Tokenized files: windows by memory map, the plan's samples, and files that cannot be trained on."""

import pickle

import numpy as np
import pytest
import torch
from kit.job import run

from muster.errors import DataError
from muster.train.data.tokens import BLOCK_BYTES, BLOCKS, Tokens

GPT = (
    *("data=tokens", "data.block_size=16", "data.vocab_size=64", "objective=language_modeling"),
    *("model=gpt", "model.num_layers=1", "model.num_heads=2", "model.hidden_dim=8", "batch_size=10"),
)


def write(path, tokens, dtype="<u2"):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(tokens).astype(dtype).tofile(path)


@pytest.fixture
def root(tmp_path):
    draw = np.random.default_rng(0)
    for split, number in (("train", 2001), ("val", 200)):
        write(tmp_path / f"tokens/{split}.bin", draw.integers(0, 64, number))
    return tmp_path / "tokens"


def tokens(root, *, train=True, block_size=4, vocab_size=100, dtype="uint16"):
    return Tokens(train, root=str(root), block_size=block_size, vocab_size=vocab_size, dtype=dtype)


@pytest.mark.parametrize("dtype, code", [("uint16", "<u2"), ("uint32", "<u4")])
@pytest.mark.unit
def test_a_sample_is_a_window_and_its_target_the_next_tokens(tmp_path, dtype, code):
    """The last token is a target only; two tokens that fill no window are left out; no window reaches over two files."""
    write(tmp_path / "train/0.bin", range(11), code)
    write(tmp_path / "train/1.bin", range(50, 55), code)
    data = tokens(tmp_path, dtype=dtype)
    inputs, targets = data.__getitems__([2, 0, 1])
    assert len(data) == 3 and inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[50, 51, 52, 53], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(targets, inputs + 1)
    assert (data.num_classes, data.input_shape, len(tokens(tmp_path, train=False))) == (100, (4,), 0)


@pytest.mark.unit
def test_a_copy_in_a_worker_holds_no_tokens(tmp_path):
    write(tmp_path / "train.bin", [7] * 100_000)
    data = tokens(tmp_path)
    copied = pickle.dumps(data)
    assert len(copied) < 2000 and torch.equal(pickle.loads(copied)[24_000][0], data[0][0])


@pytest.mark.unit
def test_a_fingerprint_is_of_the_tokens(tmp_path):
    whole = np.full(BLOCKS * BLOCK_BYTES, 7)
    write(tmp_path / "train.bin", whole)
    before = tokens(tmp_path).fingerprint()
    assert before == tokens(tmp_path).fingerprint()
    for place in (0, len(whole) // 2, len(whole) - 1):
        whole[place - BLOCK_BYTES if place else 0 : place + BLOCK_BYTES] = 8
        write(tmp_path / "train.bin", whole)
        after = tokens(tmp_path).fingerprint()
        assert after != before
        before = after


@pytest.mark.unit
def test_a_token_far_into_a_file_is_refused_when_it_is_read(tmp_path, monkeypatch):
    """On a GPU it would be an index out of bounds, which leaves the device unusable and names nothing."""
    monkeypatch.setattr("muster.train.data.tokens.LOOKED_AT", 16)
    write(tmp_path / "train.bin", [7] * 20 + [100] + [7] * 20)
    data = tokens(tmp_path)
    data.__getitems__([0, 3, 6])
    with pytest.raises(DataError, match=r"train\.bin: token 20 is 100, and data\.vocab_size=100"):
        data.__getitems__([4])


BAD = {
    "missing": ([], [], "no {root}/train.bin", "data.root"),
    "cut short": ([b"\1\0" * 200 + b"\1"], [], "has 401 bytes", "data.dtype"),
    "too short": ([b"\1\0" * 16], [], "16 tokens, and a sample takes 17", "data.block_size"),
    "beyond the vocabulary": ([b"\1\0" * 199 + b"\100\0"], [], "token 199 is 64", "data.vocab_size"),
    "nothing to test with": ([b"\1\0" * 200], [], "no test samples", "eval.every_steps=off"),
    "no such type": ([b"\1\0" * 200], ["data.dtype=uint8"], "data.dtype=uint8", "'uint16' or 'uint32'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(tmp_path, name):
    content, more, given, remedy = BAD[name]
    root = tmp_path / "tokens"
    root.mkdir()
    for each in content:
        (root / "train.bin").write_bytes(each)
    result = run(tmp_path / "run", *GPT, f"data.root={root}", *more, ok=False)
    assert result.code == (2 if more else 3), result.out
    assert len(result.said) == 1 and given.format(root=root) in result.said[0] and remedy in result.said[0], result.out
    assert "Traceback" not in result.out


def test_tokens_resume_exactly_at_another_world_size(tmp_path, root):
    """Two ranks take 5 steps; then one rank with a loader worker goes on, into the second epoch."""
    line = (*GPT, f"data.root={root}", "virtual_world_size=2", "eval.every_steps=off")
    whole = run(tmp_path / "whole", *line, "max_steps=15")
    run(tmp_path / "parts", *line, "max_steps=5", ranks=2)
    parts = run(tmp_path / "parts", *line, "max_steps=15", "loader.num_workers=1")
    assert parts.events("resume")[0]["step"] == 5
    assert parts.sha256 == whole.sha256 and parts.losses == whole.losses
