"""The JSON line that ends the output, and the report file."""

import datetime as dt
import importlib.metadata
import json
import os
import pathlib
import platform
import tempfile
from typing import Any

from laneweave.sync import progress
from laneweave.sync.flags import Options

OK, FAILED, ERROR = "ok", "failed", "error"
_EXIT_CODES = {OK: 0, FAILED: 1, ERROR: 2}
_PACKAGES = ("laneweave", "jax", "jaxlib", "tpu-sync-jax", "numpy")


def status(run: progress.Run, options: Options) -> tuple[str, str | None]:
  """How a run ended.

  Args:
    run: The run.
    options: What was asked for.

  Returns:
    "ok", "failed" or "error" (wrong flags or input), and what went wrong.
  """
  if run.cause is not None:
    if run.cause.is_input:
      return ERROR, run.cause.error
    return FAILED, f"{run.cause.side}: {run.cause.error}"
  for round_ in run.rounds.values():
    if round_.outcome != "published":
      reason = round_.reason or "no outcome was reported"
      return FAILED, f"round {round_.number} was not published: {reason}"
  if run.published != options.rounds:
    return FAILED, f"{run.published} of {options.rounds} rounds were published"
  if run.reference is not None and run.reference["mismatched"]:
    name = run.reference["mismatched"][0]
    return FAILED, (
      f"{len(run.reference['mismatched'])} tensors differ from the NumPy"
      f" reference, first `{name}`"
    )
  return OK, None


def line(run: progress.Run, options: Options) -> dict[str, Any]:
  """The fields of the last line of standard output.

  Args:
    run: The run.
    options: What was asked for.

  Returns:
    Fields by name; None for what this process cannot know, or what was not
    checked.
  """
  state, error = status(run, options)
  checked = options.verify != "off" and any(
    "verify" in r.seconds for r in run.rounds.values()
  )
  fields = {
    "status": state,
    "transport": run.transport,
    "rounds": run.published,
    "tensors": run.plan.get("tensors"),
    "bytes_per_round": run.plan.get("bytes"),
    "mismatched_tensors": (
      len({n for r in run.rounds.values() for n in r.mismatched})
      if checked
      else None
    ),
    "reference_mismatches": (
      None if run.reference is None else len(run.reference["mismatched"])
    ),
    "serving_version": run.serving_version,
    "streams": options.parallelism,
    "verify": options.verify,
    "per_round": [
      {
        "round": r.number,
        "version": r.version,
        "outcome": r.outcome,
        **{name: _seconds(r, name) for name in progress.SECONDS},
      }
      for _, r in sorted(run.rounds.items())
    ],
    "peak_rss_bytes": run.peak_rss_bytes,
  }
  if error is not None:
    fields["error"] = error
  return fields


def _seconds(round_: progress.Round, name: str) -> float | None:
  """Seconds to the microsecond; None where they are not known."""
  value = round_.seconds.get(name)
  return None if value is None else round(value, 6)


def input_error(error: str) -> dict[str, Any]:
  """The last line when flags are wrong and there are no options."""
  return {"status": ERROR, "error": error}


def exit_code(fields: dict[str, Any]) -> int:
  """0 done and verified, 1 failed, 2 wrong flags or input."""
  return _EXIT_CODES[fields["status"]]


def full(run: progress.Run, options: Options) -> dict[str, Any]:
  """The report: the line, and all that explains it.

  Args:
    run: The run.
    options: What was asked for.

  Returns:
    JSON data.
  """
  return {
    **line(run, options),
    "time": dt.datetime.now(dt.UTC).isoformat(),
    "flags": {
      name: value if isinstance(value, (int, float)) else str(value)
      for name, value in vars(options).items()
      if value is not None and name not in ("rules", "event_fd")
    },
    "sharding_rules": {
      side: {k: list(v) for k, v in rules.axes.items()}
      for side, rules in options.rules.items()
    },
    "meshes": run.meshes,
    "controller_address": run.address,
    "notes": run.plan.get("notes", []),
    "dropped": run.plan.get("dropped", []),
    "leaves": run.plan.get("leaves", []),
    "mismatched": {
      str(r.number): r.mismatched for r in run.rounds.values() if r.mismatched
    },
    "reference_mismatched": (
      [] if run.reference is None else run.reference["mismatched"]
    ),
    "failures": [vars(f) for f in run.failures],
    "versions": _versions(),
  }


def _versions() -> dict[str, str]:
  found = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def check_writable(path: pathlib.Path) -> None:
  """Finds out now, not after the last round, whether a report can be written.

  Args:
    path: The report.

  Raises:
    ValueError: it cannot.
  """
  try:
    if path.is_dir():
      raise IsADirectoryError(None, "it is a directory")
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent):
      pass
  except OSError as error:
    raise ValueError(
      f"`--report` {path} cannot be written: {error.strerror or error}"
    ) from None


def write(path: pathlib.Path, data: dict[str, Any]) -> None:
  """Writes a report whole or not at all.

  Args:
    path: The report; replaced if it exists.
    data: JSON data.

  Raises:
    OSError: it cannot be written.
  """
  text = json.dumps(data, indent=1) + "\n"
  path = path.absolute()
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
  try:
    with os.fdopen(handle, "w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise
