"""The files of a user's project, made from the kit's own templates by a pure function."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.errors import ConfigError, nearest
from muster.launcher.script import MARK, script_of

KIT_IMAGE = "muster:cpu"
PACKAGE = Path(__file__).resolve().parents[1]
SUBSTRATES = {
    "slurm": ("ddp.sbatch", "container.sbatch", "doctor.sbatch", "ask.sh", "job.sh", "submit.py"),
    "docker": ("compose.yaml",),
    "k8s": (
        "pytorchjob.yaml", "volume.yaml", "network-policy.yaml", "trainjob/trainjob.yaml", "indexed-job/indexed-job.yaml"
    ),
}  # fmt: skip
DOCKERFILE = """\
# Your project on the kit's image {kit}, which docker/wheel.Dockerfile or a clone of the kit builds once.
ARG KIT={kit}
FROM ${{KIT}}
# Your own packages, before the code, so that an edit of it does not install them again{packages}
COPY --chown=1000:1000 . /job
ENV PYTHONPATH=/opt/muster:/job
"""
PACKAGES = (
    "COPY requirements.txt /opt/",
    "USER 0:0",
    "RUN pip install --no-cache-dir -c /opt/muster/constraints.txt -r /opt/requirements.txt",
    "USER 1000:1000",
)
IGNORES = {
    ".gitignore": """\
docker/*.whl
.env
.venv/
__pycache__/
mlruns/
runs/
wandb/
# Data sets, but not a package of that name.
/data/**
!/data/**/
!/data/**/*.py
""",
    ".dockerignore": """\
**/.env
**/.git
**/.venv
**/__pycache__
**/mlruns
**/wandb
runs
# Data sets, but not a package of that name.
data/**
!data/**/*.py
""",
}
"""Neither a repository nor an image should have secrets, environments, data or output of runs."""
README = """\
# {name} on Muster

The job is `{job}`. Run these commands in this folder, with the environment active in which Muster is installed; {again}.

| | |
|---|---|
| this machine | `torchrun --nproc-per-node=2 --max-restarts=3 {local}` |
{rows}
After it: {after}.
{images}{operator}Slurm, containers and Kubernetes print the torchrun command that they run. `muster init --check` with the same arguments shows what differs from the
files of an installed version of Muster.
"""
AFTER = (
    "`muster report --watch --once {run}`, its page `{run}/report.html`, `muster evaluate {run}`, `muster export {run}`, and\n"
    '`muster.load("{run}")` in a notebook. `muster --help` lists all keys: metrics and losses of your own, sweeps'
)
AFTER_A_JOB = '`muster report --watch --once {run}`, its page `{run}/report.html`, and `muster.load("{run}", into=model)` in a notebook'
AFTER_A_SCRIPT = (
    "what the script itself has written; with a `muster.Job` in it, `muster report --watch --once RUN` and the page `RUN/report.html`.\n"
    "Alone on this machine, `NPROC=2 muster launch node {words}` does what a cluster's nodes do"
)
EXAMPLE_RUN = "runs/my-loop"
"""In examples/my_loop.py; replaced in a project's copy."""
BEGINS_ANEW = "run one\nagain to resume: a script that saves nothing begins anew"
IMAGES = """\
Images: the first is the kit's, built once from the wheel of Muster that you have installed, or in a clone of Muster by
`docker build -f docker/Dockerfile --target cpu -t {kit} .`. The second is this project's{by_itself}.{push}
```
cp PATH/TO/torch_muster-*.whl docker/ && docker build -f docker/wheel.Dockerfile -t {kit} docker
docker build -f docker/Dockerfile -t {image} .
```
Data: an image has none, as `.dockerignore` leaves `data/` out, and a container writes to `runs/` and `/tmp` alone. Mount a data set:
{mounts}.

"""
PUSH = """ Push it to
where the nodes of Kubernetes pull from, with its full name as `image:` in `k8s/`, and give each build a tag of its own: a node keeps an
image that it has."""
MOUNTS = {
    "docker": 'in `docker/compose.yaml` add `"../data:/job/data:ro"` to the volumes of `x-sandbox`',
    "k8s": "in `k8s/` a volume of your own at `/job/data`",
}
OPERATOR = """\
`k8s/` itself needs Kubeflow's Training Operator; `k8s/indexed-job/` needs none, and `k8s/trainjob/` Kubeflow Trainer (both: apply
`k8s/volume.yaml` and `k8s/network-policy.yaml` first). `k8s/volume.yaml` needs a storage class with ReadWriteMany.

"""
ROWS = {
    "slurm": "| Slurm | `sbatch slurm/ddp.sbatch` |\n| Slurm, through submitit | `python slurm/submit.py cluster.nodes=2` |\n",
    "docker": "| containers | `docker compose -f docker/compose.yaml up --build` |\n",
    "k8s": "| Kubernetes | `kubectl apply -f k8s/` |\n",
}
EXAMPLES = {
    False: (["data._target_=mine.Points", "model._target_=mine.Net"], "mine.py"),
    True: ([MARK, "my_loop.py"], "my_loop.py"),
}


