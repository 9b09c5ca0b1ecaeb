# ./run test: all stages, one after the other, each with a log of its own; a table at the end. Sourced by ./run.
#   ./run test           every stage
#   ./run test NAME...   only these (their builds included): release asan-ubsan tsan fuzz consumer python format lint files gpu

source scripts/python.sh

readonly LOGS=build/test-logs
readonly FUZZ_SECONDS=${CHIASMA_FUZZ_SECONDS:-30}

readonly LSAN_SETTINGS=suppressions=$PWD/scripts/lsan.supp:print_suppressions=0
# Those that start threads, or call the library from several.
readonly TSAN_PROGRAMS=(api_test cpu_quantize_test cpu_merge_test cpu_decode_test edge_cases_test)

# Exit status by which a stage says that it could not be run here; its last line says why.
readonly SKIPPED=77

configure_and_build() { cmake --preset "$1" "${launcher[@]}" && cmake --build "build/$1" --parallel "$(nproc)"; }

# Two programs with a thread team each share the cores here, so threads that wait must not spin.
run_ctest() { OMP_WAIT_POLICY=passive ctest --preset "$1" --parallel "$(nproc)" --no-tests=error "${@:2}"; }

stage_release() { configure_and_build ci && run_ctest ci --label-exclude gpu; }

# clang, so that both compilers see the tree with warnings as errors. Times mean nothing here, so verify_bench stays out.
stage_asan_ubsan() {
  configure_and_build asan-ubsan &&
    LSAN_OPTIONS=$LSAN_SETTINGS UBSAN_OPTIONS=print_stacktrace=1 \
      run_ctest asan-ubsan --label-exclude gpu --exclude-regex '^verify_bench$'
}

# archer tells the thread sanitizer what OpenMP synchronises; without it every parallel region looks like a race. The
# special values of CpuDecodeSpecial take the same paths through the threads as all others.
stage_tsan() {
  local archer
  archer=$(find "/usr/lib/llvm-$(clang_major)/lib" -name libarcher.so 2>/dev/null | head -n 1)
  if [[ -z $archer ]]; then
    echo "libarcher.so is not where clang $(clang_major)'s libomp should have put it"
    return 1
  fi
  cmake --preset tsan "${launcher[@]}" && cmake --build build/tsan --target "${TSAN_PROGRAMS[@]}" --parallel "$(nproc)" &&
    OMP_TOOL_LIBRARIES=$archer TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
      run_ctest tsan --label-regex "^($(IFS='|' && echo "${TSAN_PROGRAMS[*]}"))\$" \
      --exclude-regex '^CpuDecodeSpecial\.'
}

fuzz_target() {
  local found=build/fuzz-corpus/$1 seeds=("tests/fuzz/corpus/${1#fuzz_}")
  [[ -d ${seeds[0]} ]] || seeds=()
  mkdir -p "$found"
  LSAN_OPTIONS=$LSAN_SETTINGS "build/asan-ubsan/tests/fuzz/$1" -max_total_time="$FUZZ_SECONDS" -max_len=4096 -timeout=20 \
    -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$LOGS/$1-" "$found" "${seeds[@]}" >"$LOGS/$1.log" 2>&1 && return
  tail -n 60 "$LOGS/$1.log"
  return 1
}

stage_fuzz() {
  cmake --preset asan-ubsan "${launcher[@]}" &&
    cmake --build build/asan-ubsan --target chiasma_fuzzers --parallel "$(nproc)" || return 1
  local target pid failed=0 pids=()
  for target in fuzz_safetensors fuzz_arguments; do
    fuzz_target "$target" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  grep -h -E '^stat::number_of_executed_units' "$LOGS"/fuzz_*.log
  [[ $failed == 0 ]] && echo "$FUZZ_SECONDS s each, nothing found"
}

stage_consumer() {
  local prefix=$PWD/build/consumer-prefix
  rm -rf "$prefix" build/consumer
  configure_and_build ci &&
    cmake --install build/ci --prefix "$prefix" &&
    cmake -G Ninja -S tests/consumer -B build/consumer -DCMAKE_PREFIX_PATH="$prefix" &&
    cmake --build build/consumer &&
    "$prefix/bin/chiasma" info &&
    ctest --test-dir build/consumer --output-on-failure --no-tests=error
}

llvm_tool_fits() {
  local major
  major=$("$(llvm_tool "$1")" --version | sed -nE 's/.*version ([0-9]+)\..*/\1/p' | head -n 1)
  [[ $major == "$LLVM_TOOLS_MAJOR" ]] && return
  echo "$1 $major is here, $LLVM_TOOLS_MAJOR is the project's"
  return "$SKIPPED"
}

stage_format() { llvm_tool_fits clang-format && run_format --check && echo "nothing to change"; }

stage_lint() {
  llvm_tool_fits clang-tidy || return
  cmake --preset ci "${launcher[@]}" || return 1
  # Without CUDA its host files are not built, and cannot be read.
  local file files=()
  for file in $(git ls-files 'src/*.cpp' 'cli/*.cpp' 'harness/*.cpp'); do
    grep -qF "\"$PWD/$file\"" build/ci/compile_commands.json && files+=("$file")
  done
  printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(nproc)" "$(llvm_tool clang-tidy)" --quiet -p build/ci &&
    echo "${#files[@]} files, nothing found"
}

stage_files() { scripts/check_files.sh; }

stage_gpu() {
  if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "no NVIDIA GPU on this machine"
    return "$SKIPPED"
  fi
  configure_and_build ci && run_ctest ci --label-regex gpu
}

# The line of a log that says most: the test runner's verdict, else the first error of a stage that failed, else the
# last line.
verdict_of() {
  grep -E 'tests passed' "$1" | tail -n 1 | grep . && return
  [[ $2 == FAILED ]] && grep -m 1 -E '([Ee]rror|warning|FAILED):|CMake Error' "$1" && return
  tail -n 1 "$1"
}

run_tests() {
  need_packages lint test
  local stages=("$@") name started status seconds log
  [[ ${#stages[@]} -gt 0 ]] || stages=(files format release consumer python asan-ubsan fuzz tsan lint gpu)
  local passed=0 failed=0 skipped=0 word table=()
  mkdir -p "$LOGS"
  for name in "${stages[@]}"; do
    declare -F "stage_${name//-/_}" >/dev/null || { echo "./run test: no stage '$name'" >&2; exit 2; }
  done
  for name in "${stages[@]}"; do
    log=$LOGS/$name.log
    started=$SECONDS status=0
    echo "[$name] ..."
    # In a shell of its own without errexit's traps: the stages chain with && and return a status.
    ("stage_${name//-/_}") >"$log" 2>&1 </dev/null || status=$?
    seconds=$((SECONDS - started))
    case $status in
      0) passed=$((passed + 1)) word=ok ;;
      "$SKIPPED") skipped=$((skipped + 1)) word=SKIPPED ;;
      *) failed=$((failed + 1)) word=FAILED && tail -n 80 "$log" ;;
    esac
    table+=("$(printf '%-10s %-8s %4d s  %s' "$name" "$word" "$seconds" "$(verdict_of "$log" "$word")")")
    echo "${table[-1]}"
  done
  printf '\n%s\n' "Summary (logs in $LOGS/)"
  printf '%s\n' "${table[@]}"
  printf '\n%s\n' "$passed passed, $failed failed, $skipped skipped"
  [[ $failed == 0 ]]
}
