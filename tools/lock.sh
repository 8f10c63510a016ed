#!/usr/bin/env bash
# Resolves setup.cfg with every extra into a lock file with hashes.
#
#   lock.sh FILE [--upgrade]   writes FILE
#   lock.sh --check FILE       fails when FILE is not what it would write
set -euo pipefail
cd "$(dirname "$0")/.."

# Raiden has nothing but release candidates, of which setup.cfg pins one.
candidates="tpu-sync-jax"

# What FILE already names stays at its version. Never --prerelease.
compile() {
  uv pip compile setup.cfg --quiet --all-extras --generate-hashes \
    --python-version 3.12 --python-platform x86_64-manylinux_2_31 \
    --no-header --no-annotate --no-emit-find-links --no-emit-index-url \
    --output-file "$@"
}

check_contents() {
  if grep -nE '^[^#]*==[0-9.]*(a|b|rc|\.?dev)[0-9]' "$1" |
    grep -vE "^[0-9]+:($candidates)=="; then
    echo "$1 names a pre-release" >&2
    return 1
  fi
  if grep -nE '://|^ *-[^-]|^ *--[^h]| @ |file:' "$1"; then
    echo "$1 names an index, an address or an option of this machine" >&2
    return 1
  fi
}

if [ "$1" = "--check" ]; then
  check_contents "$2"
  fresh=$(mktemp)
  trap 'rm -f "$fresh"' EXIT
  cp "$2" "$fresh"
  compile "$fresh"
  if ! diff -u "$2" "$fresh"; then
    echo "$2 does not match setup.cfg; run \`make lock\`" >&2
    exit 1
  fi
  echo "$2 is current"
else
  compile "$@"
  check_contents "$1"
fi
