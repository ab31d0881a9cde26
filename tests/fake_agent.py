"""A torchrun of the test's own, for what its launcher does with it."""

import sysconfig
import venv

import pytest


@pytest.fixture
def own_python(tmp_path):
    """A Python with all that this one has, beside a torchrun that the test writes."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def torchrun(script):
        (place / "bin/torchrun").write_text(f"#!/bin/bash\n{script}\n")
        (place / "bin/torchrun").chmod(0o755)
        return place / "bin"

    return torchrun
