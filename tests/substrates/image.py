"""`python3 image.py NAME BINARY PATH >image.tar`: pack a static binary as an image for `ctr images import`.

Source: https://github.com/moby/docker-image-spec, the archive of `docker save`.
"""

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path


def packed(files: dict[str, tuple[bytes, int]]) -> bytes:
    """Return a tar of `files`: name -> (content, mode)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (content, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def main() -> None:
    name, binary, path = sys.argv[1:]
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    files = {path.lstrip("/"): (Path(binary).read_bytes(), 0o755)}
    if certificates.exists():
        files["etc/ssl/certs/ca-certificates.crt"] = (certificates.read_bytes(), 0o644)
    layer = packed(files)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [path], "User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{}],
    }
    text = json.dumps(config).encode()
    own = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": own, "RepoTags": [name], "Layers": ["layer.tar"]}]
    all_ = {own: text, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    sys.stdout.buffer.write(packed({file: (content, 0o644) for file, content in all_.items()}))


if __name__ == "__main__":
    main()
