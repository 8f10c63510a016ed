#!/usr/bin/env bash
# Prints the path of a CPython 3.12, which Raiden's wheel needs.
#
# Tried in turn: $PYTHON, python3.12, python3, pyenv's versions, uv. A name on
# PATH that does not run (a pyenv shim without that version) does not count, nor
# does a Python that cannot make virtual environments.
set -u

is_312() {
  [ -n "$1" ] && "$1" -c '
import ensurepip, sys, venv
ok = sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 12)
sys.exit(not ok)' >/dev/null 2>&1
}

# The interpreter itself: not a shim, and not an environment made from it.
found() {
  "$1" -c 'import sys; print(sys._base_executable)'
  exit 0
}

if [ -n "${PYTHON:-}" ]; then
  if is_312 "$PYTHON"; then found "$PYTHON"; fi
  echo "PYTHON=$PYTHON is not a CPython 3.12; looking for another" >&2
fi
for name in python3.12 python3; do
  path=$(command -v "$name" 2>/dev/null) && is_312 "$path" && found "$path"
done
# pyenv's own folders, also where HOME is not that of who installed it: its
# command and its shims on PATH lie beside the versions.
pyenv_roots() {
  echo "${PYENV_ROOT:-}"
  echo "${HOME:-}/.pyenv"
  pyenv root 2>/dev/null
  local IFS=: folder
  for folder in $PATH; do
    case "$folder" in
      */shims | */bin) echo "${folder%/*}" ;;
    esac
  done
}
while read -r root; do
  [ -n "$root" ] || continue
  for path in "$root"/versions/3.12*/bin/python; do
    is_312 "$path" && found "$path"
  done
done < <(pyenv_roots)
if command -v uv >/dev/null 2>&1; then
  path=$(uv python find 3.12 2>/dev/null) && is_312 "$path" && found "$path"
fi
echo "No CPython 3.12 found (Raiden's wheel needs it): install one (for" \
  "example the package python3.12 with python3.12-venv, or \`pyenv install" \
  "3.12\`), or name one with PYTHON=/path/to/python3.12." >&2
exit 1
