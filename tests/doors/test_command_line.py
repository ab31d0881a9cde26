"""What is typed is what is meant: values arrive as they were given, and what cannot be is one line, at once."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.job import QUIET, ROOT, by_hand, environment, free_port, hold, pace, run
from kit.loopback import children
from kit.until import until
from kit.warm import run as start

import muster
from muster.launcher.spec import UNSHARED
from muster.train.config import choices, sweeper
from muster.train.config import compose as composition
from muster.train.config.compose import compose, run_each
from muster.train.config.differences import to_dict
from muster.train.config.sweeper import folder_name

OWN = ["optimizer._target_=torch.optim.Adam", "model._target_=kit.parts.models.Stateful"]
HOSTILE = [
    "/x/model.pt", "runs/data.v2", "model.", "++model.x=1", "data.root=/x", "a=b,c", "it's", 'say "x"', "~optimizer.lr", "a\\b\\",
    "[1,2]", "{a:1}", " blanks ", "key::value", "null", "1e3", "--config-dir", "-m", "optimizer.lr=3", "#x", "$HOME", "(x)", "ü",
]  # fmt: skip


def quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).filter(lambda text: "${" not in text)
)
@settings(max_examples=6, deadline=None)
@example("/x/model.pt")
@example("a.data.optimizer.model.v2")
def test_a_value_is_what_was_given_also_beside_parts_by_import_path(text):
    given = [f"init_from={quoted(text)}", f"+own.x={quoted(text)}", f"+optimizer.foreach={quoted(text)}"]
    config = compose(["optimizer._target_=builtins.dict", *given])
    assert (config.init_from, config.own["x"]) == (text, text)
    assert to_dict(config.optimizer) == {"_target_": "builtins.dict", "foreach": text}


@pytest.mark.unit
def test_hostile_values_arrive_unchanged():
    """Each for a key of the kit's in turn, beside parts by import path."""
    given = [f"+own.value{number}={quoted(text)}" for number, text in enumerate(HOSTILE)]
    config = compose([*OWN, *given, "output_dir=runs/data.v2"])
    assert [*config.own.values()] == HOSTILE and config.output_dir == "runs/data.v2"
    assert to_dict(config.optimizer) == {"_target_": "torch.optim.Adam"}
    whole = compose(["++optimizer={_target_:torch.optim.Adam,eps:0.1}"])
    assert to_dict(whole.optimizer) == {"_target_": "torch.optim.Adam", "eps": 0.1}


def test_a_run_writes_where_it_was_told_to(tmp_path):
    first = run(tmp_path / "data.v1" / "model.first", *OWN[1:], "max_steps=1", cwd=tmp_path)
    target = str(tmp_path / "data.v2" / "it's model.x, 'y' = z")
    line = [*OWN, f"init_from={first.folder}/model.pt", "max_steps=1", f"output_dir={quoted(target)}"]
    code, out = start([*line, "log.report=false"], [environment()], cwd=tmp_path, timeout_s=60)
    assert code == 0, out
    assert Path(target, "model.pt").exists() and sorted(path.name for path in tmp_path.iterdir()) == [
        "data.v1",
        "data.v2",
    ]
    config = yaml.safe_load(Path(target, "config.yaml").read_text())
    assert config["init_from"] == f"{first.folder}/model.pt" and config["output_dir"] == target


@pytest.mark.unit
def test_what_is_taken_away_stays_away_beside_a_part_by_import_path():
    """`~key` of the option that was replaced, and of what a yaml or the line gives."""
    given = ["optimizer._target_=torch.optim.Adam", "~optimizer.momentum", "+optimizer.eps=0.1", "++optimizer.lr=0.5"]
    assert compose([*given, "~optimizer.eps"]).optimizer.values == {"lr": 0.5}


def test_an_interpolation_in_an_override_is_resolved_once(tmp_path):
    line = [*OWN, "+own.place='a b, c'", f"output_dir='{tmp_path}/${{own.place}}'", "max_steps=1", "log.report=false"]
    code, out = start(line, [environment()], cwd=tmp_path, timeout_s=60)
    assert code == 0 and (tmp_path / "a b, c/model.pt").exists(), out


