"""The key that both sides share, and where one is needed."""

import collections.abc
import ipaddress
import os
import pathlib
import stat

from absl import logging

# HMAC-SHA256 is no stronger than its key; 128 bits cannot be searched.
LEAST_BYTES = 16
MOST_BYTES = 4096


def read(path: pathlib.Path, flag: str = "--auth_key_file") -> bytes:
  """Reads a key: the bytes of a file, line ends included.

  Args:
    path: The file. One that others on the machine can read is warned of.
    flag: What errors call it.

  Returns:
    The key.

  Raises:
    ValueError: no such file, or no key in it.
  """
  try:
    with path.open("rb") as file:
      mode = os.fstat(file.fileno()).st_mode
      key = file.read(MOST_BYTES + 1)
  except OSError as error:
    raise ValueError(
      f"`{flag}` {path} cannot be read: {error.strerror or error}"
    ) from None
  check(key, f"{flag}={path}")
  if stat.S_ISREG(mode) and mode & stat.S_IROTH:
    logging.warning(
      "`%s` %s can be read by every user of this machine (mode %o): make it"
      " 600",
      flag,
      path,
      stat.S_IMODE(mode),
    )
  return key


def check(key: bytes | None, name: str = "auth_key") -> None:
  """Checks a key; None is one that was not given.

  Args:
    key: The key.
    name: What errors call it.

  Raises:
    ValueError: too short, too long, or not bytes.
  """
  if key is None:
    return
  if not isinstance(key, bytes):
    raise ValueError(f"`{name}` is {type(key).__name__}; it must be bytes")
  if not LEAST_BYTES <= len(key) <= MOST_BYTES:
    found = f"more than {MOST_BYTES}" if len(key) > MOST_BYTES else len(key)
    raise ValueError(
      f"`{name}` has {found} bytes; a key has {LEAST_BYTES} to {MOST_BYTES},"
      " for instance those of `head -c 32 /dev/urandom`"
    )


def require(
  key: bytes | None, hosts: collections.abc.Mapping[str, str]
) -> None:
  """Refuses to go without a key where other machines can reach a port.

  Args:
    key: The key, or None.
    hosts: Addresses that are listened on or called, by option.

  Raises:
    ValueError: naming the option.
  """
  check(key)
  for option, host in hosts.items():
    if key is None and not is_loopback(host):
      raise ValueError(
        f"`{option}` {host} can be reached by other machines: `auth_key`"
        " (--auth_key_file, the same on both sides) is needed; without one"
        " use 127.0.0.1"
      )


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches an address."""
  try:
    return ipaddress.ip_address(host.strip("[]")).is_loopback
  except ValueError:
    return host == "localhost"


def host_of(address: str) -> str:
  """The host of "host:port"."""
  return address.rpartition(":")[0].strip("[]")
