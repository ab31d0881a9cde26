"""Linter for costly mistakes in batch scripts and manifests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml

from muster.errors import ConfigError, one_line
from muster.launcher.spec import SHUTDOWN

Rule = Callable[[str], Iterator[tuple[int, str]]]
"""Maps the text of a file to (line number, mistake and remedy)."""


KINDS = (".sbatch", ".sh", ".yaml", ".yml")


def lint(paths: list[Path]) -> list[str]:
    """Return `file:line: mistake` for all `files_in` the paths. Raises ConfigError."""
    found, texts = [], dict[Path, str]()
    for file in files_in(paths):
        text = file.read_bytes().decode(errors="replace")  # with its line ends as they are
        rules = MANIFEST if file.suffix in (".yaml", ".yml") else BATCH
        found += [f"{file}:{line}: {said}" for rule in rules for line, said in rule(text)]
        texts[file] = text
    return found + [f"{file}:{line}: {said}" for file, line, said in claims(texts)]


def files_in(paths: list[Path]) -> list[Path]:
    """Return the batch scripts and manifests among files, and in folders.

    Raises ConfigError: a path is missing, is no such file, or is a folder without one.
    """
    found = list[Path]()
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--lint {path}: there is no such file or folder")
        inside = (file for file in path.rglob("*") if file.suffix in KINDS and file.is_file())
        files = sorted(inside) if path.is_dir() else [path]
        if not files or (path.is_file() and path.suffix not in KINDS and path.read_bytes()[:2] != b"#!"):
            raise ConfigError(
                f"--lint {path}: no batch script and no manifest, whose names end with {', '.join(KINDS)}"
            )
        found += files
    return found


def claims(texts: Mapping[Path, str]) -> Iterator[tuple[Path, int, str]]:
    """Find pods whose claim of a volume has almost the name of one in these files, or is for one node. texts: by file."""
    documents = [
        (file, each) for file, text in texts.items() if file.suffix in (".yaml", ".yml") for each in manifests(text)
    ]
    modes = {
        name_of(each): [*map(str, mapping(each, "spec").get("accessModes") or [])]
        for _, each in documents
        if each.get("kind") == "PersistentVolumeClaim"
    }
    for file, each in documents if modes else ():
        for name in dict.fromkeys(map(str, inside(each, "claimName"))):
            line = line_of(texts[file], rf"claimName:\s*[\"']?{re.escape(name)}(?![\w.-])")
            if name not in modes:
                if meant := next((other for other in modes if is_slip(name, other)), None):  # else it is made elsewhere
                    yield file, line, f"claimName {name}: no file has that claim; do you mean {meant}?"
            elif modes[name] and {*modes[name]} <= {"ReadWriteOnce", "ReadWriteOncePod"} and pods(each, name) > 1:
                yield (
                    file,
                    line,
                    f"the claim {name} is {', '.join(modes[name])}, which pods on several nodes cannot mount: write ReadWriteMany",
                )


def is_slip(name: str, other: str) -> bool:
    """Return whether two names differ by a few letters of one of their words, and not by a number or a letter that stands alone."""
    words = [pair for pair in zip(name.split("-"), other.split("-"), strict=False) if pair[0] != pair[1]]
    if name.count("-") != other.count("-") or len(words) != 1:
        return False
    one, two = (re.sub(r"\d", "", word) for word in words[0])
    is_alike = sorted(one) == sorted(two) or SequenceMatcher(None, one, two).ratio() >= 0.8
    return one != two and min(len(one), len(two)) > 2 and is_alike


def pods(document: dict[str, Any], claim: str) -> int:
    """Return how many pods of a job mount `claim`; 1 if its text does not say."""
    spec = mapping(document, "spec")
    counts = {
        "PyTorchJob": [
            each.get("replicas", 1)
            for each in mapping(spec, "pytorchReplicaSpecs").values()
            if isinstance(each, dict) and claim in map(str, inside(each, "claimName"))
        ],
        "TrainJob": [mapping(spec, "trainer").get("numNodes", 1)],
        "Job": [spec.get("parallelism", 1)],
    }
    return sum(int(each) for each in counts.get(str(document.get("kind")), [1]) if str(each).isdigit())


def blank_in_directive(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"#\s+SBATCH\s+-", line):  # ##SBATCH is how a directive is switched off
            yield number, "Slurm takes this for a comment: write #SBATCH without a blank"


def directive_too_late(text: str) -> Iterator[tuple[int, str]]:
    has_begun = False
    for number, line in commands(text):
        if has_begun and line.startswith("#SBATCH"):
            yield number, "Slurm reads no directive after the first command: move it up"
        has_begun |= bool(line.strip()) and not line.lstrip().startswith("#")


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script with their numbers: continued lines as one, and none of a here-document."""
    ends, begin, joined, lines = "", 0, "", text.splitlines()
    for number, line in enumerate(lines, 1):
        if ends:
            ends = "" if line.strip() == ends else ends
            continue
        begin, joined = begin or number, joined + line
        if line.endswith("\\") and not line.startswith("#"):
            joined = joined[:-1] + " "
            continue
        here = re.search(r"<<-?\s*[\"']?([\w-]+)", joined)
        if here and here[1] in map(str.strip, lines[number:]):  # else it is a shift, a here-string or a comment
            ends = here[1]
        yield begin, joined
        begin, joined = 0, ""


