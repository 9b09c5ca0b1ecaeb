#!/usr/bin/env bash
# Hygiene of the tracked files: sizes, paths of somebody's machine, line ends, notes left behind, tables and plots
# whose figures are not those of bench/results. Prints each finding.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly MAX_BYTES=$((16 * 1024 * 1024))
findings=0

report() {
  printf '%s: %s\n' "$1" "$2"
  findings=$((findings + 1))
}

while IFS= read -r -d '' file; do
  [[ -f $file ]] || continue
  bytes=$(stat -c %s "$file")
  ((bytes <= MAX_BYTES)) || report "$file" "$bytes bytes, more than $MAX_BYTES"
done < <(git ls-files -z)

# search WHAT PATTERN [PATHSPEC...]: text files only.
search() {
  local line
  while IFS= read -r line; do report "$line" "$1"; done < <(git grep -nIE "$2" -- "${@:3}" || true)
}
self=':!scripts/check_files.sh'
search "a path of one machine" '(^|[^A-Za-z0-9_.~}-])/(home|root|work|Users)/[A-Za-z0-9]' "$self"
search "carriage return" $'\r$'
search "white space at the end of the line" '[[:blank:]]+$' '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' '*.cuh' '*.cmake' '*.txt' '*.sh' run
search "a conflict marker" '^(<<<<<<<|>>>>>>>)( |$)' "$self"
search "a note to finish later" '(^|[^X-])(TODO|FIXME|XXX)([^X]|$)' "$self"

while IFS= read -r line; do report "$line" "figures"; done < <(
  { scripts/result_tables.py --check; scripts/plots.py --check; } | grep 'out of date' || true)

((findings == 0)) && echo "$(git ls-files | wc -l) files, nothing found"
exit $((findings > 0))
