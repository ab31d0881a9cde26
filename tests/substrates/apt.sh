#!/usr/bin/env bash
# Debian packages for the test clusters, for one caller at a time: as root, on Debian.
#   apt.sh install PACKAGE...       of the release that runs here
#   apt.sh fetch DIR PACKAGE...     the same, unpacked into DIR and not installed: what would start a service
#   apt.sh mirror                   print where it comes from
#   apt.sh unpack DIR PACKAGE...    of unstable, unpacked into DIR and not installed: what the release does not have
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
exec 9>/run/lock/muster-apt
flock 9
mirror() {
  # shellcheck disable=SC2016  # apt-get fills the field in
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 '/debian/\?$'
}
action=$1
shift
case $action in
install)
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@"
  ;;
fetch)
  apt-get update -qq
  mkdir -p "$1"
  cd "$1"
  shift
  apt-get download -qq "$@"
  for package in ./*.deb; do dpkg-deb -x "$package" . && rm "$package"; done
  ;;
mirror) mirror ;;
unpack)
  mkdir -p "$1/apt/lists/partial"
  cd "$1"
  shift
  echo "deb $(mirror) sid main" >apt/sources.list
  options=(-o "Dir::State::Lists=$PWD/apt/lists" -o "Dir::Etc::SourceList=$PWD/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null)
  apt-get "${options[@]}" update -qq
  (cd apt && apt-get "${options[@]}" download "$@")
  for package in apt/*.deb; do dpkg-deb -x "$package" .; done
  rm -rf apt
  ;;
*)
  echo "usage: apt.sh install PACKAGE... | fetch DIR PACKAGE... | mirror | unpack DIR PACKAGE..." >&2
  exit 2
  ;;
esac
