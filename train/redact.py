"""Secrets in URLs: what is written or said names the place and holds neither user info nor a signature."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
URL = re.compile(rf"""{SCHEME.pattern}(?:(?!,{SCHEME.pattern})[^\s'"<>`])*""")
USER = re.compile(r"(?<=://)(?:[^/?#]*@|[^/?#@:\[]*:(?!\d*(?:[/?#]|$)).*@)")
"""Up to the last @ before the path; the second way is a password with a slash in it."""
BY_CONTAINER = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes that write a part of the place before the @: container@account."""
PARAMETER = re.compile(r"([?&#;])([^=&#;?]+)=([^&#;]*)")
SECRET = re.compile(
    r"token|secret|passw|pwd|signature|credential|auth|api[-_]?key|access[-_]?key|access[-_]?id|jwt|bearer|session"
    r"|^(key|sig|sign|code|policy|expires|key-pair-id)$|^(q|x-(amz|goog|oss|cos|obs|tos|ms))-",
    re.IGNORECASE,
)
BESIDE_SIG = re.compile(r"s[a-z]{1,2}|sip|sktid|skoid|sdd|ses|srt|spr")
"""Azure's, which come with a `sig`."""


def redacted(text: str) -> str:
    """`text` with every URL in it stripped of user info and signatures; any other text as it is."""
    return URL.sub(lambda found: _stripped(found[0]), text) if "://" in text else text


def redacted_all(value: Any) -> Any:
    """The same for all text in nested dicts and lists; a text that begins as a URL is one to its end."""
    if isinstance(value, str):
        return redacted(_stripped(value) if SCHEME.match(value) else value)
    if isinstance(value, dict):
        return {key: redacted_all(item) for key, item in value.items()}
    return [redacted_all(item) for item in value] if isinstance(value, (list, tuple)) else value


def without(text: str, url: str | None) -> str:
    """A library's `text` about `url`, of which it may quote any part, without the secrets."""
    for secret in sorted(_secrets(url or ""), key=len, reverse=True):
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
