#!/usr/bin/env bash
# The rollout's side of a sync, to be started in a shell of its own, before or
# after run_trainer.sh and with the same flags. It waits for the trainer.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command=$root/.venv/bin/laneweave-sync
[[ -x $command ]] || command=laneweave-sync
exec "$command" --role=rollout "$@"