@pytest.mark.unit
def test_jobs_of_a_sweep_never_share_a_folder():
    texts = ["init_from=/a/b", "init_from=/a_b", "init_from=/a?b", "x=" + "y" * 300, "x=" + "y" * 301]
    assert len({folder_name(text) for text in texts}) == len(texts)
    assert all(len(folder_name(text).encode()) < 256 and "/" not in folder_name(text) for text in texts)


SWEEP = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {optimizer.lr: '0.1,0.2'}}}\n"


@pytest.mark.unit
@pytest.mark.parametrize("place", ["command line", "folder of one's own", "the kit's own folder"])
def test_a_sweep_that_is_asked_for_without_m(place, tmp_path, monkeypatch):
    kit = shutil.copytree(choices.conf_folder(), tmp_path / "conf")
    folder = kit if "kit" in place else tmp_path / "own"
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "experiment/rates.yaml").write_text(SWEEP)
    line = ["hydra.mode=MULTIRUN", "optimizer.lr=0.1,0.2"] if place == "command line" else ["+experiment=rates"]
    for module in (composition, sweeper, choices) if folder == kit else ():
        monkeypatch.setattr(module, "conf_folder", lambda: kit)
    monkeypatch.setattr(sys, "argv", ["muster", *line, *(["--config-dir", str(folder)] if folder != kit else [])])
    jobs = []
    run_each(lambda config, _values: jobs.append(config) or 0)
    assert [each.optimizer.values["lr"] for each in jobs] == [0.1, 0.2], jobs


def conf(folder: Path) -> Path:
    """A user's yaml files with what can be wrong in them."""
    place = folder / "conf/experiment"
    place.mkdir(parents=True)
    for name, text in {
        "bad": "# @package _global_\nname: [1\nb: {\n",
        "twice": "# @package _global_\nseed: 1\nseed: 2\n",
        "tab": "# @package _global_\nown:\n\tx: 1\n",
        "tag": "# @package _global_\nname: !!python/object:os.system {}\n",
        "text": "only words",
        "list": "# @package _global_\nseed: [1, 2]\n",
        "placed": "seed: 1\n",
    }.items():
        (place / f"{name}.yaml").write_text(text)
    (place / "bytes.yaml").write_bytes(b"\xff\xfe\x00bad")
    (folder / "conf/model").mkdir()
    (folder / "conf/model/two.yaml").write_text("_target_: mine.Two\nheads: 2\n")
    (folder / "file").write_text("")
    return folder / "conf"


