"""Images for `ctr images import`.

`python3 image.py NAME BINARY PATH >image.tar` packs a static binary.
`docker image inspect NAME | python3 image.py NAME >image.tar` packs only the last layer of an image of the Docker engine,
for a containerd that has unpacked the layers below it.

Source: https://github.com/moby/docker-image-spec, the archive of `docker save`;
https://github.com/opencontainers/image-spec/blob/main/image-layout.md
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


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def described(kind: str, content: bytes, **more: object) -> dict[str, object]:
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(content), "size": len(content), **more}


def last_layer(name: str, seen: dict) -> bytes:
    """Return the OCI layout of an image that Docker has inspected; of its layers, it has the last one only."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(seen["GraphDriver"]["Data"]["UpperDir"], arcname=".")
    layer, below = buffer.getvalue(), seen["RootFS"]["Layers"][:-1]
    rootfs = {"type": "layers", "diff_ids": [*below, digest(layer)]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": seen["Config"], "rootfs": rootfs}).encode()
    tar = "layer.v1.tar"
    layers = [{**described(tar, b""), "digest": each} for each in below] + [described(tar, layer)]
    manifest = json.dumps({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described("config.v1+json", config), "layers": layers,
    }).encode()  # fmt: skip
    full = {"annotations": {"io.containerd.image.name": f"docker.io/library/{name}"}}
    index = {"schemaVersion": 2, "manifests": [described("manifest.v1+json", manifest, **full)]}
    blobs = {f"blobs/sha256/{digest(each).partition(':')[2]}": (each, 0o644) for each in (layer, config, manifest)}
    layout = {"oci-layout": (b'{"imageLayoutVersion": "1.0.0"}', 0o644)}
    return packed({**layout, "index.json": (json.dumps(index).encode(), 0o644), **blobs})


def main() -> None:
    if len(sys.argv) == 2:
        sys.stdout.buffer.write(last_layer(sys.argv[1], json.load(sys.stdin)[0]))
        return
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
