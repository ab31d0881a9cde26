"""The README and docs/ are true: every `sh` block is run as printed, in order, in a copy of the checkout."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands import warm_commands
from kit.job import ROOT, environment

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
NEEDS = {"docker", "slurm", "kubernetes", "network", "gpu", "two-machines", "once"}
"""What a block may say that it needs (```sh needs=docker): then the substrate's own tests run such lines."""

COLD = {"docs/first-run.md"}
"""Pages whose commands start as for a user, from the files of the copy alone; on other pages the imports are shared. The
commands of README.md start as for a user in test_wheel, test_init and test_doctor."""


def blocks(page):
    """(needs, text) of each `sh` block; None needs nothing."""
    found = re.findall(r"^```sh(?: needs=(\S+))?\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    return [(needs or None, text) for needs, text in found]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """The files that git tracks, as a clone would have them, with the tests' own environment as its .venv."""
    folder = tmp_path_factory.mktemp("docs") / "muster"
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)  # with its time: make compares them
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    with warm_commands(tmp_path_factory.mktemp("bin")) as folder:
        yield folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [pytest.param(PAGES[0], marks=pytest.mark.long), *PAGES[1:]])
def test_every_line_runs_as_printed(page, checkout, warm):
    script = "\n".join(text for needs, text in blocks(page) if needs is None)
    if not script:
        return
    # Not to install this copy into the environment that the tests share.
    script = script.replace("make train", "make -o .venv/.train train")
    env = {key: value for key, value in environment().items() if key not in ("PYTHONPATH", "MAKEFLAGS", "CI")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    if page not in COLD:  # also after the environment is activated
        env["PATH"] = f"{warm}{os.pathsep}{env['PATH']}"
        script = f'source() {{ . "$@"; PATH={shlex.quote(str(warm))}:$PATH; }}\n{script}'
    shutil.rmtree(checkout / "runs", ignore_errors=True)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script], cwd=checkout, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.unit
def test_every_block_says_what_it_is(page):
    """A command in a block of another kind would be run by nobody."""
    text = (ROOT / page).read_text()
    assert {kind.split()[0] for kind in re.findall(r"^```(\S.*)$", text, re.M)} <= {
        "sh",
        "python",
        "yaml",
        "text",
        "mermaid",
    }, page
    assert {needs for needs, _ in blocks(page)} <= NEEDS | {None}
    assert not re.search(r"^```\n(?:torchrun|python|make|sbatch|docker|kubectl) ", text, re.M), page


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.unit
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_the_site_is_built_without_a_warning(tmp_path):
    """Every page is in its navigation, every link leads somewhere, and a README beside the templates is a page."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "not included in the" not in done.stderr, done.stderr
    loop = (tmp_path / "your-own-loop.html").read_text()
    assert "<code>examples/own_loop/fsdp2.py</code>" in loop and 'href="examples' not in loop
    assert "sbatch slurm/ddp.sbatch" in (tmp_path / "slurm.html").read_text()
    api = (tmp_path / "api.html").read_text()
    assert "samples per optimizer step over all ranks (not per rank)" in api and "Path:" not in api, (
        "from the docstrings"
    )


WALK = re.compile(r"^\*\*[^\n]*\*\*\n\n\| file \| look for \|\n\|---\|---\|\n((?:\|.*\n)+)", re.M)
STOP = re.compile(r"^\| `([\w/]+\.py)` \| (.*) \|$")


@pytest.mark.unit
def test_every_walk_through_the_code_is_short_and_leads_through_what_is_there():
    walks = [found[1].splitlines() for found in WALK.finditer((ROOT / "docs/extending.md").read_text())]
    assert len(walks) == 4
    for stops in walks:
        assert len(stops) <= 8
        for stop in stops:
            path, sentence = STOP.match(stop).groups()
            names = {name for name in re.findall(r"`(\w+)`", sentence) if name != "Config"}
            assert names, stop
            assert names <= set(re.findall(r"(?:def|class) (\w+)", (ROOT / path).read_text())), stop
