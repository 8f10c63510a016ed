"""Which transport a session uses, decided in one place.

| proxy arrays | `use_raiden_ffi` | FFI importable | result |
| --- | --- | --- | --- |
| yes | None or True | yes | FFI |
| yes | None or True | no | RuntimeError |
| yes | False | yes | native, staged on the client's host, with a warning |
| yes | False | no | RuntimeError |
| no | None or False | | native if importable, else RuntimeError |
| no | True | yes | FFI |
| no | True | no | RuntimeError |

`RAIDEN_USE_FFI` counts only where `use_raiden_ffi` is None.
"""

import dataclasses
import os

from absl import logging

from laneweave.sync.transport import raiden_package

INSTALL = (
  "install it with `pip install 'laneweave[raiden]'` (CPython 3.12, x86-64"
  " Linux)"
)
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A decided transport.

  Attributes:
    name: "raiden" (native) or "raiden_ffi".
    host_staging: Arrays pass through the client's host memory.
  """

  name: str
  host_staging: bool


def resolve_transport(
  use_raiden_ffi: bool | None,
  *,
  is_proxy: bool,
  native_error: str | None,
  ffi_error: str | None,
  environment: str | None = None,
) -> Choice:
  """Decides the transport.

  Args:
    use_raiden_ffi: True, False, or None for the runtime to decide.
    is_proxy: The arrays are Pathways proxy arrays.
    native_error: Why the native module cannot be imported, or None.
    ffi_error: Why the FFI module cannot be imported, or None.
    environment: Value of RAIDEN_USE_FFI, or None.

  Returns:
    The choice.

  Raises:
    ValueError: RAIDEN_USE_FFI is none of 1, true, yes, 0, false, no.
    RuntimeError: what was asked for, or what the runtime needs, is missing.
  """
  if use_raiden_ffi is None and environment is not None:
    value = environment.strip().lower()
    if value not in (*_TRUE, *_FALSE):
      raise ValueError(
        f"RAIDEN_USE_FFI {environment!r} must be one of"
        f" {', '.join((*_TRUE, *_FALSE))}"
      )
    use_raiden_ffi = value in _TRUE
  wants_ffi = is_proxy if use_raiden_ffi is None else use_raiden_ffi
  if (wants_ffi or is_proxy) and ffi_error is not None:
    reason = (
      "proxy arrays (Pathways) can only be staged by Raiden's FFI"
      if is_proxy
      else "`use_raiden_ffi` asks for Raiden's FFI"
    )
    raise RuntimeError(
      f"{reason}, and that of tpu-sync-jax cannot be imported ({ffi_error});"
      f" {INSTALL}"
    )
  if wants_ffi:
    return Choice(name="raiden_ffi", host_staging=False)
  if native_error is not None:
    raise RuntimeError(
      "the native synchronizer of tpu-sync-jax cannot be imported"
      f" ({native_error}); {INSTALL}, or use --transport=local in one process"
    )
  if is_proxy:
    logging.warning(
      "Raiden's FFI is available but switched off: every weight passes"
      " through the client's host memory, which must hold the whole model"
    )
  return Choice(name="raiden", host_staging=is_proxy)


def choose(
  use_raiden_ffi: bool | None,
) -> Choice:
  """`resolve_transport` with what this process can import, and its environment.

  JAX_PLATFORMS with "proxy" in it means Pathways. Nothing else reads these
  variables.

  Args:
    use_raiden_ffi: See `resolve_transport`.

  Returns:
    The choice.
  """
  environment = os.environ.get("RAIDEN_USE_FFI")
  platforms = os.environ.get("JAX_PLATFORMS", "")
  is_proxy = "proxy" in [p.strip() for p in platforms.split(",")]
  # The FFI module is loaded only where the decision depends on it.
  asks_ffi = is_proxy or use_raiden_ffi or environment is not None
  return resolve_transport(
    use_raiden_ffi,
    is_proxy=is_proxy,
    native_error=raiden_package.import_error(raiden_package.NATIVE),
    ffi_error=(
      raiden_package.import_error(raiden_package.FFI) if asks_ffi else None
    ),
    environment=environment,
  )
