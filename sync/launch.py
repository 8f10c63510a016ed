"""`--role=both`: the trainer and the rollout as two processes of their own.

The launcher touches no device and loads no JAX. It reads events from a pipe of
each process, tells the rollout where the trainer listens, and sees to it that
no process outlives the run: each is in a session of its own and is killed when
the other fails, and exits by itself when its standard input closes, which
happens even if the launcher is killed.
"""

import collections.abc
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from laneweave.sync import display, progress
from laneweave.sync.flags import ADDRESS_FROM_STDIN, SIDES, Options

_MODULE = "laneweave.sync.main"
_TERM_S = 5.0  # Seconds that an end may take.
_POLL_S = 0.1
_TAIL_LINES = 20


class _Side:
  """One process."""

  def __init__(
    self,
    name: str,
    arguments: collections.abc.Sequence[str],
    log: pathlib.Path,
    events: queue.Queue,
  ):
    """Starts it.

    Args:
      name: "trainer" or "rollout".
      arguments: Flags.
      log: Where its output goes; native code prints at will.
      events: Where its events go; (name, None) when there are no more.
    """
    self.name = name
    self.log = log
    read_fd, write_fd = os.pipe()
    # As the launcher itself: `python -m` finds packages in the current folder,
    # a console script does not.
    in_cwd = sys.path[0] in ("", os.getcwd())
    try:
      with log.open("wb") as output:
        self.process = subprocess.Popen(
          [
            sys.executable,
            *([] if in_cwd else ["-P"]),
            "-m",
            _MODULE,
            *arguments,
            f"--event_fd={write_fd}",
          ],
          stdin=subprocess.PIPE,
          stdout=output,
          stderr=subprocess.STDOUT,
          pass_fds=(write_fd,),
          start_new_session=True,
        )
    except BaseException:
      os.close(read_fd)
      raise
    finally:
      os.close(write_fd)
    self._reader = threading.Thread(
      target=self._read, args=(read_fd, events), daemon=True
    )
    self._reader.start()

  def _read(self, read_fd: int, events: queue.Queue) -> None:
    with os.fdopen(read_fd, encoding="utf-8") as lines:
      for line in lines:
        # A process killed in the middle of a line leaves half of it.
        with contextlib.suppress(json.JSONDecodeError):
          events.put((self.name, json.loads(line)))
    events.put((self.name, None))

  def tell(self, text: str) -> None:
    """Writes a line to its standard input; nothing if it has ended."""
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.write(text.encode() + b"\n")
      self.process.stdin.flush()

  def signal(self, number: int) -> None:
    """Signals its whole session."""
    if self.process.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.process.pid, number)

  def tail(self) -> list[str]:
    """The last lines it printed."""
    text = self.log.read_text(encoding="utf-8", errors="replace")
    return text.splitlines()[-_TAIL_LINES:]

  def close(self) -> None:
    """Lets go of the pipe; a process that still runs takes it as the end."""
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.close()
    self._reader.join(_TERM_S)


def run(
  options: Options,
  arguments: collections.abc.Sequence[str],
  board: display.Board,
  state: progress.Run,
) -> list[str]:
  """Runs both sides to their end.

  Args:
    options: The flags' values.
    arguments: The flags themselves, for the processes.
    board: Shows events.
    state: Takes events in, and what went wrong.

  Returns:
    What a failed side printed last, for people; empty when all went well.
  """
  events: queue.Queue[tuple[str, Any]] = queue.Queue()
  own = {
    "trainer": [
      f"--controller_address={options.controller_address}"
      if options.controller_address
      else f"--controller_address={options.bind_ip}:0"
    ],
    "rollout": [f"--controller_address={ADDRESS_FROM_STDIN}"],
  }
  sides: dict[str, _Side] = {}
  with tempfile.TemporaryDirectory(prefix="laneweave-") as logs:
    try:
      for name in SIDES:
        sides[name] = _Side(
          name,
          [*arguments, f"--role={name}", *own[name]],
          pathlib.Path(logs) / name,
          events,
        )
      _follow(sides, events, options, board, state)
      return _tails(sides, state)
    finally:
      _end(sides)


def _follow(sides, events, options, board, state) -> None:
  """Takes events in until both sides have ended or one has failed."""
  open_sides = set(sides)
  # Each side gives up on the other in `timeout_s`; this is for one that hangs.
  patience = 2 * options.timeout_s + 60
  heard = time.monotonic()
  give_up = None
  while open_sides:
    now = time.monotonic()
    if give_up is not None and now > give_up:
      return
    if now - heard > patience:
      state.fail(
        "launcher",
        f"nothing was heard of {' and '.join(sorted(open_sides))} for"
        f" {patience:.0f} s",
      )
      return
    try:
      name, event = events.get(timeout=_POLL_S)
    except queue.Empty:
      continue
    heard = time.monotonic()
    if event is None:
      open_sides.discard(name)
      _ended(sides[name], state)
    else:
      event["side"] = name
      state.apply(event)
      board.show(event)
      if event["kind"] == "listening":
        sides["rollout"].tell(event["address"])
    if state.cause is not None and give_up is None:
      give_up = time.monotonic() + state.cause.notice_s


def _ended(side: _Side, state: progress.Run) -> None:
  """Notes a process that ended without saying why."""
  try:
    code = side.process.wait(_TERM_S)
  except subprocess.TimeoutExpired:
    return
  told = side.name in state.finished or any(
    f.side == side.name for f in state.failures
  )
  if code < 0:
    name = signal.Signals(-code).name
    state.fail(side.name, f"the process was killed by {name}", is_death=True)
  elif not told:
    error = f"the process ended with exit code {code}"
    state.fail(side.name, error, is_death=True)


def _tails(sides, state) -> list[str]:
  """What the sides that failed by no fault of the input printed last."""
  lines = []
  for failure in state.failures:
    if failure.is_input:
      return []
    if failure.side in sides:
      lines.append(f"--- last output of the {failure.side}:")
      lines.extend(sides[failure.side].tail())
  return lines


def _end(sides) -> None:
  """Ends what still runs: by request, then by force."""
  for number, wait in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S)):
    running = [s for s in sides.values() if s.process.poll() is None]
    for side in running:
      side.signal(number)
    deadline = time.monotonic() + wait
    for side in running:
      with contextlib.suppress(subprocess.TimeoutExpired):
        side.process.wait(max(0.0, deadline - time.monotonic()))
  for side in sides.values():
    side.close()
