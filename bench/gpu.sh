#!/usr/bin/env bash
# Everything for a GPU that is there for minutes: `bash bench/gpu.sh WHEELS OUT`, at most eight, on a machine without network.
#
# It needs Python 3.12 with torch, torchvision, torchmetrics, numpy, scikit-learn, tensorboard, rich, transformers, psutil, and pytest
# with pytest-xdist and pytest-timeout; the wheels of what else the kit needs lie in WHEELS (bench/README.md says how they come there).
# First `pytest -m gpu`, then `python -m bench.gpu one`. OUT then has gpu.json (both results), gpu.md (the table), and what they printed.
# TINY=--tiny runs every line in sizes that measure nothing; TESTS chooses other tests.
set -uo pipefail
shopt -s nullglob
wheels=$(realpath "${1:?the folder of the wheels}") out=$(realpath -m "${2:?the folder for the results}")
cd "$(dirname "$0")/.." || exit
site=$(mktemp -d) work=$(mktemp -d)
trap 'rm -rf "$site" "$work"' EXIT
mkdir -p "$out"
python3 -m venv --without-pip "$site" || exit
python3 - "$("$site/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" << 'EOF'
import pathlib, site, sys
pathlib.Path(sys.argv[1], "outer.pth").write_text("\n".join(site.getsitepackages()))  # also of a venv that python3 is in
EOF
files=("$wheels"/*.whl)
if ((${#files[@]})); then
  python3 -m pip --python "$site/bin/python" install --quiet --no-index --no-deps --no-compile --no-cache-dir "${files[@]}" || exit
fi
export PATH="$site/bin:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpu_tests="tests/promises/test_on_gpu.py tests/promises/test_gpu_input.py tests/promises/test_nccl.py"
read -ra tests <<< "${TESTS:--m gpu $gpu_tests}"
timeout -s INT -k 10 210 python -m pytest -vv -n "${WORKERS:-4}" --junit-xml="$work/tests.xml" "${tests[@]}" > "$out/tests.txt" 2>&1
tested=$?
tail -n 15 "$out/tests.txt"
ROUNDS=${ROUNDS:-2} KILLS=${KILLS:-1} timeout -k 10 250 python -m bench.gpu one ${TINY:+"$TINY"} \
  --folder "$work" --tests "$work/tests.xml" 2>&1 | tee "$out/bench.txt"
measured=$?
cp "$work"/gpu.* "$work"/*-operations.txt "$out" 2> /dev/null
echo "the tests ended with $tested, the measurements with $measured: $out"
exit $((tested + measured > 0))
