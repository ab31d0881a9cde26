"""Checkpoints in an object store, through torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from train.checkpoint.backends.base import MANIFEST, STEP, Files, Hashing, Storage, name
from train.errors import ConfigError, MusterError, StorageError


class Bucket(Storage):
    """An object store, through torch.distributed.checkpoint's own fsspec writer and reader.

    `step-NNNNNNNN/ATTEMPT/PART/` holds what DCP writes, `step-NNNNNNNN/manifest.json` names the files. An attempt that
    was cut off writes below its own name and cannot spoil another's files; the manifest is created, never overwritten.

    Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """

    def __init__(self, url: str):
        self.root = url.rstrip("/")
        if found := re.search(r"[*?\[\]]", url):
            raise ConfigError(f"checkpoint.storage={url}: {found[0]} is a pattern to fsspec: use another name")
        try:
            from fsspec.core import url_to_fs

            self.fs, self.base = url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            scheme = url.split("://")[0]
            package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}.get(scheme, "")
            hint = f"pip install {package}" if package else "see fsspec.available_protocols() for the schemes"
            raise ConfigError(f"checkpoint.storage={url}: {error}; {hint}") from error

    def prepare(self) -> None:
        with self._doing("use"):
            for step in self._folders():
                if not any(file.endswith(MANIFEST) for file in self._names(name(step))):
                    self.fs.rm(f"{self.base}/{name(step)}", recursive=True)

    def write(self, step: int, attempt: str, part: str, value: Any) -> Files:
        from torch.distributed import checkpoint as dcp

        tensors: dict[str, torch.Tensor] = {}
        structure = io.BytesIO()
        torch.save(_extract(value, tensors, part), structure)
        tensors["structure"] = torch.frombuffer(bytearray(structure.getvalue()), dtype=torch.uint8)
        files: Files = {}
        with self._doing(f"write {self.path(step)}"):
            url = f"{self.root}/{name(step)}/{attempt}/{part}"
            dcp.save(tensors, storage_writer=_writer(url, f"{attempt}/{part}", files), no_dist=True)
        return files

    def commit(self, step: int, attempt: str, manifest: dict[str, Any]) -> bool:
        with self._doing(f"write {self.path(step)}"):
            self.fs.invalidate_cache()
            if self.fs.exists(self._key(step, MANIFEST)):
                self.verify(step)
                return False
            self.fs.pipe_file(self._key(step, MANIFEST), json.dumps(manifest, indent=1).encode(), mode="create")
        return True

    def abandon(self, step: int, attempt: str) -> None:
        with contextlib.suppress(Exception):
            self.fs.rm(self._key(step, attempt), recursive=True)

    def steps(self) -> list[int]:
        with self._doing("list"):
            return [step for step in self._folders() if MANIFEST in self._names(name(step))]

    def bad(self) -> list[str]:
        with self._doing("list"):
            return [
                f"{name(step)}/{file}"
                for step in reversed(self._folders())
                for file in self._names(name(step))
                if file.startswith("bad-")
            ]

    def open(self, step: int, file: str) -> contextlib.AbstractContextManager[Any]:
        stream: contextlib.AbstractContextManager[Any] = self.fs.open(self._key(step, file), "rb")
        return stream

    def size(self, step: int, file: str) -> int:
        return int(self.fs.size(self._key(step, file)))

    def read(self, step: int, part: str, manifest: dict[str, Any]) -> Any:
        from torch.distributed import checkpoint as dcp

        with self._doing(f"read {self.path(step)}"):
            reader = _reader(f"{self.root}/{name(step)}/{manifest['attempt']}/{part}")
            described = reader.read_metadata().state_dict_metadata
            tensors = {key: torch.empty(of.size, dtype=of.properties.dtype) for key, of in described.items()}
            dcp.load(tensors, storage_reader=reader, no_dist=True)
            structure = io.BytesIO(tensors["structure"].numpy().tobytes())
            return _restore(torch.load(structure, weights_only=True), tensors)

    def put_aside(self, step: int, word: str = "bad") -> str:
        aside = f"{word}-{time.time_ns()}-{MANIFEST}"
        with self._doing(f"put {self.path(step)} aside"):
            self._move(self._key(step, MANIFEST), self._key(step, aside))
        return f"{name(step)}/{aside}"

    def remove(self, step: int) -> None:
        with contextlib.suppress(Exception):
            attempt = self.manifest(step)["attempt"]
            self.fs.rm(self._key(step, MANIFEST))
            self.fs.rm(self._key(step, attempt), recursive=True)  # others may have been put aside there

    def start_over(self) -> None:
        for step in self.steps():
            self.put_aside(step, "previous")
        with self._doing("set the earlier run aside"):
            for key in self.bad():
                folder, _, file = key.partition("/")
                self._move(f"{self.base}/{key}", f"{self.base}/{folder}/previous-{file.removeprefix('bad-')}")

    def _move(self, old: str, new: str) -> None:
        """Killed in between it leaves both, which is no less than there was. (gcsfs's own `mv` not every server knows.)"""
        self.fs.copy(old, new)
        self.fs.rm(old)

    def _folders(self) -> list[int]:
        """The steps of which anything is there, newest first."""
        return sorted((int(match[1]) for each in self._names("") if (match := STEP.fullmatch(each))), reverse=True)

    def _names(self, folder: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return [
                key.rstrip("/").rsplit("/", 1)[-1]
                for key in self.fs.ls(f"{self.base}/{folder}".rstrip("/"), detail=False)
            ]
        except FileNotFoundError:
            return []

    def _key(self, step: int, file: str) -> str:
        return f"{self.base}/{name(step)}/{file}"

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Whatever a file system's client raises becomes one line."""
        try:
            yield
        except MusterError:
            raise
        except (Exception, _failure()) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise StorageError(
                f"cannot {what} in {self.root}: {reason}; check address, credentials and space, then run again"
            ) from error


def _writer(url: str, prefix: str, files: Files) -> Any:
    """DCP's fsspec writer, which notes size and digest of every file below `prefix` in `files`."""
    writer = _dcp().FsspecWriter(url, sync_files=False)
    create_stream: Callable[..., Any] = writer.fs.create_stream

    @contextlib.contextmanager
    def hashed(path: Any, mode: str) -> Iterator[Any]:
        with create_stream(path, mode) as stream:
            hashing = Hashing(stream)
            yield hashing
        files[f"{prefix}/{os.path.basename(path).removesuffix('.tmp')}"] = hashing.facts

    writer.fs.create_stream = hashed
    return writer


def _reader(url: str) -> Any:
    """DCP's fsspec reader, whose index is unpickled from DCP's own classes alone."""
    dcp = _dcp()

    class Reader(dcp.FsspecReader):  # type: ignore[misc, name-defined]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
                return _Unpickler(file).load()

    return Reader(url)


class _Unpickler(pickle.Unpickler):
    """Plain pickle runs any code that a file names; this one knows nothing but what a DCP index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch._utils", "_get_layout"),
        ):
            return super().find_class(module, name)
        if module.startswith("torch.distributed.checkpoint.") and "." not in name:  # a dotted name leads anywhere
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.memory_format):
            return found
        raise pickle.UnpicklingError(f"the index of a checkpoint names {module}.{name}, which is no part of one")


def _failure() -> type[BaseException]:
    """What DCP raises: no Exception, so that it would end a thread unseen."""
    return importlib.import_module("torch.distributed.checkpoint.api").CheckpointException  # type: ignore[no-any-return]


def _dcp() -> Any:
    package = "torch.distributed.checkpoint"
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module=f"{package}.utils")
    try:
        return importlib.import_module(f"{package}.fsspec_filesystem")
    except ImportError:  # before torch 2.15
        return importlib.import_module(f"{package}._fsspec_filesystem")


def _extract(value: Any, tensors: dict[str, torch.Tensor], key: str) -> Any:
    """`value` with each tensor taken out into `tensors` and its key left in its place."""
    if isinstance(value, torch.Tensor):
        tensors[key] = value.contiguous()
        return {"__tensor__": key}
    if isinstance(value, dict):
        return {k: _extract(item, tensors, f"{key}/{k}") for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_extract(item, tensors, f"{key}/{n}") for n, item in enumerate(value))
    return value


def _restore(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if list(value) == ["__tensor__"]:
            return tensors[value["__tensor__"]]
        return {key: _restore(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_restore(item, tensors) for item in value)
    return value