MISTAKES = {
    "--gpus 0 2": "--gpus is not an option: write gpus=[0,2], without dashes",
    "--gpus 1": "write gpus=1, without",
    "-lr 0.1": "write lr=0.1",
    "my.py --lr 0.1": "my.py is not an option: a script comes after --",
    "gpus=0,2": "write gpus=[0,2]",
    "gpus=[]": "names no device",
    "gpus=[-1]": "names no device",
    "gpus=true": "names no device",
    "gpus=[1,1]": "twice",
    "seed=18446744073709551616": "at most 18446744073709551615",
    "seed=-1": "at least 0",
    "batch_size_per_rank=32": "for 32 on each of 1 write batch_size=32",
    "learning_rate=0.1": "write optimizer.lr",
    "gradient_accumulation_steps=4": "micro_batch_size is the most that a rank computes at once",
    "seed=inf": "Integer",
    "seed=[1,2]": "Integer",
    "epochs=1e3": "write epochs=1000",
    "batch_size=1e3": "write batch_size=1000",
    "batch_size=1.5": "Integer",
    "optimizer.lr=nan": "optimizer.lr=nan is not a finite number",
    "optimizer.lr=inf": "not a finite number",
    "optimizer.lr=[0.1]": "optimizer.lr=[0.1]",
    "optimizer=adamw optimizer.betas=[nan,0.9]": "optimizer.betas=nan",
    "grad_clip=nan": "grad_clip=nan",
    "grad_clip=inf": "not a finite number",
    "dist.timeout_s=nan": "dist.timeout_s=nan",
    "dist.timeout_s=inf": "at most 1000000000",
    "dist.start_timeout_s=1e300": "at most 1000000000",
    "strategy.bucket_cap_mb=inf": "not a finite number",
    "name=": "name is empty",
    "name=[a]": "name: ",
    "name=null": "name: ",
    "model=[1,2]": "model is chosen by name",
    "optimizer=3": "optimizer is chosen by name",
    "loggers=[1]": "loggers is chosen by name",
    "model={width:3}": "model takes a name",
    "+loggers.x=3": "loggers.x=3 is not a part",
    "own.x=3": "write +own.x=",
    "+epoch=7": "unknown key epoch; did you mean epochs?",
    "+checkpoint.mode=min": "did you mean best_mode?",
    "+loader.batchsize=7": "unknown key loader.batchsize",
    "~model": "model is not chosen",
    "name=${nowhere}": "nowhere",
    "output_dir=${oc.env:MUSTER_NOWHERE}": "MUSTER_NOWHERE",
    "--config-dir": "expected one argument",
    "--config-dir missing": "/missing: it does not exist",
    "--config-dir file": "/file: it is not a folder",
    "--config-name nope": "there is no nope.yaml",
    "--cfg nope": "invalid choice",
    "--config-dir conf +experiment=bad": "bad.yaml:3: expected ',' or ']'",
    "--config-dir conf +experiment=twice": "twice.yaml:3: found duplicate key seed",
    "--config-dir conf +experiment=tab": "tab.yaml:3: ",
    "--config-dir conf +experiment=tag": "tag.yaml:2: ",
    "--config-dir conf +experiment=bytes": "bytes.yaml is not UTF-8 text",
    "--config-dir conf +experiment=text": "experiment/text.yaml: ",
    "--config-dir conf +experiment=list": "experiment/list.yaml: seed: ",
    "--config-dir conf +experiment=plaecd": "did you mean placed? valid: bad, bytes, cifar10_resnet18, ",
    "--config-dir=conf model=tow": "did you mean two? valid: convnet, gpt, mlp, recommender, resnet18, resnet50, two, vit",
    "model=mlp -cd conf model.heads=3": "model.heads is a key of model=two, not of the model chosen",
    "hydra.searchpath=[file://conf] model=tow": "did you mean two?",
    "--config-dir conf +experiment=placed": "begin the file with `# @package _global_`",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_true_line(tmp_path, line):
    conf(tmp_path)
    code, out = start(line.split(), [environment()], cwd=tmp_path, timeout_s=60)
    assert code == 2 and len(out.splitlines()) == 1 and MISTAKES[line] in out, out
    assert out.startswith("muster: config error: ") and not (tmp_path / "runs").exists()


def test_it_is_one_line_for_all_ranks(tmp_path):
    """Also where the mistake leaves no config to read how the ranks meet."""
    conf(tmp_path)
    for line in (["--config-dir", "conf", "+experiment=bad"], ["optimizer.lr=nan"], ["--gpus", "0", "2"]):
        place = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ranks = [environment(RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in (0, 1)]
        code, out = start(line, ranks, cwd=tmp_path, timeout_s=60)
        said = [text for text in out.splitlines() if text.startswith("muster: ")]
        assert code == 2 and len(said) == 1 and "Traceback" not in out, out


def test_what_can_simply_work_does(tmp_path):
    run(tmp_path / "a", "gpus=0", "device=cpu", f"seed={2**64 - 1}", "max_steps=1", "eval.every_steps=off")
    storage = f"checkpoint.storage=file://{tmp_path}/new/folder"
    result = run(tmp_path / "b", storage, "max_steps=1", "eval.every_steps=off")
    assert (tmp_path / "new/folder/step-00000001/manifest.json").exists(), result.out
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["gpus"] == [0]


def test_help_knows_a_folder_of_yaml_files_and_quotes_values(tmp_path):
    conf(tmp_path)
    code, out = start(["--help", "--config-dir", "conf"], [environment()], cwd=tmp_path, timeout_s=60)
    assert code == 0 and "resnet50, two, vit" in out and "mnist_mlp, placed" in out, out
    assert (
        "checkpoint.resume         'auto' resumes from the newest" in out
        and "`" not in out.partition("Every key and")[0]
    )


def test_a_sweep_s_table_names_each_job_by_what_is_swept(tmp_path):
    """At 80 columns, refused jobs too; and nothing is left beside the runs."""
    line = ["-m", "name=sw", "optimizer.lr=0.1,bad", "+own.a_rather_long_key=8,16", "max_steps=1", "log.progress=none"]
    line += ["log.report=false", "log.tensorboard=false"]
    code, out = start(line, [environment(COLUMNS="80")], cwd=tmp_path, timeout_s=60)
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in out.splitlines() if row.startswith("│")]
    assert code == 2 and [row[:3] for row in rows] == [
        [rate, width, code] for rate, code in (("0.1", "0"), ("bad", "2")) for width in ("8", "16")
    ], out
    assert "optimizer.lr ┃ own.a_rather_long_key ┃ exit code ┃ step ┃ accuracy" in out and "runs: runs/sw" in out, out
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.nightly
def test_ranks_meet_anew_for_each_run_of_a_sweep(tmp_path):
    """Where rank 0 hosts the store, for runs whose ranks are restarted in place and for others, in any order."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train", "-m"]
    for strategies in ("ddp,zero,fsdp", "parameter_server,ddp"):
        line_of = [*line, f"name={strategies[:3]}", f"strategy={strategies}", "data=synthetic", "max_steps=1", *QUIET]
        done = subprocess.run(
            line_of, env=environment(**UNSHARED), cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        out = done.stdout + done.stderr
        assert done.returncode == 0 and "muster: " not in out, out
        assert out.count("done: step=1") == len(strategies.split(",")), out


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_sweep_goes_on_after_a_run_that_has_diverged(tmp_path, strategy):
    """And its launcher's exit code is that of the run that ended worst."""
    rates = ["optimizer.lr=0.1,1e30,0.05", f"strategy={strategy}"]
    line = [sys.executable, "-m", "train.launch", "node", "-m", "name=sw", *rates, "max_steps=6", *QUIET]
    done = subprocess.run(line, env=environment(NPROC="2"), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    out = done.stdout + done.stderr
    assert done.returncode == 6 and out.count("done: step=6") == 2, out
    assert "best: runs/sw/lr-0.1" in out and "does not apply: an imported" not in out, out
    assert f"muster: {tmp_path}/runs/sw: diverged (exit code 6)" in out, out


@pytest.mark.nightly
def test_a_sweep_one_of_whose_runs_is_refused_is_not_done(tmp_path):
    line = [sys.executable, "-m", "train.launch", "node", "-m", "name=sw", "strategy=ddp,single", "max_steps=2", *QUIET]
    done = subprocess.run(line, env=environment(NPROC="2"), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "1 of the sweep's 2 runs left no record" in done.stderr, done.stdout + done.stderr


@pytest.mark.nightly
def test_a_sweep_that_is_told_to_stop_begins_no_further_run(tmp_path):
    line = [sys.executable, "-m", "train", "-m", "name=sw", "seed=1,2,3", "max_steps=10000", *QUIET, *pace(0.05)]
    sweep = subprocess.Popen(
        line, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until(
        lambda: (tmp_path / "runs/sw/seed-1/metrics.jsonl").exists() or sweep.poll() is not None,
        "first run",
        timeout_s=60,
    )
    sweep.send_signal(signal.SIGTERM)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 75 and out.count("preempted: step=") == 1, out
    assert [path.name for path in (tmp_path / "runs/sw").iterdir()] == ["seed-1"]


@pytest.mark.nightly
@pytest.mark.parametrize("at_s", [0.0, 0.2])
def test_a_sweep_that_is_told_to_stop_between_two_runs_is_to_be_run_again(tmp_path, at_s):
    """Nothing has failed: the next run had not begun, or it saves its first step."""
    line = [sys.executable, "-m", "train.launch", "node", "-m", "name=sw", "seed=1,2,3", "max_steps=8", *QUIET]
    line += hold(1, until=f"{tmp_path}/go-${{seed}}")
    (tmp_path / "go-1").touch()
    with (tmp_path / "log").open("w") as log:
        sweep = subprocess.Popen(line, env=environment(NPROC="2"), cwd=tmp_path, stdout=log, stderr=log)
    first = tmp_path / "runs/sw/seed-1/outcome.json"
    until(lambda: first.exists() and json.loads(first.read_text())["outcome"] == "done", "first run", timeout_s=60)
    time.sleep(at_s)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(timeout=90) == 75, (tmp_path / "log").read_text()
    for seed in (2, 3):
        (tmp_path / f"go-{seed}").touch()
    done = subprocess.run(line, env=environment(NPROC="2"), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    ends = [json.loads(path.read_text())["outcome"] for path in sorted(tmp_path.glob("runs/sw/*/outcome.json"))]
    assert done.returncode == 0 and ends == ["done"] * 3, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["port", "file"])
def test_a_refused_value_costs_a_sweep_on_several_ranks_no_other_run(tmp_path, place):
    """Nor does one that diverges after it, whether the ranks meet at a port or through a file."""
    line = [sys.executable, "-m", "train", "-m", "name=sw", "optimizer.lr=bad,0.1,1e30,0.05", "max_steps=6", *QUIET]
    line += [f"dist.init_method=file://{tmp_path}/meet"] if place == "file" else []
    with (tmp_path / "log").open("w") as log:
        ranks = [
            subprocess.Popen(line, env=environment(**each), cwd=tmp_path, stdout=log, stderr=log) for each in by_hand(2)
        ]
    codes = [rank.wait(timeout=120) for rank in ranks]
    out = (tmp_path / "log").read_text()
    ends = {
        path.parent.name: json.loads(path.read_text())["outcome"] for path in tmp_path.glob("runs/sw/*/outcome.json")
    }
    assert ends == {"lr-0.1": "done", "lr-1e+30": "diverged", "lr-0.05": "done"}, out
    assert codes == [6, 6] and "best: runs/sw/lr-0.1" in out, out


def is_listening(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.nightly
def test_a_sweep_goes_on_without_a_node_that_is_lost(tmp_path):
    """As a single run does: the ranks that are left begin anew, and do not wait for it in each run that is left."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    line += [f"--rdzv-endpoint=127.0.0.1:{(port := free_port())}", "--rdzv-id=7", "--max-restarts=3"]
    line += ["--rdzv-conf=last_call_timeout=20", "-m", "train", "-m", "name=sw", "seed=1,2,3", "max_steps=40", *QUIET]
    agents = []
    for number in range(2):
        with (tmp_path / f"{number}.log").open("w") as log:
            agents.append(
                subprocess.Popen([*line, *pace(0.1)], env=environment(), cwd=tmp_path, stdout=log, stderr=log)
            )
        until(lambda: is_listening(port), "the first agent, which hosts the rendezvous", timeout_s=60, every_s=0.1)
    metrics = tmp_path / "runs/sw/seed-1/metrics.jsonl"
    until(
        lambda: metrics.exists() and '"step": 15' in metrics.read_text(),
        "steps",
        timeout_s=150,
        said=lambda: (tmp_path / "0.log").read_text(),
    )
    ranks = children(agents[1].pid)
    for pid in (agents[1].pid, *ranks):  # first the agent, which would start others; they may end with it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert agents[0].wait(timeout=150) == 0, (tmp_path / "0.log").read_text()
    agents[1].wait()
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/sw/*/outcome.json"))]
    assert [end["outcome"] for end in ends] == ["done"] * 3, ends
    assert (tmp_path / "0.log").read_text().count("best: ") == 1, "one table, at the end"


@pytest.mark.nightly
def test_two_jobs_of_a_sweep_of_names_share_no_folder(tmp_path):
    code, out = start(["-m", "name=na,nb", "max_steps=2,4", *QUIET], [environment()], cwd=tmp_path, timeout_s=60)
    found = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("runs/**/model.pt"))
    assert code == 0 and found == [f"runs/{name}/max_steps-{steps}" for name in ("na", "nb") for steps in (2, 4)], out


@pytest.mark.nightly
def test_a_job_that_was_refused_has_no_values_of_the_run_in_its_folder(tmp_path):
    start(["-m", "name=h", "seed=1,2", "max_steps=8", *QUIET], [environment()], cwd=tmp_path, timeout_s=60)
    code, out = start(
        ["-m", "name=h", "seed=1,3", "batch_size=32", "max_steps=2", *QUIET],
        [environment()],
        cwd=tmp_path,
        timeout_s=60,
    )
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in out.splitlines() if row.startswith("│")]
    assert code == 2 and [row[0] for row in rows] == ["3", "1"], out
    assert "best: runs/h/seed-3" in out and not any(cell for cell in rows[1][2:]), out


@pytest.mark.nightly
def test_an_order_that_each_rank_would_draw_for_itself_is_refused(tmp_path):
    line = ["-m", "name=sh", "seed=shuffle(range(1,4))", "max_steps=1", *QUIET]
    code, out = start(line, [{**environment(), **each} for each in by_hand(2)], cwd=tmp_path, timeout_s=60)
    assert (
        code == 2 and "seed=shuffle(range(1,4)): each of several ranks" in out and not (tmp_path / "runs").exists()
    ), out
    code, out = start(line, [environment()], cwd=tmp_path, timeout_s=60)
    assert code == 0, out


@pytest.mark.parametrize("port", ["0", "70000", "-1"])
def test_a_port_that_there_is_not_is_refused(tmp_path, port):
    ranks = [{**environment(), **each, "MASTER_PORT": port} for each in by_hand(2)]
    code, out = start(["name=p", "max_steps=1", *QUIET], ranks, cwd=tmp_path, timeout_s=60)
    assert code == 2 and f"MASTER_PORT={port} is no port" in out and "Traceback" not in out, out


def test_a_run_that_a_callback_ends_with_0_is_not_done(tmp_path):
    source = (
        "from muster.train.callbacks.base import Callback\n\n\nclass Ends(Callback):\n    def on_step_end(self, run):\n"
    )
    (tmp_path / "mine.py").write_text(source + "        raise SystemExit(0)\n")
    line = ["name=e", "+callbacks.e._target_=mine.Ends", "max_steps=3", *QUIET]
    code, out = start(
        line, [environment(PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}")], cwd=tmp_path, timeout_s=60
    )
    assert code == 1 and json.loads((tmp_path / "runs/e/outcome.json").read_text())["exit_code"] == 1, out


def test_help_of_evaluate_imports_no_torch(tmp_path):

    line = [sys.executable, "-X", "importtime", "-m", "muster", "evaluate", "--help"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    imported = [words.rpartition("|")[2].strip() for words in done.stderr.splitlines()]
    assert done.returncode == 0 and "--checkpoint" in done.stdout and "muster.faults.preemption" in imported
    assert not {"torch", "hydra", "omegaconf", "pydantic"} & {*imported}, "which take seconds"


@pytest.mark.nightly
def test_muster_refuses_a_tool_that_there_is_not(tmp_path):
    """`muster run` is a module of the kit and no tool: it would end with 0 and have done nothing."""

    line = [sys.executable, "-m", "muster", "run", "max_steps=1"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "'run'" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    line[3:] = ["doctr"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean doctor?" in done.stderr, done.stderr
    line[3:] = ["--version"]
    said = subprocess.run(line, env=environment(), capture_output=True, text=True).stdout
    assert said.startswith("muster 0.") and said == f"muster {muster.__version__}\n"
    line[3:] = ["--help"]
    shown = subprocess.run(line, env=environment(), capture_output=True, text=True).stdout
    assert all(
        tool in shown for tool in ("init", "launch", "doctor", "evaluate", "load", "export", "report", "collectives")
    )


@pytest.mark.unit
def test_submit_keeps_values_and_refuses_in_a_line(tmp_path):
    from muster.errors import ConfigError
    from muster.train.config.command_line import parsed
    from muster.train.submit import expand, quoted

    assert [parsed([f"x={quoted(text)}"])[0].value() for text in HOSTILE] == HOSTILE
    with pytest.raises(ConfigError, match="cannot read the override 'x=a=b'"):
        expand(["x=a=b"])


@pytest.mark.nightly
def test_submit_shows_its_text_also_where_there_is_no_slurm(tmp_path):

    line = [sys.executable, str(ROOT / "slurm/submit.py"), "name=x"]
    env = environment(PATH=str(tmp_path))
    refused = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "--dry-run" in refused.stderr and "srun" in refused.stderr, refused.stderr
    shown = subprocess.run([*line, "--dry-run"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "#SBATCH --nodes" in shown.stdout, shown.stderr
    (tmp_path / "my.py").touch()
    line[2:] = ["--dry-run", "cluster.nodes=3", "--", "my.py", "--lr", "1e-3", "a b"]
    shown = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert "#SBATCH --nodes=3\n" in shown.stdout and "# job 0: -- my.py --lr 1e-3 'a b'" in shown.stdout, shown.stderr
    for words, said in ((["max_steps=3"], "max_steps=3 stands before --"), (["-m"], "-m sweeps overrides")):
        refused = subprocess.run(
            [*line[:2], *words, "--", "my.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert refused.returncode == 2 and said in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr


@pytest.mark.nightly
def test_submit_takes_a_folder_of_yaml_files(tmp_path):

    conf = tmp_path / "my conf"
    for file, text in {
        "experiment/mine.yaml": "# @package _global_\nname: mine\n",
        "cluster/box.yaml": "defaults: [/schema/cluster/slurm@_here_, _self_]\npartition: mine\n",
        "cluster/bare.yaml": "partition: mine\n",
    }.items():
        (conf / file).parent.mkdir(parents=True, exist_ok=True)
        (conf / file).write_text(text)

    def submit(*words):
        line = [sys.executable, str(ROOT / "slurm/submit.py"), "--dry-run", *words]
        return subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)

    shown = submit("--config-dir", "my conf", "cluster=box", "+experiment=mine").stdout
    assert "#SBATCH --partition=mine" in shown and f"{tmp_path}/runs/mine" in shown
    assert shown.rstrip().endswith(f"--config-dir '{conf}'"), "the nodes compose the same config, wherever they start"
    for words, said in ((["nowhere"], "it does not exist"), (["my conf", "cluster=bare"], "begin it with `defaults")):
        refused = submit("--config-dir", *words)
        assert refused.returncode == 2 and said in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr


@pytest.mark.nightly(but=["report"])
@pytest.mark.parametrize("tool", ["launch", "report", "evaluate", "doctor", "collectives"])
def test_in_a_clone_the_tools_have_a_second_name(tool):
    line = [sys.executable, "-m", f"train.{tool}", "--help"]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and f"muster {tool}" in done.stdout, done.stderr


def test_no_module_is_there_twice(tmp_path):
    """Under the name `train` there are the commands; and a project's own `train` is left alone."""
    result = run(tmp_path / "run", "model._target_=train.models.mlp.Mlp", ok=False)
    said = "model._target_=train.models.mlp.Mlp: no models there; valid: muster.train"
    assert result.code == 2 and said in result.out, result.out
    (tmp_path / "train").mkdir()
    (tmp_path / "train/__init__.py").write_text("")
    (tmp_path / "train/models.py").write_text("from kit.parts.models import Stateful as Net")
    run(tmp_path / "own", "model._target_=train.models.Net", "max_steps=2", *QUIET, module="muster", cold=True)
    assert "train.models.Net" in (tmp_path / "own/config.yaml").read_text()
