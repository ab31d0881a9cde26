"""PyTorch's CPU wheels from an index of their own, here one with two small wheels: as make, the images and compose ask for them."""

import functools
import http.server
import re
import subprocess
import sys
import threading
import zipfile

import pytest
import yaml
from kit.job import ROOT

VERSIONS = dict(re.findall(r"^(torch|torchvision)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def index(tmp_path):
    """The address of an index whose torch asks for a package that nobody has: --no-deps leaves it out."""
    for name, version in VERSIONS.items():
        folder = tmp_path / "index" / name
        folder.mkdir(parents=True)
        facts = f"{name}-{version}+cpu"
        with zipfile.ZipFile(folder / f"{facts}-py3-none-any.whl", "w") as wheel:
            needs = "Requires-Dist: not-on-any-index==1\n"
            wheel.writestr(
                f"{facts}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+cpu\n{needs}"
            )
            wheel.writestr(f"{facts}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{facts}.dist-info/RECORD", "")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def versions(venv):
    code = "from importlib.metadata import version as v; print(v('torch'), v('torchvision'))"
    return subprocess.run([venv / "bin/python", "-c", code], capture_output=True, text=True, check=True).stdout.split()


WANTED = [f"{VERSIONS[name]}+cpu" for name in ("torch", "torchvision")]


def test_make_takes_torch_from_the_index_as_pinned(index, tmp_path):
    venv = tmp_path / "venv"
    line = ["make", f"VENV={venv}", f"PYTHON={sys.executable}", f"TORCH_INDEX={index}", f"{venv}/.torch"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(venv) == WANTED


@pytest.mark.parametrize("name", ["Dockerfile", "wheel.Dockerfile"])
def test_an_image_takes_torch_from_the_index(name, index, tmp_path):
    """The image's own shell line, without the rest of the build."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    text = (ROOT / "docker" / name).read_text().replace("\\\n", " ")
    line = re.search(r"if \[ -n \"\$\{TORCH_INDEX:-\}\" \]; then .*?fi", text)[0].replace("/opt/muster", str(ROOT))
    env = {"PATH": f"{venv}/bin:/usr/bin:/bin", "TORCH_INDEX": index}
    done = subprocess.run(["bash", "-euc", line], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(venv) == WANTED
    subprocess.run(
        ["bash", "-euc", line], env={"PATH": "/nowhere"}, executable="/bin/bash", check=True
    )  # no index, no pip


def test_make_names_the_documented_index_for_cpu_1_alone(tmp_path):
    def asked(*words):
        line = ["make", "--dry-run", f"VENV={tmp_path}/none", *words, f"{tmp_path}/none/.train"]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    first, rest = asked("CPU=1").split("torch torchvision\n")
    assert f"--no-deps --index-url {CPU_INDEX} " in first and CPU_INDEX not in rest and "-c constraints.txt" in rest
    assert "--index-url" not in asked()
    build = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["folder"]["build"]
    assert build["args"] == {"TORCH_INDEX": "${TORCH_INDEX:-}"}
