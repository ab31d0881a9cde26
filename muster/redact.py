"""Removal of secrets from URLs: logs and files keep the location, without user info and signatures."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
URL = re.compile(rf"""{SCHEME.pattern}(?:(?!,{SCHEME.pattern})[^\s'"<>`])*""")
USER = re.compile(r"(?<=://)(?:[^/?#]*@|[^/?#@:\[]*:(?!\d*(?:[/?#]|$)).*@)")
"""User info: up to the last @ before the path. The second alternative matches a password with a slash in it."""
BY_CONTAINER = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes in which the part before the @ is a location, not a user: container@account."""
PARAMETER = re.compile(r"([?&#;])([^=&#;?]+)=([^&#;]*)")
SECRET = re.compile(
    r"token|secret|passw|pwd|signature|credential|auth|api[-_]?key|access[-_]?key|access[-_]?id|jwt|bearer|session"
    r"|^(key|sig|sign|code|policy|expires|key-pair-id)$|^(q|x-(amz|goog|oss|cos|obs|tos|ms))-",
    re.IGNORECASE,
)
BESIDE_SIG = re.compile(r"s[a-z]{1,2}|sip|sktid|skoid|sdd|ses|srt|spr")
"""Azure's parameters, secret only beside a `sig`."""


SHORT = 6
"""Shorter secrets are removed only where they stand as words."""
_known: dict[str, re.Pattern[str]] = {}


def redacted(text: str) -> str:
    """Remove user info and signatures from URLs in `text`, and the secrets of `know` anywhere in it."""
    text = URL.sub(lambda found: _stripped(found[0]), text) if "://" in text else text
    for each in _known.values():
        text = each.sub("***", text)
    return text


def know(url: str) -> None:
    """Have `redacted` remove the secrets of `url` from now on: a library may quote any part of it, in a traceback, too."""
    for secret in sorted(_secrets(url) - _known.keys(), key=len, reverse=True):
        word = re.escape(secret)
        _known[secret] = re.compile(word if len(secret) >= SHORT else rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])")


def redacted_all(value: Any) -> Any:
    """Apply `redacted` to all strings in nested dicts and lists. A string that begins as a URL is one to its end, spaces included."""
    if isinstance(value, str):
        return redacted(_stripped(value) if SCHEME.match(value) else value)
    if isinstance(value, dict):
        return {key: redacted_all(item) for key, item in value.items()}
    return [redacted_all(item) for item in value] if isinstance(value, (list, tuple)) else value


def without(text: str, url: str | None) -> str:
    """Return a library's message without the secrets of `url`."""
    if url:
        know(url)
        for secret in sorted(_secrets(url), key=len, reverse=True):
            text = text.replace(secret, "***")
    return redacted(text)


def _secrets(url: str) -> set[str]:
    user = _user(url)
    values = {each[3] for each in PARAMETER.finditer(url) if _is_secret(each[2], url)}
    found = {user, *user.partition(":")[::2], *values}
    return {secret for each in found for secret in (each, unquote(each)) if len(secret) > 2}


def _user(url: str) -> str:
    found = USER.search(url)
    user = found[0].removesuffix("@") if found else ""
    return "" if ":" not in user and url.partition("://")[0].lower() in BY_CONTAINER else user


def _stripped(url: str) -> str:
    if user := _user(url):
        url = url.replace(f"://{user}@", "://", 1)
    found = [*PARAMETER.finditer(url)]
    if not any(_is_secret(each[2], url) for each in found):
        return url
    kept = [each for each in found if not _is_secret(each[2], url)]
    return url[: found[0].start()] + "".join(
        f"{'&' if number else found[0][1]}{each[2]}={each[3]}" for number, each in enumerate(kept)
    )


def _is_secret(name: str, url: str) -> bool:
    return bool(SECRET.search(unquote(name)) or (BESIDE_SIG.fullmatch(name) and re.search(r"[?&;]sig=", url)))