def directive(text: str, name: str) -> re.Match[str] | None:
    """Return the match of a directive of sbatch, whose group 1 is its value; None if it is not given."""
    return re.search(rf"^#SBATCH(?:\s[^#\n]*)?\s--{name}[=\s]+([^\s#]+)", text, re.M)


def processors_lost(text: str) -> Iterator[tuple[int, str]]:
    is_given = re.search(r"^#SBATCH(?:\s[^#\n]*)?\s(?:--cpus-per-task\b|-c\s*\d)", text, re.M)
    if not is_given or re.search(r"^[^#\n]*SRUN_CPUS_PER_TASK", text, re.M):
        return
    for number, line in commands(text):
        begin = r"(?:^|[;&|(]|\bthen|\bdo)\s*(?:\w+=\S*\s+)*(?:(?:exec|time)\s+)?"
        is_srun = not line.lstrip().startswith("#") and re.search(
            rf"{begin}srun\b(?!\s+\$)", line
        )  # whose variable may say it
        if is_srun and not re.search(r"--cpus-per-task|\s-c[\s=]*[\"']?[\d$]", line):
            yield number, "srun does not inherit --cpus-per-task: pass it here as well, or export SRUN_CPUS_PER_TASK"


def no_warning(text: str) -> Iterator[tuple[int, str]]:
    """Find training jobs without --signal, which the time limit kills before they can save."""
    by_kit = re.search(r"^[^#\n]*(?:^|[\s;&])(?:source|\.)\s[^#;\n]*slurm/job\.sh\b", text, re.M)
    trains = by_kit or re.search(r"^[^#\n]*(?:\btorchrun\b|\blaunch node\b)", text, re.M)
    if not trains or not re.search(r"^#SBATCH", text, re.M):
        return
    if not (signal := directive(text, "signal")):
        yield 1, "no #SBATCH --signal=B:USR1@120: the time limit kills the run before it can save"
    elif by_kit and not re.match(r"[\"']?R?B:", signal[1]):
        yield (
            line_at(text, signal.start()),
            f"--signal={signal[1]} reaches the steps of srun, not this script, which passes it on: write B:USR1@120",
        )
    many = directive(text, "ntasks-per-node") if by_kit else None
    if many and many[1] != "1":
        yield (
            line_at(text, many.start()),
            f"--ntasks-per-node={many[1]} starts as many agents of torchrun on a node, each with all ranks: write 1; NPROC is the number of ranks",
        )


def line_ends_of_windows(text: str) -> Iterator[tuple[int, str]]:
    if "\r\n" in text:
        yield (
            line_at(text, text.index("\r\n")),
            "the line ends with a carriage return, as on Windows: save the file with Unix line ends (dos2unix)",
        )


def flag_over_variable(text: str) -> Iterator[tuple[int, str]]:
    """Find torchrun flags that override a PET_ variable set in the same file."""
    is_set = re.sub(r"\$[({]?PET_\w+|\bunset\s.*|#.*", "", text)
    for number, line in enumerate(text.splitlines(), 1):
        for flag, variable in (
            ("nnodes", "NNODES"),
            ("nproc-per-node", "NPROC_PER_NODE"),
            ("rdzv-endpoint", "RDZV_ENDPOINT"),
            ("node-rank", "NODE_RANK"),
        ):
            if re.search(rf"--{flag}\b".replace("-", "[-_]").replace("[-_][-_]", "--", 1), line) and re.search(
                rf"PET_{variable}\b", is_set
            ):
                yield number, f"--{flag} wins over PET_{variable}, which is set here, too: keep one of the two"


