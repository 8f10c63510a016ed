#!/usr/bin/env bash
# Installs the lock file and this package, editable, in a virtual environment.
#
#   install.sh FOLDER LOCK
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
lock=$2

# The environment's scripts hold its path: a clone that was moved needs anew.
reusable() {
  [ "$(cat "$venv/.folder" 2>/dev/null)" = "$PWD" ] &&
    "$venv/bin/python" -c \
      'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null
}

if ! reusable; then
  python=$(bash tools/find_python.sh)
  echo "Creating $venv with $python"
  "$python" -m venv --clear "$venv"
  pwd >"$venv/.folder"
fi

# The lock decides versions, and the environment where they go, whatever else
# pip is configured to do. Indexes and certificates stay as configured.
export PIP_CONSTRAINT=/dev/null PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$venv/bin/python" -m pip --quiet)
echo "Installing $lock in $venv (about 1.6 GB; minutes the first time)"
"${pip[@]}" install --require-hashes --no-deps -r "$lock"
"${pip[@]}" install --no-deps --no-build-isolation --editable .

# pyright does not follow the editable install: here it finds the package.
mkdir -p "$venv/typing"
ln -sfn ../.. "$venv/typing/laneweave"
