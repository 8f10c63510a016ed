#!/usr/bin/env bash
# Resolves setup.cfg with every extra into a lock file with hashes.
#
#   lock.sh FILE [--upgrade]   writes FILE
#   lock.sh --check FILE       fails when FILE is not what it would write
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
  uv pip compile setup.cfg --quiet --all-extras --generate-hashes \
    --python-version 3.12 --python-platform x86_64-manylinux_2_31 \
    --no-header --no-annotate --no-emit-find-links --no-emit-index-url \
    --output-file "$@"
}

if [ "$1" = "--check" ]; then
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
fi
