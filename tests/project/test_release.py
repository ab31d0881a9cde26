"""What a release is made of: versions that agree, addresses that work away from the repository, workflows that can be read."""

import importlib.util
import re
import tomllib

import pytest
import yaml
from kit.job import ROOT

pytestmark = pytest.mark.unit
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
URL = "https://host/me/muster"


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_whose_files_do_not_agree_is_refused(tmp_path):
    wrong = loaded(ROOT / ".ci/release.py").wrong
    for name in ("pyproject.toml", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION} (2026-12-01)\n")
    assert wrong(f"v{VERSION}", tmp_path) == []
    assert wrong("v9", tmp_path) == [f"the tag v9 is not v{VERSION}, the version in pyproject.toml"]
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION} (unreleased)\n")
    assert "CHANGELOG.md has no heading" in wrong(f"v{VERSION}", tmp_path)[0]
    (tmp_path / "CITATION.cff").write_text("version: 9\n")
    assert len(wrong(f"v{VERSION}", tmp_path)) == 2


def test_the_readme_of_a_release_leads_to_its_repository():
    """All links and pictures, each to a file that is there; addresses and anchors stay."""
    hatch = loaded(ROOT / "hatch_build.py")
    text = hatch.absolute((ROOT / "README.md").read_text() + "[a](https://b) [c](#d)", URL, "v1")
    links = re.findall(r"\]\(([^)]+)\)", text)
    ours = [link for link in links if link.startswith(URL)]
    assert links[-2:] == ["https://b", "#d"] and all("://" in link or link.startswith("#") for link in links)
    assert f"{URL}/raw/v1/docs/report.png" in ours and f"{URL}/blob/v1/docs/seeing.md" in ours
    assert all((ROOT / re.sub(r".*/v1/([^#]+).*", r"\1", link)).exists() for link in ours)
    assert all((ROOT / page.partition("v1/")[2]).exists() for page in hatch.pages("v1").values())


def test_pins_of_another_torch_leave_the_rest_as_it_is():
    there = (ROOT / "constraints.txt").read_text().splitlines()
    found = loaded(ROOT / ".ci/pins.py").pins("2.11", "0.26")
    assert found[-2:] == ["torch==2.11.*", "torchvision==0.26.*"] and set(found[:-2]) < set(there)
    assert not [line for line in found[:-2] if line.startswith(("torch==", "nvidia-", "triton", "cuda-"))]
    assert [line for line in found if line.startswith("torchmetrics==")], "whose name only begins like torch"


def test_the_workflows_run_what_is_here():
    """Each python that pyproject.toml names; every file that a step runs is there."""
    flows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
    matrix = flows["ci"]["jobs"]["quick"]["strategy"]["matrix"]
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert matrix["python"] == named and {"macos-14", "ubuntu-latest"} == {
        *matrix["os"],
        *(each["os"] for each in matrix["include"]),
    }
    steps = [
        step.get("run", "") for flow in flows.values() for job in flow["jobs"].values() for step in job.get("steps", [])
    ]
    run = re.findall(r"(?<![\w/])(\.ci/\w+(?:\.py)?|tests/[\w/]+\.py)", "\n".join(steps))
    assert {".ci/run", ".ci/pins.py", ".ci/release.py", "tests/doors/test_wheel.py"} <= {*run}
    assert all((ROOT / name).exists() for name in run)
    publish = flows["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build", (
        "trusted, and only what was checked"
    )
    assert not re.search(r"secrets\.|password", (ROOT / ".github/workflows/release.yml").read_text())


def test_issue_templates_ask_for_what_is_needed():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        asked = yaml.safe_load(path.read_text())
        if path.stem != "config":
            assert (
                asked["name"]
                and asked["description"]
                and len({each["id"] for each in asked["body"]}) == len(asked["body"])
            )
