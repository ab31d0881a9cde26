#!/usr/bin/env bash
# Have a Docker engine with compose, buildx and the Dockerfile's base image, where none runs: for CI, as root, on Debian.
# Prints the settings that the tests need as KEY=VALUE; what it starts, it names by PID in $1/dockerd.pid.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=$1
mkdir -p "$cache"
cd "$cache"
exec 3>&1 >setup.log 2>&1
export DOCKER_CONFIG=$cache/config

if ! command -v dockerd || ! command -v debootstrap || ! command -v iptables; then
  "$here/apt.sh" install docker.io iptables debootstrap ca-certificates
fi

# Compose v2 and buildx: bookworm has neither, the packages of the newest suite run on it.
plugins=$DOCKER_CONFIG/cli-plugins
if ! [ -x "$plugins/docker-compose" ] || ! [ -x "$plugins/docker-buildx" ]; then
  "$here/apt.sh" unpack "$cache/plugins" docker-compose docker-buildx
  mkdir -p "$plugins"
  cp plugins/usr/libexec/docker/cli-plugins/* "$plugins"
fi

if ! docker info; then
  rm -f /var/run/docker.pid
  dockerd --data-root "$cache/data" >dockerd.log 2>&1 3>&- &
  echo $! >dockerd.pid
  for _ in $(seq 60); do if docker info; then break; fi; sleep 0.5; done
fi

# No registry is asked: the base image is made of Debian's own packages, under the name that the Dockerfile gives.
if ! docker image inspect python:3.11-slim-bookworm; then
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates,iproute2 bookworm base "$("$here/apt.sh" mirror)"
  tar -C base -c . | docker import - python:3.11-slim-bookworm
  rm -rf base
fi
echo "DOCKER_CONFIG=$DOCKER_CONFIG" >&3
