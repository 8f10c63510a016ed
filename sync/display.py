"""The live table of a run; plain lines where the output is no terminal."""

from typing import Self, TextIO

import rich.box
import rich.console
import rich.live
import rich.table

from laneweave.sync import progress
from laneweave.sync.progress import SECONDS

_PLAIN_WIDTH = 100  # Columns of tables that no terminal sizes.
_REFRESH_HZ = 8
_SHOWN_NOTES = 4
# Rows of a long run: the first, which are cold, and the last.
_FIRST_ROWS, _LAST_ROWS = 2, 12


class Board:
  """Shows a run; to be used as a context manager."""

  def __init__(self, run: progress.Run, out: TextIO):
    """Keeps what to show, and where.

    Args:
      run: The run; it changes while it is shown.
      out: A terminal or a file.
    """
    self._run = run
    self._planned = False
    self._console = rich.console.Console(
      file=out,
      width=None if out.isatty() else _PLAIN_WIDTH,
      highlight=False,
    )
    self._live = None
    if self._console.is_terminal:
      self._live = rich.live.Live(
        get_renderable=self._table,
        console=self._console,
        refresh_per_second=_REFRESH_HZ,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
      )

  def __enter__(self) -> Self:
    if self._live is not None:
      self._live.start()
    return self

  def __exit__(self, *_) -> None:
    if self._live is not None:
      self._live.stop()

  def say(self, text: str) -> None:
    """Prints a line above the table."""
    self._console.print(text, soft_wrap=True, markup=False)

  def show(self, event: progress.Event) -> None:
    """Prints what an event, already in the run, has to say."""
    side = event["side"]
    match event["kind"]:
      case "listening":
        self.say(f"trainer: control service at {event['address']}")
      case "plan":
        self._show_plan(event)
      case "reference":
        self.say(
          f"{side}: {event['tensors']} tensors compared with NumPy,"
          f" {len(event['mismatched'])} differ"
        )
      case "round" if self._live is None:
        self._show_round(event)

  def _show_plan(self, event: progress.Event) -> None:
    """Where a side runs; and the plan, which both make alike, once."""
    self.say(f"{event['side']}: mesh {event['mesh']} on {event['platform']}")
    if self._planned:
      return
    self._planned = True
    self.say(
      f"{event['transport']} transport, {event['tensors']} tensors,"
      f" {event['bytes'] / 1e6:.1f} MB a round"
    )
    if event["transport"] == "local":
      self.say(
        "one process: weights go from mesh to mesh by jax.device_put, not"
        " over Raiden"
      )
    notes = event["notes"]
    for note in notes[:_SHOWN_NOTES]:
      self.say(f"note: {note}")
    if len(notes) > _SHOWN_NOTES:
      self.say(f"and {len(notes) - _SHOWN_NOTES} more notes, see --report")

  def _show_round(self, event: progress.Event) -> None:
    """A finished round, once: the trainer also knows the rollout's times."""
    if event["side"] == "rollout" and "trainer" in self._run.sides:
      return
    round_ = self._run.rounds[event["round"]]
    seconds = (
      f"{name.removesuffix('_s')} {round_.seconds[name]:.3g} s"
      for name in SECONDS
      if name in round_.seconds
    )
    self.say(
      f"round {round_.number}: version {round_.version} {round_.outcome}: "
      + ", ".join(seconds)
    )

  def summary(self) -> None:
    """Prints the final table."""
    if self._run.rounds:
      self._console.print(self._table())

  def _table(self) -> rich.table.Table:
    table = rich.table.Table(
      title="rounds (milliseconds)",
      box=rich.box.SIMPLE_HEAD,
      collapse_padding=True,
      pad_edge=False,
    )
    for name in ("round", *SECONDS, "state"):
      table.add_column(
        name.removesuffix("_s"),
        justify="left" if name == "state" else "right",
        no_wrap=True,
      )
    numbers = sorted(self._run.rounds)
    hidden = numbers[_FIRST_ROWS:-_LAST_ROWS]
    for number in numbers:
      if number not in hidden:
        self._add_row(table, self._run.rounds[number])
      elif number == hidden[0]:
        table.add_row("...")
    return table

  def _add_row(self, table: rich.table.Table, round_: progress.Round) -> None:
    state = round_.outcome or round_.phase
    if round_.mismatched:
      state += f", {len(round_.mismatched)} mismatched"
    seconds = (round_.seconds.get(name) for name in SECONDS)
    table.add_row(
      str(round_.number),
      *("" if s is None else _milliseconds(s) for s in seconds),
      state,
      style=None if round_.outcome in (None, "published") else "red",
    )


def _milliseconds(seconds: float) -> str:
  """Microseconds where there are few, none where there are many."""
  value = seconds * 1e3
  return f"{value:.{3 if value < 1 else 1 if value < 1000 else 0}f}"
