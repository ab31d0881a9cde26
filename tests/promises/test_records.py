"""Record files that a disk or a hand has changed: the run goes on as undisturbed, or ends in one line."""

import hashlib
import itertools
import json
import math
import shutil

import pytest
from kit import warm
from kit.faults import fail_at
from kit.job import QUIET, environment, run

from muster.loggers.jsonl import Jsonl, tail
from muster.loggers.metrics import Metrics

SMALL = ("model.hidden=[4]", "max_steps=12", "checkpoint.every_steps=4", "batch_size=8", "eval.every_steps=12")
TYPES = (None, True, 3, -7, 1.5, "x", "../x", [], [1], {}, {"x": 1})


def digest(folder):
    return hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run killed right after the commit of step 8 by a process that is gone, and how it ends when it is resumed."""
    folder = tmp_path_factory.mktemp("killed")
    killed = run(folder / "run", *SMALL, ok=False, env={"FAULTS": fail_at(0, 8, "committed")}, module="kit.killer")
    assert killed.code < 0 and {".claim-1", "outcome.json"} <= {path.name for path in killed.folder.iterdir()}
    whole = shutil.copytree(folder / "run", folder / "whole")
    assert run(whole, *SMALL).events("resume")[-1]["step"] == 8
    return folder / "run", digest(whole)


def resumed(tmp_path, killed, spoils, *overrides):
    """What becomes of the run for each of `spoils`, which change a copy of its folder: {name: (exit code, output, folder)}."""
    tmp_path.mkdir(exist_ok=True)
    folders = []
    spoils = [*spoils]
    for number, (_, spoil) in enumerate(spoils):
        folders.append(shutil.copytree(killed, tmp_path / f"{number:04d}"))
        spoil(folders[-1])
    asked = tmp_path / "folders.json"
    asked.write_text(json.dumps([str(folder) for folder in folders]))
    code, said = warm.run(
        [str(asked), *QUIET, *SMALL, *overrides], [environment()], cwd=tmp_path, timeout_s=300, module="kit.resumes"
    )
    assert code == 0, said
    ended = json.loads(asked.read_text())
    return {name: (*end, folder) for (name, _), end, folder in zip(spoils, ended, folders, strict=True)}


def wrong_types(name, some=8):
    """Changes of the record file `name`: each of its entries, and the whole of it, gets values of other types.

    By turns, every one of `some`: with 1, each entry gets all.
    """

    def put(keys, value, folder):
        path = folder / name
        record = json.loads(path.read_text())
        inner = record
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        path.write_text(json.dumps(record))

    def spoils(record, keys=()):
        for key in record if isinstance(record, dict) else range(len(record[:1])):
            then = record[key]
            for value in TYPES:
                if type(value) is not type(then):
                    yield (*keys, key), value
            if isinstance(then, (dict, list)) and then and key != "config":
                yield from spoils(then, (*keys, key))

    def all_of(folder):
        record = json.loads((folder / name).read_text())
        for keys, value in itertools.islice(spoils(record), None, None, some):
            yield f"{keys} = {value!r}", lambda at, keys=keys, value=value: put(keys, value, at)
        for text in ("", "null", "[1]", "{}", "[" * 100_000, '{"a"', "\udcff"):
            yield (
                f"all = {text[:5]!r}",
                lambda at, text=text: (at / name).write_text(text, errors="surrogateescape"),
            )

    return all_of


def flips(name, places):
    """One bit of the file `name` is another, in each of `places`."""

    def flip(folder, at):
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1 << at % 8
        (folder / name).write_bytes(data)

    return [(f"bit of byte {at}", lambda where, at=at: flip(where, at)) for at in places]


@pytest.mark.nightly(but=["outcome.json"])
@pytest.mark.parametrize("name", ["outcome.json", ".claim-1"])
def test_a_changed_record_of_the_attempt_before_changes_nothing(tmp_path, undisturbed, name):
    killed, whole = undisturbed
    spoils = [*wrong_types(name)(killed), *flips(name, range(5, (killed / name).stat().st_size, 150))]
    for what, (code, said, folder) in resumed(tmp_path, killed, spoils).items():
        assert code == 0 and digest(folder) == whole, f"{what}: {said}"


def unsealed(folder, step=8):
    """A manifest as it was written before it had a digest."""
    path = folder / f"checkpoints/step-{step:08d}/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    path.write_text(json.dumps(manifest))


def test_a_checkpoint_of_before_manifests_had_a_digest_is_read(tmp_path, undisturbed):
    killed, whole = undisturbed
    ((code, said, folder),) = resumed(tmp_path, killed, [("unsealed", unsealed)]).values()
    assert code == 0 and digest(folder) == whole and "quarantined" not in said, said


@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_a_bit_that_flipped_in_a_checkpoints_records_is_noticed(tmp_path, undisturbed, name):
    killed, whole = undisturbed
    path = f"checkpoints/step-00000008/{name}"
    places = sorted({*range(0, (killed / path).stat().st_size, 900), *numbers(killed / path)})
    for what, (code, said, folder) in resumed(tmp_path, killed, flips(path, places)).items():
        assert code == 0 and digest(folder) == whole, f"{what}: {said}"
        assert "quarantined a bad checkpoint" in said, f"{what} was not noticed"


def numbers(path):
    """Where the values lie that decide how a run goes on."""
    text = path.read_bytes()
    keys = (b'"world_size": ', b'"evaluated": ', b'"step": ', b'"format": ', b'"samples": ')
    return [text.index(key) + len(key) for key in keys if key in text]


def test_a_record_of_a_checkpoint_with_other_types_is_noticed_or_refused_in_one_line(tmp_path, undisturbed):
    """Of a manifest without a digest, as checkpoints of before have it: the types of its entries tell."""
    killed, whole = undisturbed
    old = shutil.copytree(killed, tmp_path / "old")
    unsealed(old)
    for what, (code, said, folder) in resumed(
        tmp_path, old, wrong_types("checkpoints/step-00000008/manifest.json")(old)
    ).items():
        assert "Traceback" not in said, f"{what}: {said}"
        if code:
            assert code in (2, 3) and len([line for line in said.splitlines() if line.startswith("muster: ")]) == 1, (
                said
            )
        else:
            assert digest(folder) == whole, f"{what}: {said}"


def resealed(change):
    """A change of a manifest that its digest knows of."""
    from muster.checkpoint.schemas import sealed

    def spoil(folder):
        (path,) = folder.glob("**/step-00000008/manifest.json")
        manifest = json.loads(path.read_text())
        del manifest["digest"]
        change(manifest, path.parent)
        path.write_bytes(sealed(manifest))

    return spoil


def indexed(change):
    """A change of an index that the manifest knows of."""

    def spoil(manifest, folder):
        (path,) = folder.glob("**/index.json")
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))
        facts = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        manifest["files"].update({name: facts for name in manifest["files"] if name.endswith("index.json")})

    return resealed(spoil)


def elsewhere(file):
    def change(index):
        for entry in index["tensors"].values():
            entry["pieces"][0]["file"] = file

    return change


OUTSIDE = {
    "attempt": resealed(lambda manifest, _: manifest.update(attempt="../../victim")),
    "pattern": resealed(lambda manifest, _: manifest.update(attempt="*")),
    "file": resealed(lambda manifest, _: manifest["files"].update({"../../victim/x": {"size": 1, "sha256": ""}})),
    "absolute": resealed(lambda manifest, _: manifest["files"].update({"/etc/passwd": {"size": 1, "sha256": ""}})),
    "index": indexed(elsewhere("../../../victim/x")),
    "index, inside": indexed(elsewhere("manifest.json")),
    "index, a value": indexed(lambda index: next(iter(index["values"].values())).update(file="..")),
    "index, a piece is missing": indexed(lambda index: next(iter(index["tensors"].values()))["pieces"].clear()),
}


@pytest.mark.nightly(but=["folder"])
@pytest.mark.parametrize("place", ["folder", "object store"])
def test_nothing_outside_that_a_record_names_is_read_or_deleted(tmp_path, undisturbed, place):
    """`../../victim` as an attempt was deleted with it, `../../x` as a file was read into the weights."""
    killed, whole = undisturbed
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/x").write_bytes(bytes(100_000))
    storage = []
    if place == "object store":
        killed = tmp_path / "own"
        storage = [f"checkpoint.storage=file://{tmp_path}/store"]
        (tmp_path / "store").mkdir()
        made = run(killed, *SMALL, *storage, "max_steps=8")
        assert made.events("done")
        whole = None
    for number, (what, spoil) in enumerate(OUTSIDE.items()):
        at = tmp_path / f"{number}"
        if storage:
            shutil.copytree(tmp_path / "store", at / "store")
            storage = [f"checkpoint.storage=file://{at}/store"]
        ((code, said, folder),) = resumed(
            at, killed, [(what, lambda folder, at=at, spoil=spoil: spoil(at if place == "object store" else folder))], *storage,
            "checkpoint.keep=1",
        ).values()  # fmt: skip
        assert code == 0 and "quarantined a bad checkpoint" in said, f"{what}: {said}"
        whole = whole or digest(folder)
        assert digest(folder) == whole, what
        assert (tmp_path / "victim/x").read_bytes() == bytes(100_000), what


def test_what_a_link_leads_to_is_not_deleted(tmp_path, undisturbed):
    killed, whole = undisturbed
    outside = shutil.copytree(killed / "checkpoints/step-00000004", tmp_path / "outside")

    def link(folder):
        shutil.rmtree(folder / "checkpoints/step-00000004")
        for name in ("step-00000004", "step-00000002", ".step-00000009.x", ".old-step-00000001.1"):
            (folder / "checkpoints" / name).symlink_to(outside)

    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    ((code, said, folder),) = resumed(tmp_path, killed, [("links", link)], "checkpoint.keep=1").values()
    assert code == 0 and digest(folder) == whole, said
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000012"]


@pytest.mark.unit
def test_an_evaluation_of_a_body_that_is_repeated_stands_there_once_and_one_that_is_not_a_number_too(tmp_path):
    of_step_8 = [{"step": 8, "epoch": 0, "seconds": 0.1, "values": {"loss": loss}} for loss in (1.5, math.nan)]

    def opened():
        return Metrics([Jsonl(tmp_path, step=8)], samples=0)

    first = opened()
    first.eval(**of_step_8[0])
    first.eval(**of_step_8[1])
    first.close()
    _, known = tail(tmp_path / "metrics.jsonl", until=bool)
    assert len(known) == 2
    second = opened()
    second.make_up([*first.recent], known=known)
    second.told = [*first.of_body]
    second.eval(**of_step_8[0])  # then a rank dies again, before the other
    second.close()
    third = opened()
    third.told = [*second.of_body, *second.told]
    for each in of_step_8:
        third.eval(**each)
    third.end_body()
    third.eval(**of_step_8[0])
    third.close()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses == [1.5, None, 1.5]
