"""`laneweave-sync`: moves a checkpoint from a trainer's mesh to a rollout's.

The last line of standard output is one JSON object. Exit code 0: done and
verified; 1: failed; 2: wrong flags or input. Everything else that code in this
process prints, native code above all, goes to standard error.
"""

import collections.abc
import json
import os
import signal
import sys
from typing import Any, NoReturn, TextIO

from absl import app, logging
from absl import flags as absl_flags

from laneweave.sync import flags, meshes, report

_HELP = ("--help", "-help", "--helpshort", "-helpshort", "-h", "-?")


def _interrupt(number: int, _) -> NoReturn:
  raise KeyboardInterrupt(signal.Signals(number).name)


def _take_stdout() -> TextIO:
  """Keeps standard output for this module; others write to standard error."""
  sys.stdout.flush()
  mine = os.fdopen(
    os.dup(1),
    "w",
    encoding=sys.stdout.encoding,
    errors="replace",
    buffering=1,
  )
  os.dup2(2, 1)
  return mine


def _fail_input(error: Exception, out: TextIO) -> int:
  """Reports wrong flags or input."""
  text = " ".join(str(error).split())
  print(f"laneweave-sync: {text}", file=sys.stderr, flush=True)
  fields = report.input_error(text)
  print(json.dumps(fields), file=out, flush=True)
  return report.exit_code(fields)


def _child(options: flags.Options) -> int:
  """One side, as the launcher started it."""
  meshes.prepare_platform(options.mesh(options.role).size)

  from laneweave.sync import job, links

  def devices():
    import jax

    return jax.devices()

  link = links.PipeLink(options.event_fd)
  return 0 if job.run(options.role, options, link, devices) else 1


def _run(options: flags.Options, arguments: list[str], out: TextIO) -> int:
  """The launcher, or sides in this process, with display and report."""
  from laneweave.sync import display, progress

  state = progress.Run()
  tails: list[str] = []
  ended = True
  with display.Board(state, out) as board:
    try:
      if options.role == "both" and options.transport != "local":
        from laneweave.sync import launch

        tails = launch.run(options, arguments, board, state)
      else:
        both = options.role == "both"
        sides = flags.SIDES if both else (options.role,)
        meshes.prepare_platform(sum(options.mesh(s).size for s in sides))

        from laneweave.sync import here

        ended = here.run(sides, options, board, state)
    except KeyboardInterrupt as error:
      state.fail("launcher", f"interrupted ({error or 'SIGINT'})")
      ended = options.role == "both" and options.transport != "local"
  fields = report.line(state, options)
  if options.report is not None:
    try:
      report.write(options.report, report.full(state, options))
    except OSError as error:
      state.fail("launcher", f"`--report` {options.report}: {error}")
      fields = report.line(state, options)
  for line in tails:
    print(line, file=sys.stderr)
  board.summary()
  if "error" in fields:
    print(f"laneweave-sync: {fields['error']}", file=sys.stderr, flush=True)
  print(json.dumps(fields), file=out, flush=True)
  code = report.exit_code(fields)
  if not ended:
    logging.flush()
    os._exit(code)  # A thread hangs in native code and would be waited for.
  return code


def main(
  argv: collections.abc.Sequence[str], arguments: list[str], out: TextIO
) -> int:
  """Runs with parsed flags.

  Args:
    argv: What is left of the command line, program name included.
    arguments: The flags as they were given, for the processes of role=both.
    out: Standard output.

  Returns:
    The exit code.
  """
  try:
    options = flags.read(argv)
    if options.report is not None and options.event_fd < 0:
      report.check_writable(options.report)
  except ValueError as error:
    return _fail_input(error, out)
  if options.event_fd >= 0:
    return _child(options)
  if not absl_flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # The display tells of the rounds.
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP.
      signal.signal(number, _interrupt)
  return _run(options, arguments, out)


def run() -> NoReturn:
  """Entry point of the console script."""
  out = _take_stdout()
  # Other flags will follow these, which `--` would turn into arguments.
  arguments = [argument for argument in sys.argv[1:] if argument != "--"]
  if any(argument in _HELP for argument in arguments):
    print(f"{__doc__}\n{flags.describe()}", file=out, flush=True)
    sys.exit(0)

  def parse(argv: list[str]) -> list[str]:
    try:
      return absl_flags.FLAGS(argv)
    except absl_flags.Error as error:
      sys.exit(_fail_input(error, out))

  def started(argv: Any) -> int:
    return main(argv, arguments, out)

  app.run(started, flags_parser=parse)
  raise AssertionError("absl's app.run does not return")


if __name__ == "__main__":
  run()
