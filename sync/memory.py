"""Peak resident memory of this process."""

import pathlib
import re
import resource
import sys

_STATUS = pathlib.Path("/proc/self/status")


def peak_rss_bytes() -> int:
  """The most memory that this process has had resident, in bytes.

  On Linux from /proc, since `getrusage` also counts what the process was
  before it became this program.
  """
  if _STATUS.exists():
    found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is not None:
      return int(found[1]) * 1024
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024
