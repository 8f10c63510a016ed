#!/usr/bin/env bash
# Generates sync/control/control_pb2*.py from control.proto.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/laneweave/sync/control"
cp sync/control/control.proto "$work/laneweave/sync/control/"
"$python" -m grpc_tools.protoc --proto_path="$work" --python_out="$work" \
  --pyi_out="$work" --grpc_python_out="$work" \
  laneweave/sync/control/control.proto
cp "$work"/laneweave/sync/control/control_pb2*.py* sync/control/
