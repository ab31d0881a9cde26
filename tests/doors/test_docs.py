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

from docs.picture import BROWSERS, browser

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
NEEDS = {"docker", "slurm", "kubernetes", "network", "gpu", "two-machines", "once"}
"""What a block may say that it needs (```sh needs=docker): then the substrate's own tests run such lines."""

COLD = {"docs/first-run.md"}
"""Pages whose commands start as for a user, from the files of the copy alone; on other pages the imports are shared. The
commands of README.md start as for a user in test_wheel, test_init and test_doctor."""


def blocks(page):
    """(needs, text) of each `sh` block; None needs nothing. A `python` block that begins with `# FILE.py` is written there."""
    text = (ROOT / page).read_text()
    found = re.findall(r"^```(?:sh(?: needs=(\S+))?\n(.*?)|python\n(# (\w+\.py)\n.*?))^```", text, re.S | re.M)
    return [
        (needs or None, f"cat > {file} <<'END'\n{code}END\n" if file else line) for needs, line, code, file in found
    ]


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


@pytest.mark.nightly(but=["README.md", "docs/resume-and-faults.md"])
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


@pytest.mark.unit
def test_no_two_runs_of_a_page_share_a_folder():
    """The second of two is refused: each line that trains with the kit's loop names its run."""
    pages = [*PAGES, "slurm/README.md", "docker/README.md", "k8s/README.md"]
    trains = re.compile(r"(?:-m (?:train|muster)|slurm/\w+\.sbatch|slurm/submit\.py)(?: (?!-)\S+)* [\w.]+=")
    other = (
        "-- my.py",
        "doctor",
        "evaluate",
        " -m muster report",
        "output_dir=",
        "+experiment=",
        "RUN=",
        "--cfg",
        "collectives",
    )
    for page in pages:
        text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text())
        for line in re.findall(r"^(?!\||\s*#)[^`\n]*$", text, re.M):
            if trains.search(line) and not any(word in line for word in other):
                assert re.search(r"\bname=", line), f"{page}: {line}"


@pytest.mark.unit
def test_every_block_says_what_it_is():
    """A command in a block of another kind would be run by nobody."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        kinds = {kind.split()[0] for kind in re.findall(r"^```(\S.*)$", text, re.M)}
        assert kinds <= {"sh", "python", "yaml", "text", "mermaid"}, page
        assert {needs for needs, _ in blocks(page)} <= NEEDS | {None}, page
        assert not re.search(r"^```\n(?:torchrun|python|make|sbatch|docker|kubectl) ", text, re.M), page


@pytest.mark.unit
def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_the_site_is_built_without_a_warning(tmp_path):
    """Every page is in its navigation, every link leads somewhere, and a README beside the templates is a page."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "not included in the" not in done.stderr, done.stderr
    loop = (tmp_path / "loop-recipes.html").read_text()
    assert "<code>examples/own_loop/fsdp2.py</code>" in loop and 'href="examples' not in loop
    assert "sbatch slurm/ddp.sbatch" in (tmp_path / "slurm.html").read_text()
    api = (tmp_path / "api.html").read_text()
    assert "samples per optimizer step over all ranks (not per rank)" in api and "Path:" not in api, (
        "from the docstrings"
    )
    for page in tmp_path.rglob("*.html"):  # the site asks no other host: not for a script, a font, or a graph
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]* src=.?https?:|<link[^>]* href=.?https?:", text), page
        assert 'class="mermaid"' not in text
        for picture in re.findall(r'src="([^"]*drawn/[^"]*)"', text):
            assert (page.parent / picture).is_file()


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs Chromium or Chrome")
def test_the_search_of_a_site_that_was_opened_from_files_finds_something(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1"), check=True, timeout=120,
    )  # fmt: skip
    line = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--virtual-time-budget=20000",
    ]
    profile, page = f"--user-data-dir={tmp_path}/profile", f"{(tmp_path / 'index.html').as_uri()}?q=goodput"
    shown = subprocess.run([browser(), *line, profile, "--dump-dom", page], capture_output=True, text=True, timeout=60)
    assert re.search(r"[1-9]\d* matching documents", shown.stdout), (
        "the search finds nothing in a site opened from files"
    )


WALK = re.compile(r"^\*\*[^\n]*\*\*\n\n\| file \| look for \|\n\|---\|---\|\n((?:\|.*\n)+)", re.M)
STOP = re.compile(r"^\| `([\w/]+\.py)` \| (.*) \|$")


@pytest.mark.unit
def test_every_walk_through_the_code_is_short_and_leads_through_what_is_there():
    walks = [found[1].splitlines() for found in WALK.finditer((ROOT / "docs/architecture.md").read_text())]
    assert len(walks) == 5
    for stops in walks:
        assert len(stops) <= 8
        for stop in stops:
            path, sentence = STOP.match(stop).groups()
            names = {name for name in re.findall(r"`(\w+)`", sentence) if name != "Config"}
            assert names, stop
            assert names <= set(re.findall(r"(?:def|class) (\w+)", (ROOT / path).read_text())), stop
