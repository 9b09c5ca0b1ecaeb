# The stage `python` of ./run test: the package as users get it, a wheel, installed and tested. Sourced by scripts/test.sh.

readonly PYTHON_VENV=build/python-venv
readonly PYTEST_LOG=build/python-tests.log
readonly MAX_WHEEL_BYTES=$((40 * 1024 * 1024))
readonly PYTHON_PACKAGES=(numpy safetensors hypothesis pytest mypy ml_dtypes jax scikit-build-core 'apache-tvm-ffi>=0.1.10,<1')
# Asked for by number and only among the files that this machine has at hand: a build for CPUs, of some 200 MB. An index
# would hand out the one for GPUs, of several GB.
readonly TORCH=torch==2.13.0

quiet_pip() { "$1/bin/python" -m pip --disable-pip-version-check "${@:2}"; }

# PyTorch of the system, or of a file at hand; otherwise the environment stays without. Status 77 where packages cannot be had.
make_python_venv() {
  local options=()
  python3 -c 'import torch' 2>/dev/null && options=(--system-site-packages)
  python3 -m venv "${options[@]}" "$PYTHON_VENV" || return 1
  if ! quiet_pip "$PYTHON_VENV" install --quiet "${PYTHON_PACKAGES[@]}"; then
    echo "pip could not get ${PYTHON_PACKAGES[*]}"
    return "$SKIPPED"
  fi
  has_torch && return
  if quiet_pip "$PYTHON_VENV" install --dry-run --no-deps --no-index "$TORCH" >/dev/null 2>&1; then
    # Once it is there, the second call gets what it needs and nothing more.
    quiet_pip "$PYTHON_VENV" install --quiet --no-deps --no-index "$TORCH" && quiet_pip "$PYTHON_VENV" install --quiet "$TORCH"
  fi
}

has_torch() { "$PYTHON_VENV/bin/python" -c 'import torch' 2>/dev/null; }

# build_wheel NAME [CMAKE DEFINES...]: prints the wheel's path. Without isolation, so that the compiler sees the same
# paths every time and ccache finds what it has.
build_wheel() {
  local name=$1 defines=() define
  shift
  for define in CHIASMA_WERROR=ON "${launcher[@]#-D}" "$@"; do defines+=("--config-settings=cmake.define.$define"); done
  rm -rf "build/$name-dist"
  CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) quiet_pip "$PYTHON_VENV" wheel . --no-deps --no-build-isolation \
    --wheel-dir "build/$name-dist" --config-settings="build-dir=build/$name" "${defines[@]}" >&2 &&
    echo "build/$name-dist"/*.whl
}

check_wheel() {
  local bytes
  bytes=$(stat -c %s "$1")
  echo "$1: $bytes bytes"
  [[ $1 == *-py3-none-*.whl ]] || { echo "error: $1 is not for every Python 3"; return 1; }
  ((bytes < MAX_WHEEL_BYTES)) || { echo "error: $1 has $bytes bytes; allowed are less than $MAX_WHEEL_BYTES"; return 1; }
}

# install_wheel VENV WHEEL: in place of whatever is there.
install_wheel() { quiet_pip "$1" install --quiet --force-reinstall --no-deps "$2"; }

# mypy and pytest over the installed wheel. PYTHONSAFEPATH and no PYTHONPATH: the source tree is not to be found by chance.
test_wheel_with_torch() {
  local python=$PWD/$PYTHON_VENV/bin/python cli=build/ci/cli/chiasma
  "$python" -m mypy --cache-dir build/mypy-cache || return 1
  [[ -x $cli ]] && export CHIASMA_CLI=$PWD/$cli
  unset PYTHONPATH
  PYTHONSAFEPATH=1 "$python" -c 'import chiasma, sys; assert chiasma.__file__.startswith(sys.prefix), chiasma.__file__' &&
    PYTHONSAFEPATH=1 "$python" -m pytest -q -p no:cacheprovider python/tests | tee "$PYTEST_LOG"
}

# A wheel without CUDA and an environment without PyTorch.
test_bare_wheel() {
  local venv=build/python-venv-bare wheel
  wheel=$(build_wheel python-wheel-cpu CHIASMA_CUDA=OFF) && check_wheel "$wheel" &&
    python3 -m venv "$venv" && quiet_pip "$venv" install --quiet numpy 'apache-tvm-ffi>=0.1.10,<1' &&
    install_wheel "$venv" "$wheel" && "$venv/bin/python" python/tests/without_torch.py
}

stage_python() {
  local wheel
  make_python_venv || return
  wheel=$(build_wheel python-wheel) && check_wheel "$wheel" && install_wheel "$PYTHON_VENV" "$wheel" || return 1
  if has_torch; then
    test_wheel_with_torch && test_bare_wheel && echo "$(tail -n 1 "$PYTEST_LOG"); without PyTorch and CUDA: imported, every format decoded"
    return
  fi
  test_bare_wheel || return 1
  echo "NOT RUN: mypy and the test suite, because there is no PyTorch; built, imported and decoded with NumPy alone"
}