OWN_WORDS = """\
# This project's job, before the arguments of sbatch, unless these name another script after --.
named=false
for word in "$@"; do [ "$word" != -- ] || named=true; done
$named || set -- {words} "$@"
"""

CPUS_OF_GPU = 4
NOT_TEXT = ("y", "yes", "n", "no", "on", "off", "true", "false", "null")
"""YAML reads these as something else than text."""


@dataclass(frozen=True)
class Project:
    """A user's project. Raises ConfigError: `name` or `gpus` is not valid.

    name: of the job and its objects in Kubernetes: lower-case letters, digits and hyphens.
    words: what follows `muster launch node`: overrides without the run's name, or `--` and a script.
    example: path of the example's file; empty for a script that is there already.
    gpus: of each node. has_packages: there is a requirements.txt.
    """

    name: str
    image: str
    words: Sequence[str]
    example: str
    gpus: int = 0
    has_packages: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name) or self.name in NOT_TEXT:
            raise ConfigError(
                f"name={self.name!r} cannot name a job in Kubernetes: give --name with lower-case letters, digits and hyphens, such as --name=my-job"
            )
        if self.gpus < 0:
            raise ConfigError(f"--gpus={self.gpus} is out of range: give the number of GPUs of a node, or 0")

    @property
    def named(self) -> list[str]:
        return [*self.words] if self.words[0] == "--" else [f"name={self.name}", *self.words]


def project(
    folder: Path, *, name: str | None, image: str | None, loop: bool, script: str = "", gpus: int = 0
) -> Project:
    """`name`: by default the folder's. `script`: the job; empty for an example. Raises ConfigError."""
    name = name or re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    words, example = own(script) if script else EXAMPLES[loop]
    return Project(name, image or f"{name}:1", words, example, gpus, (folder / "requirements.txt").is_file())


def own(script: str) -> tuple[list[str], str]:
    """Return a user's script as words and no example. Raises ConfigError."""
    try:
        words = [MARK, *shlex.split(script)]
    except ValueError as error:
        raise ConfigError(f"--script={script} cannot be split into words: {error}; close every quote") from None
    if found := script_of(words):
        found.check()
    return words, ""


def templates() -> Path:
    """Return the package's folder of templates, or the clone that the package is in."""
    inside = PACKAGE / "templates"
    return inside if inside.is_dir() else PACKAGE.parent


def files(given: Project, substrates: Sequence[str]) -> dict[str, str]:
    """Return path -> text of each file. Raises ConfigError."""
    if unknown := [each for each in substrates if each not in SUBSTRATES]:
        raise ConfigError(f"muster init {unknown[0]}: no such substrate; {nearest(unknown[0], SUBSTRATES)}")
    found = {".gitignore": IGNORES[".gitignore"]}
    if given.example:
        text = (PACKAGE / "init/examples" / given.example).read_text(encoding="utf-8")
        found[given.example] = text.replace(EXAMPLE_RUN, f"runs/{given.name}")
    for substrate in substrates:
        for name in SUBSTRATES[substrate]:
            found[f"{substrate}/{name}"] = filled(given, (templates() / substrate / name).read_text(encoding="utf-8"))
    if "slurm" in substrates:
        found["slurm/logs/.gitignore"] = "*\n!.gitignore\n"  # Slurm does not create the folder of a job's output
    if has_image(substrates):
        packages = (
            ".\n" + "\n".join(PACKAGES) if given.has_packages else ":\n" + "\n".join(f"#   {line}" for line in PACKAGES)
        )
        found["docker/Dockerfile"] = DOCKERFILE.format(kit=KIT_IMAGE, packages=packages)
        found[".dockerignore"] = IGNORES[".dockerignore"]
        for name in ("wheel.Dockerfile", "constraints.txt"):
            found[f"docker/{name}"] = built_from(name).read_text(encoding="utf-8")
    return found | {"MUSTER.md": readme(given, substrates)}


def built_from(name: str) -> Path:
    """Return the path of a file that the kit's image is built from; in a clone, constraints.txt is at the root."""
    inside = templates() / "docker" / name
    return inside if inside.is_file() else templates() / name


def has_image(substrates: Sequence[str]) -> bool:
    return bool({"docker", "k8s"} & {*substrates})


