#!/usr/bin/env bash
# Have Apptainer in DIR and print its path: for tests, as root, on Debian. The release has none, so that of unstable is
# unpacked beside the C library that it wants, and told to use that one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$1
if ! [ -x "$dir/usr/bin/apptainer" ]; then
  {
    "$here/apt.sh" install patchelf squashfs-tools squashfuse uidmap
    rm -rf "$dir.new"
    "$here/apt.sh" unpack "$dir.new" apptainer libc6 libseccomp2 libsqlite3-0
    lib=usr/lib/x86_64-linux-gnu
    for binary in usr/bin/apptainer "$lib/apptainer/bin/starter"; do
      patchelf --force-rpath --set-interpreter "$dir/$lib/ld-linux-x86-64.so.2" --set-rpath "$dir/$lib" "$dir.new/$binary"
    done
    # It looks for its files under the folder that its binary lies in.
    ln -s ../etc "$dir.new/usr/etc"
    ln -s ../var "$dir.new/usr/var"
    ln -s ../../var "$dir.new/usr/lib/var"
    # As root it asks for every capability there is, and a container that tests run in may lack one.
    sed -i 's/^root default capabilities.*/root default capabilities = no/' "$dir.new/etc/apptainer/apptainer.conf"
    rm -rf "$dir"
    mv "$dir.new" "$dir"
  } >&2
fi
"$dir/usr/bin/apptainer" --version >&2
echo "$dir/usr/bin/apptainer"
