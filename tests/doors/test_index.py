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


@pytest.mark.nightly
def test_make_takes_torch_from_the_index_as_pinned(index, tmp_path):
    venv = tmp_path / "venv"
    line = ["make", f"VENV={venv}", f"PYTHON={sys.executable}", f"TORCH_INDEX={index}", f"{venv}/.torch"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(venv) == WANTED


def bare_venv(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    return venv, {"PATH": f"{venv}/bin:/usr/bin:/bin"}


@pytest.mark.nightly
def test_an_image_takes_torch_from_the_index(index, tmp_path):
    """The script that the image's build runs, but for its last line, which installs the rest."""
    venv, env = bare_venv(tmp_path)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    script = (ROOT / "docker/install.sh").read_text().replace("/var/cache/pip", f"{tmp_path}/cache")
    first = script.rpartition("\n")[0].rpartition("\n")[0]
    given = {**env, "TORCH_INDEX": index, "KIT": str(tmp_path / "kit")}
    done = subprocess.run(["bash", "-c", first], env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(venv) == WANTED
    none = subprocess.run(["bash", "-c", first], env={**given, "TORCH_INDEX": ""}, capture_output=True, text=True)
    assert none.returncode == 0 and not none.stdout, "no index, no pip"


def test_the_gpu_image_never_takes_the_cpu_wheels():
    stages = re.split(r"^FROM ", (ROOT / "docker/Dockerfile").read_text(), flags=re.M)
    named = {stage.split()[2]: stage for stage in stages if " AS " in stage}
    assert [name for name, stage in named.items() if re.search(r"^ARG .*TORCH_INDEX", stage, re.M)] == ["cpu-packages"]
    assert "install.sh" in named["gpu-packages"] and named["gpu"].startswith("gpu-packages")


@pytest.mark.parametrize("image", ["docker/Dockerfile", "docker/wheel.Dockerfile"])
def test_an_image_for_gpus_has_the_compiler_that_triton_calls(image):
    text = (ROOT / image).read_text()
    stage = next(each for each in re.split(r"^FROM ", text, flags=re.M)[::-1] if "NVIDIA_" in each or "wheel" in image)
    (line,) = re.findall(r"apt-get install -y --no-install-recommends (.*?) \\$", stage, re.M)
    assert {"gcc", "libc6-dev"} <= {*line.split()}


@pytest.mark.nightly
def test_the_wheel_s_image_takes_torch_from_the_index(index, tmp_path):
    """The image's own shell line, without the rest of the build."""
    venv, env = bare_venv(tmp_path)
    text = (ROOT / "docker/wheel.Dockerfile").read_text().replace("\\\n", " ")
    line = re.search(r"if \[ -n \"\$\{TORCH_INDEX:-\}\" \]; then .*?fi", text)[0]
    line = line.replace("-c /opt/muster/constraints.txt ", "").replace(
        "torch torchvision", f"torch=={VERSIONS['torch']} torchvision=={VERSIONS['torchvision']}"
    )
    given = {**env, "TORCH_INDEX": index}
    done = subprocess.run(["bash", "-euc", line], env=given, capture_output=True, text=True, timeout=120)
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
    image = ["make", "--dry-run", "image"]
    assert (
        f"TORCH_INDEX={CPU_INDEX}" in subprocess.run(image, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    build = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["folder"]["build"]
    assert build["args"] == {"TORCH_INDEX": "${TORCH_INDEX:-}"}
