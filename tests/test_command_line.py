"""What is typed is what is meant: values arrive as they were given, and what cannot be is one line, at once."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.job import ROOT, environment, free_port, run
from kit.warm import run as start

from muster.train.config import compose as composition
from muster.train.config import mode, options
from muster.train.config.compose import compose, run_each
from muster.train.config.differences import to_dict
from muster.train.config.sweep_folder import folder_name

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
    kit = shutil.copytree(options.conf_folder(), tmp_path / "conf")
    folder = kit if "kit" in place else tmp_path / "own"
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "experiment/rates.yaml").write_text(SWEEP)
    line = ["hydra.mode=MULTIRUN", "optimizer.lr=0.1,0.2"] if place == "command line" else ["+experiment=rates"]
    for module in (composition, mode, options) if folder == kit else ():
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


def test_help_of_evaluate_imports_no_torch(tmp_path):
    import subprocess

    line = [sys.executable, "-X", "importtime", "-m", "muster", "evaluate", "--help"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    imported = [words.rpartition("|")[2].strip() for words in done.stderr.splitlines()]
    assert done.returncode == 0 and "--checkpoint" in done.stdout and "muster.faults.preemption" in imported
    assert not {"torch", "hydra", "omegaconf", "pydantic"} & {*imported}, "which take seconds"


def test_muster_refuses_a_tool_that_there_is_not(tmp_path):
    """`muster run` is a module of the kit and no tool: it would end with 0 and have done nothing."""
    import subprocess

    line = [sys.executable, "-m", "muster", "run", "max_steps=1"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "'run'" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.unit
def test_submit_keeps_values_and_refuses_in_a_line(tmp_path):
    sys.path.insert(0, str(ROOT / "slurm"))
    from submit import expand, quoted

    from muster.errors import ConfigError
    from muster.train.config.command_line import parsed

    assert [parsed([f"x={quoted(text)}"])[0].value() for text in HOSTILE] == HOSTILE
    with pytest.raises(ConfigError, match="cannot read the override 'x=a=b'"):
        expand(["x=a=b"])


def test_submit_shows_its_text_also_where_there_is_no_slurm(tmp_path):
    import subprocess

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


def test_submit_takes_a_folder_of_yaml_files(tmp_path):
    import subprocess

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
