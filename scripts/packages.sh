# Installs what a command of ./run needs, or says what to install. Sourced by ./run.
# need_packages GROUP...: what building needs, and the groups lint, test and bench.

readonly CMAKE_MINIMUM=3.25
# Formatting and lint findings differ between versions, so that only one can be the rule.
readonly LLVM_TOOLS_MAJOR=14

declare -A PACKAGES=(
  [build]="cmake ninja-build g++ libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libgtest-dev"
  [lint]="clang-format clang-tidy"
  [test]="clang libomp-dev python3 python3-numpy python3-venv"
  [bench]="libbenchmark-dev"
)

# Tools that may also come from elsewhere than a package.
declare -A COMMAND_OF=([cmake]=cmake [ninja-build]=ninja [g++]=g++ [clang]=clang++ [python3]=python3)

# The project's version of clang-format or clang-tidy by its own name, else whatever bears the plain name.
llvm_tool() { command -v "$1-$LLVM_TOOLS_MAJOR" || command -v "$1"; }

clang_major() { clang --version 2>/dev/null | sed -nE 's/.*version ([0-9]+)\..*/\1/p' | head -n 1; }

is_there() {
  local command=${COMMAND_OF[$1]:-}
  [[ $1 == clang-format || $1 == clang-tidy ]] && { llvm_tool "$1" >/dev/null && return 0 || return 1; }
  # A Python from elsewhere than a package has it built in.
  [[ $1 == python3-venv ]] && python3 -c 'import ensurepip, venv' 2>/dev/null && return 0
  [[ -n $command ]] && command -v "$command" >/dev/null && return 0
  [[ $(dpkg-query -W -f '${Status}' "$1" 2>/dev/null) == "install ok installed" ]]
}

missing_of() {
  local group package
  for group in "$@"; do
    for package in ${PACKAGES[$group]}; do
      is_there "$package" || echo "$package"
    done
  done
}

# clang-format and clang-tidy in the project's version, where the system has it under that name.
known_names() {
  local package
  for package in "$@"; do
    case $package in
      clang-format | clang-tidy) apt-cache show "$package-$LLVM_TOOLS_MAJOR" >/dev/null 2>&1 && package+=-$LLVM_TOOLS_MAJOR ;;
    esac
    echo "$package"
  done
}

# As root or through password-free sudo; otherwise exits with 3 after saying what to type.
install_packages() {
  if ! command -v apt-get >/dev/null; then
    echo "This system has no apt-get. Please install what corresponds to these Debian packages: $*" >&2
    exit 3
  fi
  local as_root=()
  if [[ $(id -u) != 0 ]]; then
    if ! sudo -n true 2>/dev/null; then
      printf 'Packages are missing. Please run this, then try again:\n  sudo apt-get update && sudo apt-get install -y --no-install-recommends %s\n' "$*" >&2
      exit 3
    fi
    as_root=(sudo)
  fi
  echo "Installing with apt-get: $*" >&2
  mkdir -p build
  local log=build/apt.log
  # shellcheck disable=SC2046  # names of packages have no blanks
  if ! { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(known_names "$@"); } \
    >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    echo "apt-get failed; all of its output is in $log. Wanted: $*" >&2
    exit 3
  fi
}

at_least() { [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

# Ubuntu 22.04's CMake is too old; the one on PyPI serves there, in an environment inside the build folder.
need_cmake() {
  local venv=$PWD/build/venv
  [[ -x $venv/bin/cmake ]] && PATH="$venv/bin:$PATH"
  local version
  version=$(cmake --version | sed -nE 's/^cmake version ([0-9.]+).*/\1/p')
  at_least "$CMAKE_MINIMUM" "$version" && return
  echo "CMake $version is older than $CMAKE_MINIMUM; getting a newer one with pip into build/venv" >&2
  is_there python3-venv || install_packages python3-venv
  if ! { python3 -m venv "$venv" && "$venv/bin/pip" install "cmake>=$CMAKE_MINIMUM"; } >build/pip.log 2>&1; then
    tail -n 20 build/pip.log >&2
    echo "Please install CMake >= $CMAKE_MINIMUM and try again." >&2
    exit 3
  fi
  PATH="$venv/bin:$PATH"
}

# The sanitizer and fuzzer runtimes are a package of their own that carries clang's version in its name.
need_clang_runtimes() {
  local runtime
  runtime=$(clang++ -print-file-name="libclang_rt.fuzzer-$(uname -m).a")
  [[ -f $runtime || -f ${runtime/-$(uname -m)/} ]] || install_packages "libclang-rt-$(clang_major)-dev"
}

need_packages() {
  local missing
  mapfile -t missing < <(missing_of build "$@")
  [[ ${#missing[@]} == 0 ]] || install_packages "${missing[@]}"
  need_cmake
  [[ " $* " != *" test "* ]] || need_clang_runtimes
}
