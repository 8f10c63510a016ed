#!/usr/bin/env bash
# The trainer's side of a sync, to be started in a shell of its own; then start
# run_rollout.sh in another, with the same flags. Takes the flags of
# laneweave-sync. Between two hosts give this one --bind_ip=ADDRESS and the
# other --controller_address=ADDRESS:47470.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command=$root/.venv/bin/laneweave-sync
[[ -x $command ]] || command=laneweave-sync
exec "$command" --role=trainer "$@"