class Plain(yaml.SafeLoader):
    """Loads scalars as they are written, and merges `<<`; a tag that it does not know changes nothing."""

    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # noqa: RUF012

    def untagged(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return self.construct_sequence(node, deep=True)
        return node.value


Plain.add_constructor(None, Plain.untagged)


def manifests(text: str) -> list[Any]:
    """Return the YAML documents that are mappings, and the items of lists of them; an empty list if the text is not valid YAML."""
    try:
        found = [each for each in yaml.load_all(text, Loader=Plain) if isinstance(each, dict)]
    except (
        Exception
    ):  # what `unreadable` reports: PyYAML raises errors of its own, and others for a tag that does not fit its value
        return []
    items = (each.get("items") for each in found if each.get("kind") == "List")
    return found + [
        each for of_list in items if isinstance(of_list, list) for each in of_list if isinstance(each, dict)
    ]


def name_of(document: dict[str, Any]) -> str:
    return str(mapping(document, "metadata").get("name"))


def mapping(document: Any, key: str) -> dict[str, Any]:
    found = document.get(key) if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}


def unreadable(text: str) -> Iterator[tuple[int, str]]:
    try:
        if "{{" not in text:  # a template of Helm, for example
            for _ in yaml.load_all(text, Loader=Plain):
                pass
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        yield (mark.line + 1 if mark else 1), f"not valid YAML, so nothing else is checked: {one_line(error)}"


def inside(value: Any, key: str, within: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what stands under `key`, at any depth of a document. within: ids of what holds `value`, which may hold itself."""
    if id(value) in within:
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if name == key:
            yield each
        yield from inside(each, key, (*within, id(value)))


def variables(value: Any) -> dict[str, Any]:
    """Return the environment variables of a pod's containers: their values, or None for those that come from elsewhere."""
    names = [each for env in inside(value, "env") if isinstance(env, list) for each in env if isinstance(each, dict)]
    return {str(each.get("name")): each.get("value") for each in names}


def environment(service: dict[str, Any]) -> dict[str, Any]:
    """Return the environment variables of a service of compose, which may be a list of NAME=VALUE."""
    given = service.get("environment")
    pairs = (str(each).partition("=") for each in given) if isinstance(given, list) else ()
    return mapping(service, "environment") or {name: value for name, _, value in pairs}


def line_of(text: str, pattern: str) -> int:
    """Return the number of the first line that matches, or 1."""
    return next((number for number, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)), 1)


def line_at(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def not_by_exit_code(text: str) -> Iterator[tuple[int, str]]:
    """Find PyTorchJobs whose pods are not restarted by their exit codes."""
    for document in manifests(text):
        replicas = next(inside(document, "pytorchReplicaSpecs"), None) if document.get("kind") == "PyTorchJob" else None
        for each in replicas.values() if isinstance(replicas, dict) else ():
            policy = each.get("restartPolicy", "OnFailure") if isinstance(each, dict) else "ExitCode"
            if policy != "ExitCode":
                yield (
                    line_of(text, rf"restartPolicy:\s*[\"']?{re.escape(str(policy))}"),
                    f"restartPolicy {policy}: "
                    + (
                        "a preempted pod is not restarted"
                        if policy == "Never"
                        else "a wrong config is started again for ever"
                    )
                    + ": write ExitCode, by which 128 and above start a pod again and lower codes fail the job",
                )


def host_without_name(text: str) -> Iterator[tuple[int, str]]:
    """Find PyTorchJobs with hostNetwork whose pods do not know their own names."""
    for document in manifests(text):
        is_elastic = document.get("kind") == "PyTorchJob" and any(True for _ in inside(document, "elasticPolicy"))
        shares = is_elastic and any(
            str(each).lower() in ("true", "yes", "on") for each in inside(document, "hostNetwork")
        )
        if shares and "POD_NAME" not in variables(document):
            yield (
                line_of(text, r"hostNetwork:"),
                "with hostNetwork a pod's HOSTNAME is its node's, so no pod knows that it holds the rendezvous: "
                "add POD_NAME from fieldRef metadata.name to env",
            )


def counts_differ(text: str) -> Iterator[tuple[int, str]]:
    """Find Indexed Jobs whose variables NNODES and HEAD do not fit the Job."""
    for document in manifests(text):
        spec = mapping(document, "spec")
        if document.get("kind") != "Job" or spec.get("completionMode") != "Indexed":
            continue
        env, counts = variables(spec), {key: spec.get(key) for key in ("completions", "parallelism")}
        counts["NNODES"] = env.get("NNODES")
        if env.get("NNODES") and len({count for count in counts.values() if count is not None}) > 1:
            given = ", ".join(f"{key} {count}" for key, count in counts.items())
            yield (
                line_of(text, r"\bNNODES\b|^\s*parallelism:"),
                f"{given}: the three must be one number, that of the pods which train together",
            )
        subdomain, head = next(inside(spec, "subdomain"), ""), env.get("HEAD")
        first = f"{name_of(document)}-0.{subdomain}"
        if head and not subdomain:
            yield (
                line_of(text, r"\bHEAD\b"),
                f"HEAD={head}, and no pod has a name without subdomain: name a headless Service there",
            )
        elif head and head != first and not str(head).startswith(f"{first}."):
            yield line_of(text, r"\bHEAD\b"), f"HEAD={head} is not pod 0 of this Job: write {first}"


def grace_too_short(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"terminationGracePeriodSeconds:\s*(\d+)", text):
        timeout = re.search(rf"(?:{SHUTDOWN}|GRACE_S)\D+?value:\s*\D?(\d+)", text)
        needed = int(timeout[1]) if timeout else 30
        before = re.split(r"^---", text[: match.start()], flags=re.M)[-1]
        is_service = re.search(r"^kind:\s*(?:Deployment|StatefulSet|DaemonSet|ReplicaSet)\b", before, re.M)
        if int(match[1]) < needed and not is_service:
            yield (
                line_at(text, match.start()),
                f"the pod is killed after {match[1]} s, and its workers may take {needed} s to save: make it longer",
            )


def stopped_too_soon(text: str) -> Iterator[tuple[int, str]]:
    """Find nodes of compose that are killed before their ranks have had the time to save."""
    units = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6}
    for services in (mapping(document, "services") for document in manifests(text)):
        for node in (mapping(services, name) for name in services):
            grace, needed = str(node.get("stop_grace_period", "10s")), str(environment(node).get("GRACE_S"))
            given = sum(
                float(number) * units[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)(h|ms|us|m|s)", grace)
            )
            if "node" in (node.get("command") or ()) and needed.isdigit() and given < int(needed):
                yield (
                    line_of(text, rf"stop_grace_period:\s*[\"']?{re.escape(grace)}"),
                    f"compose kills a node {grace} after SIGTERM, and GRACE_S gives its ranks {needed} s to save: make stop_grace_period longer",
                )


