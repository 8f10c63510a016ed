"""Sides that run in this process: one started by hand, or both, local."""

import collections.abc
import queue
import threading
import time
from typing import Any

import jax

from laneweave.sync import display, job, links, progress
from laneweave.sync.flags import Options

_POLL_S = 0.1


def run(
  sides: collections.abc.Sequence[str],
  options: Options,
  board: display.Board,
  state: progress.Run,
) -> bool:
  """Runs one or both sides to their end.

  The work is done in threads, so that this one can always be interrupted.

  Args:
    sides: "trainer", "rollout" or both; both are on different devices.
    options: The flags' values.
    board: Shows events.
    state: Takes events in, and what went wrong.

  Returns:
    Whether all threads have ended. If not, one hangs, and the process has to
    end without waiting for it.
  """
  events: queue.Queue[progress.Event] = queue.Queue()
  made = {side: links.QueueLink(side, events) for side in sides}
  threads = {}
  first = 0
  for side in sides:
    threads[side] = threading.Thread(
      target=job.run,
      args=(
        side,
        options,
        made[side],
        _devices(first, options.mesh(side).size),
      ),
      name=side,
      daemon=True,
    )
    first += options.mesh(side).size
  for thread in threads.values():
    thread.start()
  give_up = None
  while events.qsize() or any(t.is_alive() for t in threads.values()):
    if give_up is not None and time.monotonic() > give_up:
      break
    try:
      event = events.get(timeout=_POLL_S)
    except queue.Empty:
      continue
    state.apply(event)
    board.show(event)
    if event["kind"] == "listening" and "rollout" in made:
      made["rollout"].tell(event["address"])
    if state.cause is not None and give_up is None:
      give_up = time.monotonic() + state.cause.notice_s
  return not any(t.is_alive() for t in threads.values())


def _devices(first: int, count: int) -> job.Devices:
  """Devices of a side: its own where there are enough, else shared ones."""

  def find() -> list[Any]:
    found = jax.devices()
    return found[first:] if len(found) >= first + count else found

  return find
