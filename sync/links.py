"""Where a side's events go: to the launcher's pipe or to this process."""

import contextlib
import json
import os
import queue
import sys
import threading
from typing import Any

from laneweave.sync import progress


class PipeLink:
  """To the launcher: events out through a descriptor, commands in from stdin.

  Standard input closes when the launcher ends, however it ends; this process
  then ends as well, so that it never outlives it.
  """

  def __init__(self, fd: int):
    """Starts to listen to standard input.

    Args:
      fd: Descriptor of the pipe for events.
    """
    self._out = os.fdopen(fd, "w", encoding="utf-8", buffering=1)
    self._lock = threading.Lock()
    self._lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=self._listen, name="launcher", daemon=True).start()

  def _listen(self) -> None:
    for line in sys.stdin:
      self._lines.put(line.strip())
    os._exit(1)

  def emit(self, kind: str, **fields: Any) -> None:
    """See `progress.Link`."""
    line = json.dumps({"kind": kind, **fields})
    with self._lock, contextlib.suppress(BrokenPipeError):
      self._out.write(line + "\n")

  def address(self, timeout_s: float) -> str:
    """See `progress.Link`."""
    try:
      return self._lines.get(timeout=timeout_s)
    except queue.Empty:
      raise TimeoutError(
        f"the trainer did not start within {timeout_s:.0f} s"
      ) from None


class QueueLink:
  """To the main thread of this process."""

  def __init__(self, side: str, events: queue.Queue[progress.Event]):
    """Keeps the queue.

    Args:
      side: Whose events these are.
      events: Where they go.
    """
    self._side = side
    self._events = events
    self._address: queue.Queue[str] = queue.Queue()

  def emit(self, kind: str, **fields: Any) -> None:
    """See `progress.Link`."""
    self._events.put({"side": self._side, "kind": kind, **fields})

  def tell(self, address: str) -> None:
    """Gives the address that `address` waits for."""
    self._address.put(address)

  def address(self, timeout_s: float) -> str:
    """See `progress.Link`."""
    try:
      return self._address.get(timeout=timeout_s)
    except queue.Empty:
      raise TimeoutError(
        f"the trainer did not start within {timeout_s:.0f} s"
      ) from None
