"""Files that are created or replaced: whole or not there, and still there after a power failure."""

import errno
import os
import stat

import pytest

from muster.errors import StorageError
from muster.files import create_file, replace_file

pytestmark = pytest.mark.unit


@pytest.fixture
def calls(monkeypatch):
    """The names of the calls that matter to durability, in order; fsync with what is synced, and its size."""
    found, fsync = [], os.fsync

    def record(handle):
        status = os.fstat(handle)
        found.append("fsync folder" if stat.S_ISDIR(status.st_mode) else f"fsync file of {status.st_size} bytes")
        fsync(handle)

    def named(name, call):
        def recorded(*args):
            found.append(name)
            return call(*args)

        return recorded

    monkeypatch.setattr(os, "fsync", record)
    for name in ("replace", "link"):
        monkeypatch.setattr(os, name, named(name, getattr(os, name)))
    return found


def test_a_replacement_is_synced_before_its_rename_and_its_folder_after(tmp_path, calls):
    (tmp_path / "file").write_text("old")
    replace_file(tmp_path / "file", lambda draft: draft.write_text("newer"))
    assert calls == ["fsync file of 5 bytes", "replace", "fsync folder"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "newer")]


def test_a_new_file_is_synced_before_it_has_its_name_and_its_folder_after(tmp_path, calls):
    create_file(tmp_path / "file", b"abc")
    assert calls == ["fsync file of 3 bytes", "link", "fsync folder"]
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "file", b"other")
    assert calls[3:] == ["fsync file of 5 bytes", "link"]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"abc")]


def test_without_hard_links_a_new_file_is_synced_under_its_own_name(tmp_path, calls, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    create_file(tmp_path / "file", b"abc")
    assert calls == ["fsync file of 3 bytes", "fsync file of 3 bytes", "fsync folder"]
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "file", b"other")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"abc")]


@pytest.mark.parametrize(("number", "is_fatal"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced_is_an_error_only_where_it_could_be(tmp_path, monkeypatch, number, is_fatal):
    fsync = os.fsync

    def refuse_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    if is_fatal:
        with pytest.raises(StorageError, match="Input/output error"):
            replace_file(tmp_path / "file", lambda draft: draft.write_text("new"))
        with pytest.raises(OSError, match="Input/output error"):
            create_file(tmp_path / "other", b"new")
    else:
        replace_file(tmp_path / "file", lambda draft: draft.write_text("new"))
        create_file(tmp_path / "other", b"new")
    assert (tmp_path / "file").read_text() == (tmp_path / "other").read_text() == "new"