def service_as_endpoint(text: str) -> Iterator[tuple[int, str]]:
    """Find rendezvous endpoints that name a load-balanced Service instead of one pod, or a pod of such a one, which has no name."""
    documents = manifests(text)
    services = {
        name_of(each)
        for each in documents
        if each.get("kind") == "Service" and mapping(each, "spec").get("clusterIP") != "None" and not of_one_pod(each)
    }
    for match in re.finditer(r"(?:--rdzv[-_]endpoint=|RDZV_ENDPOINT\D+?value:\s*)[\"']?([\w.-]+)", text):
        if match[1].split(".")[0] in services:
            yield (
                line_at(text, match.start()),
                f"{match[1]} is a Service that spreads over all pods: each would meet itself or another; use a headless one and pod 0's name",
            )

    for document in documents:
        head, subdomain = variables(document).get("HEAD"), next(inside(document, "subdomain"), "")
        if head and subdomain in services:
            yield (
                line_of(text, r"\bHEAD\b"),
                f"HEAD={head}, and pods have no names in {subdomain}, a Service that is not headless: write clusterIP: None there",
            )


def of_one_pod(service: dict[str, Any]) -> bool:
    """Return True if a label by which a Service selects pods is one pod's own, such as its name or index."""
    selected = mapping(mapping(service, "spec"), "selector")
    return any(
        re.search(r"pod-name|pod-index|completion-index|replica-index|replica-type|job-role", str(key))
        for key in selected
    )


def trainer_missing(text: str) -> Iterator[tuple[int, str]]:
    for document in manifests(text):
        if document.get("kind") == "TrainJob" and "trainer" not in mapping(document, "spec"):
            line = next((n for n, t in enumerate(text.splitlines(), 1) if t.startswith("kind: TrainJob")), 1)
            yield (
                line,
                "a TrainJob without spec.trainer gets the runtime's own command and no PET_ variables: add trainer: {}",
            )


BATCH: tuple[Rule, ...] = (
    blank_in_directive,
    directive_too_late,
    processors_lost,
    no_warning,
    flag_over_variable,
    line_ends_of_windows,
)
MANIFEST: tuple[Rule, ...] = (
    unreadable,
    grace_too_short,
    stopped_too_soon,
    service_as_endpoint,
    trainer_missing,
    flag_over_variable,
    not_by_exit_code,
    host_without_name,
    counts_differ,
)