def filled(given: Project, template: str) -> str:
    """Put the project's name, image, volume and job in place of the kit's example."""
    indent = next(iter(re.findall(r"^( *)- name=muster$", template, flags=re.MULTILINE)), "")
    args = "\n".join(f"{indent}- {quoted(word)}" for word in given.named)
    changes = (
        (rf"image: {KIT_IMAGE}", f"image: {given.image}"),
        (r"(?<=://)muster:gpu$", given.image),  # of container.sbatch
        *(on_gpus(given.gpus) if given.gpus else ()),
        *(of_script() if script_of(given.words) else ()),
        (r"(?<=name: )muster$", given.name),
        (r"(?<=instance: )muster\b", given.name),
        (r"(?<=subdomain: )muster$", given.name),
        (r"muster-runs", f"{given.name}-runs"),
        (r"muster-0\.muster", f"{given.name}-0.{given.name}"),
        (r" *- name=muster\n *- model=convnet\n *- epochs=20", args),
        (r", target: cpu, args: \{.*?\}\}", "}"),
        (r', "\$\{CODE:-\.\}:/job/src:ro"', ""),  # the image has the project, of which it would hide this folder
        (r'^#   ARGS="-- src/my\.py .*\n', ""),
        (r"\$\{COMPOSE_PROJECT_NAME:-muster\}", f"${{COMPOSE_PROJECT_NAME:-{given.name}}}"),
        (r"\$\{ARGS:-\}", f"${{ARGS:-{in_compose(shlex.join(given.words))}}}"),
        (r"(?<=job-name=)muster$", given.name),
        (r'name="muster", words=\[\]', f'name="{given.name}", words={[*given.named]!r}'),  # of submit.py
        (r"^source slurm/job\.sh$", f"{OWN_WORDS.format(words=shlex.join(given.named))}source slurm/job.sh"),
        (r"RUN=compose  ", f"RUN={given.name}  "),
        (r"\$\{RUN:-compose\}", f"${{RUN:-{given.name}}}"),
        (r"muster-node-1", f"{given.name}-node-1"),
    )
    for old, new in changes:
        template = re.sub(old, lambda _, new=new: new, template, flags=re.MULTILINE)  # type: ignore[misc]
    return template


def of_script() -> list[tuple[str, str]]:
    """Return the changes of comments for a script, which knows no Hydra."""
    return [
        (r"\[Hydra overrides\]", "[more arguments of the script]"),
        (r" model=resnet50 data=imagefolder$", ""),
        (
            r'Hydra overrides, such as ARGS="model=resnet18 max_steps=50", quoted',
            "the script with its arguments, after --, quoted",
        ),
        (r"^ *# ---- Your Hydra overrides, or a script of your own in the image: .*\n", ""),
    ]


def on_gpus(count: int) -> list[tuple[str, str]]:
    """Return the changes for nodes with `count` GPUs each, and a process for each GPU."""
    cpus = CPUS_OF_GPU * count
    own = f'requests: {{cpu: "{cpus}", memory: {16 * count}Gi, nvidia.com/gpu: "{count}"}}'
    slurm = f"#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node={count}\n# At most the CPUs of a node:\n#SBATCH --cpus-per-task={cpus}"
    return [
        (r"^#SBATCH --ntasks-per-node=1$", slurm),
        (r"cluster=\[\]", f'cluster=["cluster.gpus_per_node={count}", "cluster.cpus_per_task={cpus}"]'),
        (r'(?<=nprocPerNode: )"1"', f'"{count}"'),
        (r"(?<=numProcPerNode: )1", str(count)),
        (r'(?<=name: NPROC, value: )"1"', f'"{count}"'),
        (r'requests: \{cpu: "1", memory: 2Gi\}', own),
        (r'limits: \{cpu: "2", memory: 4Gi\}', own.replace("requests", "limits")),
        (r"(?<=medium: Memory, sizeLimit: )1Gi", f"{2 * count}Gi"),
    ]


def in_compose(words: str) -> str:
    """Return `words` as a variable's default in a quoted string of compose.yaml, where $$ is a dollar.

    Raises ConfigError: a brace, at which compose ends a default.
    """
    if "}" in words:
        raise ConfigError(
            f"--script={words} has a }}, at which compose.yaml would cut it off: put these words into a script"
        )
    return json.dumps(words)[1:-1].replace("$", "$$")


def quoted(word: str) -> str:
    """Quote `word` for YAML: `1e-3` and `-m` would be no strings."""
    return word if re.fullmatch(r"[\w.]+=[\w./-]+", word) else json.dumps(word)


def images_of(given: Project, substrates: Sequence[str]) -> str:
    by_itself = "; compose builds it by itself" if "docker" in substrates else ""
    mounts = ", ".join(said for name, said in MOUNTS.items() if name in substrates)
    push = PUSH if "k8s" in substrates else ""
    return IMAGES.format(kit=KIT_IMAGE, image=given.image, by_itself=by_itself, push=push, mounts=mounts)


def readme(given: Project, substrates: Sequence[str]) -> str:
    words = shlex.join(given.named)
    script = script_of(given.words)
    rows = "".join(ROWS[each] for each in SUBSTRATES if each in substrates)
    after = AFTER_A_SCRIPT.format(words=words)
    if given.example:
        after = (AFTER_A_JOB if script else AFTER).format(run=f"runs/{given.name}")
    return README.format(
        name=given.name,
        after=after,
        job=script.name if script else given.example,
        local=shlex.join(script.for_torchrun) if script else f"-m muster {words}",
        again="run one again to resume" if given.example or not script else BEGINS_ANEW,
        rows=rows,
        images=images_of(given, substrates) if has_image(substrates) else "",
        operator=OPERATOR if "k8s" in substrates else "",
    )
