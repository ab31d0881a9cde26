"""Download weights by URL into torch's cache, keyed by the whole URL; a copy is reused only while it is current."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shutil
import time
import urllib.request
from email.message import Message
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit

import torch

from muster.errors import ConfigError, StorageError, one_line, say, storage_error
from muster.files import draft_of, replace_file
from muster.redact import know, redacted, without

SCHEMES = ("http", "https", "ftp")
TIMEOUT_S = 60.0
SETTLED_S = 60.0
"""Minimum age in seconds of a Last-Modified: a younger one may stand for two contents (RFC 9110, 8.8.2.2)."""


def local_copy(url: str, *, ask: bool = True) -> Path:
    """Return the file of `url`, downloaded unless the copy in torch's cache is current. Prints which one it is.

    `url`: file://, or any of SCHEMES, which may have a user and password. `ask`: False uses a copy without checking whether
    the original or the copy has changed: one rank of a host asks.

    Raises ConfigError: the scheme is not supported. Raises StorageError: it cannot be downloaded.
    """
    if urlsplit(url).scheme == "file":
        return Path(unquote(urlsplit(url).path))
    if urlsplit(url).scheme not in SCHEMES:
        raise ConfigError(
            f"init_from={url} cannot be read: give a file, a run's folder, or a URL of {', '.join(SCHEMES)}"
        )
    folder = Path(torch.hub.get_dir(), "checkpoints")
    index = folder / f"muster-{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    kept = _kept(index)
    if kept and not ask:
        return folder / str(kept["file"])
    know(url)
    place = redacted(url)
    if kept and not _is_whole(folder / kept["file"], kept):
        say(
            f"muster: init_from: the copy of {place} in {folder / kept['file']} differs in size or SHA-256 from its "
            "download: it is downloaded anew"
        )
        kept = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        answer = _ask(url, kept)
        with answer or contextlib.nullcontext():
            if answer is None or _is_same(answer.headers, kept):
                say(f"muster: init_from: {place} has not changed: {_described(kept)}, from {folder / kept['file']}")
            else:
                kept = _download(answer, folder, place)
                replace_file(
                    index,
                    lambda draft: draft.write_text(json.dumps({"url": place, **kept}, indent=1), encoding="utf-8"),
                )
                say(f"muster: init_from: {place} was downloaded: {_described(kept)}, to {folder / kept['file']}")
    except StorageError:
        raise
    except Exception as error:
        reason = without(one_line(error), url)[:200]
        is_refused = isinstance(error, HTTPError) and error.code < HTTPStatus.INTERNAL_SERVER_ERROR
        if not kept or is_refused:
            raise StorageError(
                f"cannot read weights from {place}: {reason}; give a URL that this host can reach, or a file"
            ) from error
        say(
            f"muster: init_from: {place} cannot be reached ({reason}), and may have changed: using the copy of "
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(kept['time']))}: {_described(kept)}"
        )
    return folder / str(kept["file"])


def _kept(index: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        noted = json.loads(index.read_text(encoding="utf-8"))
        if (index.parent / Path(noted["file"]).name).is_file():
            return {
                **noted,
                "file": Path(noted["file"]).name,
                "size": int(noted["size"]),
                "sha256": str(noted["sha256"]),
                "time": float(noted["time"]),
            }
    return {}


def _is_whole(path: Path, kept: dict[str, Any]) -> bool:
    """Return True if the copy has the size and SHA-256 of the download: torch reads flipped bits without an error."""
    try:
        with path.open("rb") as file:
            same_size = path.stat().st_size == int(kept["size"])
            return same_size and hashlib.file_digest(file, "sha256").hexdigest() == str(kept["sha256"])
    except OSError:
        return False


def _ask(url: str, kept: dict[str, Any]) -> Any:
    """Return the server's response, or None if the server confirms the copy."""
    request = _request(url)
    if kept.get("etag"):
        request.add_header("If-None-Match", kept["etag"])
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        if error.code == HTTPStatus.NOT_MODIFIED and kept:
            return None
        raise


def _request(url: str) -> urllib.request.Request:
    """Return a request whose user and password are in a header that redirects do not pass on."""
    parts = urlsplit(url)
    if parts.scheme == "ftp":
        return urllib.request.Request(url)
    user, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host, fragment="")))
    if user:
        word = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {word}")
    return request


def _is_same(headers: Message, kept: dict[str, Any]) -> bool:
    """Return True if the response has the copy's ETag, or without one its Last-Modified, and its length.

    If-Modified-Since is not sent: servers answer 304 also if an older file was put back.
    """
    if headers.get("Content-Length") not in (None, str(kept.get("size"))):
        return False
    if kept.get("etag"):
        return bool(headers.get("ETag") == kept["etag"])
    return bool(kept.get("modified") and headers.get("Last-Modified") == kept["modified"])


def _download(answer: Any, folder: Path, place: str) -> dict[str, Any]:
    draft = draft_of(folder / "download")
    try:
        with draft.open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
        size, expected = draft.stat().st_size, answer.headers.get("Content-Length")
        if expected is not None and int(expected) != size:
            raise StorageError(
                f"cannot read weights from {place}: the download ended after {size} of {expected} bytes; run again"
            )
        with draft.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = f"muster-{digest[:32]}{re.sub(r'[^.A-Za-z0-9]', '', Path(urlsplit(place).path).suffix)[:8]}"
        draft.replace(folder / name)
    except OSError as error:
        raise storage_error("download weights to", error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    modified = answer.headers.get("Last-Modified")
    noted = {"etag": answer.headers.get("ETag"), "modified": modified if _is_settled(answer.headers) else None}
    return {"file": name, "size": size, "sha256": digest, "time": round(time.time(), 3), **noted}


def _is_settled(headers: Message) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        modified, now = (parsedate_to_datetime(headers[name]) for name in ("Last-Modified", "Date"))
        return (now - modified).total_seconds() >= SETTLED_S
    return False


def _described(kept: dict[str, Any]) -> str:
    return f"{kept['size']} bytes, sha256 {kept['sha256'][:16]}"
