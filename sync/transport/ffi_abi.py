"""XLA's FFI call frame through ctypes, as jaxlib's public header lays it out.

Source: `xla/ffi/api/c_api.h` under `jax.ffi.include_dir()`, API version 0.5.
Handlers written against the wrong layout read and write other memory than
they mean to, so nothing here is taken on trust: `check_header` compares every
struct, enum and the version with the header that is installed, and
`check_frame` compares the sizes that the runtime itself passes with each call.
"""

import collections.abc
import ctypes
import pathlib
import re
from typing import Any

import jax

API_VERSION = (0, 5)

EXTENSION_METADATA = 1
STAGE_EXECUTE = 3
ARG_BUFFER = 1
RET_BUFFER = 1
ATTR_SCALAR = 3
DTYPE_S32 = 4
INVALID_ARGUMENT = 3
NOT_FOUND = 5
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13

_HEADER = pathlib.Path("xla") / "ffi" / "api" / "c_api.h"

# Names and values as the header has them.
_CONSTANTS = {
  "XLA_FFI_API_MAJOR": API_VERSION[0],
  "XLA_FFI_API_MINOR": API_VERSION[1],
  "XLA_FFI_Extension_Metadata": EXTENSION_METADATA,
  "XLA_FFI_ExecutionStage_EXECUTE": STAGE_EXECUTE,
  "XLA_FFI_ArgType_BUFFER": ARG_BUFFER,
  "XLA_FFI_RetType_BUFFER": RET_BUFFER,
  "XLA_FFI_AttrType_SCALAR": ATTR_SCALAR,
  "XLA_FFI_Error_Code_INVALID_ARGUMENT": INVALID_ARGUMENT,
  "XLA_FFI_Error_Code_NOT_FOUND": NOT_FOUND,
  "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED": RESOURCE_EXHAUSTED,
  "XLA_FFI_Error_Code_FAILED_PRECONDITION": FAILED_PRECONDITION,
  "XLA_FFI_Error_Code_UNIMPLEMENTED": UNIMPLEMENTED,
  "XLA_FFI_Error_Code_INTERNAL": INTERNAL,
  "XLA_FFI_DataType_S32": DTYPE_S32,
}

# Value and bytes an element of every dtype that fills whole bytes.
_DTYPES = {
  "PRED": (1, 1),
  "S8": (2, 1),
  "S16": (3, 2),
  "S32": (4, 4),
  "S64": (5, 8),
  "U8": (6, 1),
  "U16": (7, 2),
  "U32": (8, 4),
  "U64": (9, 8),
  "F16": (10, 2),
  "F32": (11, 4),
  "F64": (12, 8),
  "C64": (15, 8),
  "BF16": (16, 2),
  "C128": (18, 16),
  "F8E5M2": (19, 1),
  "F8E4M3FN": (20, 1),
  "F8E4M3B11FNUZ": (23, 1),
  "F8E5M2FNUZ": (24, 1),
  "F8E4M3FNUZ": (25, 1),
  "F8E4M3": (28, 1),
  "F8E3M4": (29, 1),
  "F8E8M0FNU": (33, 1),
}
ITEM_SIZES = dict(_DTYPES.values())

_HEAD = "size_t struct_size; XLA_FFI_InternalExtension* extension_start;"
_FUNCTIONS = (
  "Error_Create",
  "Error_GetDetails",
  "Error_Destroy",
  "Handler_Register",
  "Stream_Get",
  "Type_Register",
  "InvokeContext_Get",
  "State_Set",
  "State_Get",
  "DeviceMemory_Allocate",
  "DeviceMemory_Free",
  "ThreadPool_Schedule",
  "ThreadPool_NumThreads",
  "Future_Create",
  "Future_SetAvailable",
  "Future_SetError",
  "RunId_Get",
  "DeviceOrdinal_Get",
  "InvokeContext_FindExtension",
  "CustomOptions_Get",
)
# In an order in which a struct held by value comes before its holder.
_STRUCTS = {
  "InternalExtension": (
    "size_t struct_size; XLA_FFI_InternalExtension_Type type;"
    " struct XLA_FFI_InternalExtension* next;"
  ),
  "Api_Version": f"{_HEAD} int major_version; int minor_version;",
  "TypeId": "int64_t type_id;",
  "Metadata": (
    "size_t struct_size; XLA_FFI_Api_Version api_version;"
    " XLA_FFI_Handler_Traits traits; XLA_FFI_TypeId state_type_id;"
  ),
  "Metadata_Extension": (
    "XLA_FFI_InternalExtension extension_base; XLA_FFI_Metadata* metadata;"
  ),
  "Error_Create_Args": (
    f"{_HEAD} const char* message; XLA_FFI_Error_Code errc;"
  ),
  "Buffer": (
    f"{_HEAD} XLA_FFI_DataType dtype; void* data; int64_t rank; int64_t* dims;"
  ),
  "ByteSpan": "const char* ptr; size_t len;",
  "Scalar": "XLA_FFI_DataType dtype; void* value;",
  "Args": f"{_HEAD} int64_t size; XLA_FFI_ArgType* types; void** args;",
  "Rets": f"{_HEAD} int64_t size; XLA_FFI_RetType* types; void** rets;",
  "Attrs": (
    f"{_HEAD} int64_t size; XLA_FFI_AttrType* types; XLA_FFI_ByteSpan** names;"
    " void** attrs;"
  ),
  "CallFrame": (
    f"{_HEAD} const XLA_FFI_Api* api; XLA_FFI_InvokeContext* ctx;"
    " XLA_FFI_ExecutionStage stage; XLA_FFI_Args args; XLA_FFI_Rets rets;"
    " XLA_FFI_Attrs attrs; XLA_FFI_Future* future;"
  ),
  "Api": (
    f"{_HEAD} XLA_FFI_Api_Version api_version;"
    " const XLA_FFI_InternalApi* internal_api; "
    + " ".join(f"XLA_FFI_{f}* XLA_FFI_{f};" for f in _FUNCTIONS)
  ),
}
# The member that `struct_size` counts up to; in two structs not the last one.
_COUNTED = {
  "InternalExtension": "next",
  "Api_Version": "minor_version",
  "Metadata": "traits",
  "Metadata_Extension": "metadata",
  "Error_Create_Args": "errc",
  "Buffer": "dims",
  "Args": "args",
  "Rets": "rets",
  "Attrs": "attrs",
  "CallFrame": "attrs",
  "Api": "XLA_FFI_CustomOptions_Get",
}
_ENUMS = (
  "InternalExtension_Type",
  "Error_Code",
  "DataType",
  "ExecutionStage",
)
_C_TYPES = {
  "size_t": ctypes.c_size_t,
  "int": ctypes.c_int,
  "int64_t": ctypes.c_int64,
  "const char*": ctypes.c_void_p,
  "XLA_FFI_Handler_Traits": ctypes.c_uint32,
  **{f"XLA_FFI_{name}": ctypes.c_int for name in _ENUMS},
}


class AbiError(RuntimeError):
  """The FFI of this jaxlib is not the one this was written for."""


def _fields(declarations: str) -> list[tuple[str, str]]:
  """(C type, name) of each member, spaces made uniform."""
  fields = []
  for declaration in declarations.split(";"):
    words = " ".join(declaration.split())
    if words:
      kind, stars, name = re.fullmatch(r"(.*?)\s*(\**)\s*(\w+)", words).groups()  # type: ignore[union-attr]
      fields.append((kind.replace(" *", "*") + stars, name))
  return fields


def _make_structs() -> dict[str, Any]:
  made: dict[str, Any] = {}
  for name, declarations in _STRUCTS.items():
    members = []
    for kind, member in _fields(declarations):
      by_value = made.get(kind.removeprefix("XLA_FFI_"))
      # Every pointer is an address here, cast where it is followed.
      found = by_value or _C_TYPES.get(kind, ctypes.c_void_p)
      members.append((member, found))
    made[name] = type(name, (ctypes.Structure,), {"_fields_": members})
  return made


_made = _make_structs()
Buffer: Any = _made["Buffer"]
Scalar: Any = _made["Scalar"]
ByteSpan: Any = _made["ByteSpan"]
CallFrame: Any = _made["CallFrame"]
Api: Any = _made["Api"]
InternalExtension: Any = _made["InternalExtension"]
Metadata: Any = _made["Metadata"]
MetadataExtension: Any = _made["Metadata_Extension"]
ErrorCreateArgs: Any = _made["Error_Create_Args"]

HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_ERROR_CREATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def struct_size(struct: Any) -> int:
  """What the header's XLA_FFI_STRUCT_SIZE gives for one of the structs here."""
  member = getattr(struct, _COUNTED[struct.__name__])
  return member.offset + member.size


def read_header() -> str:
  """The header of the installed jaxlib.

  Raises:
    AbiError: there is none.
  """
  path = pathlib.Path(jax.ffi.include_dir()) / _HEADER
  try:
    return path.read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise AbiError(
      f"jaxlib's FFI header cannot be read ({error}); without it the layout of"
      " a call is not known, and no handler is registered"
    ) from error


def check_header(text: str) -> None:
  """Compares a header with what is written here.

  Args:
    text: The header.

  Raises:
    AbiError: with everything that differs.
  """
  text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
  # A name is defined as "name value" by the preprocessor, "name = value" by
  # an enum.
  found = {
    name: int(value)
    for name, value in re.findall(r"\b(XLA_FFI_\w+)\s*(?:=|\s)\s*(\d+)\b", text)
  }
  wanted = _CONSTANTS | {
    f"XLA_FFI_DataType_{name}": value for name, (value, _) in _DTYPES.items()
  }
  problems = [
    f"{name} is {found.get(name, 'missing')}, not {value}"
    for name, value in wanted.items()
    if found.get(name) != value
  ]
  text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", r"\1* \1;", text)
  bodies = dict(re.findall(r"struct\s+(XLA_FFI_\w+)\s*\{([^{}]*)\}", text))
  for name, declarations in _STRUCTS.items():
    body = bodies.get(f"XLA_FFI_{name}")
    if body is None:
      problems.append(f"struct XLA_FFI_{name} is missing")
    elif _fields_or_none(body) != _fields(declarations):
      problems.append(f"struct XLA_FFI_{name} has other members")
  counted = dict(
    re.findall(r"XLA_FFI_DEFINE_STRUCT_TRAITS\(XLA_FFI_(\w+),\s*(\w+)\)", text)
  )
  for name, member in _COUNTED.items():
    if counted.get(name) != member:
      problems.append(
        f"the size of XLA_FFI_{name} counts up to"
        f" {counted.get(name, 'nothing')}, not {member}"
      )
  for name in _ENUMS:
    if not re.search(rf"typedef enum \{{[^{{}}]*\}} XLA_FFI_{name};", text):
      problems.append(f"XLA_FFI_{name} is no enum")
  if problems:
    raise AbiError(
      "jaxlib's FFI header is not API version"
      f" {API_VERSION[0]}.{API_VERSION[1]} as laneweave knows it:"
      f" {'; '.join(problems)}; install the jaxlib of the lock file"
    )


def _fields_or_none(body):
  try:
    return _fields(body)
  except AttributeError:  # A member that is no plain declaration.
    return None


def check_frame(frame: Any) -> list[str]:
  """Compares the sizes in a call with the structs here.

  Args:
    frame: A `CallFrame`.

  Returns:
    Everything that differs.
  """
  problems = []

  def check(name: str, size: int, struct: Any) -> None:
    if size != struct_size(struct):
      problems.append(
        f"XLA_FFI_{name} has {size} bytes, not {struct_size(struct)}"
      )

  check("CallFrame", frame.struct_size, CallFrame)
  if problems:
    return problems
  api = api_of(frame)
  check("Api", api.struct_size, Api)
  if not problems:
    version = api.api_version
    if (version.major_version, version.minor_version) != API_VERSION:
      problems.append(
        f"the API version is {version.major_version}.{version.minor_version},"
        f" not {API_VERSION[0]}.{API_VERSION[1]}"
      )
  return problems


def api_of(frame: Any) -> Any:
  """The runtime's functions."""
  return Api.from_address(frame.api)


def make_error(frame: Any, code: int, message: str) -> int:
  """Makes an XLA error, to be returned by the handler.

  Args:
    frame: The call's frame.
    code: An error code.
    message: What is wrong.

  Returns:
    Address of the error, which the runtime owns.
  """
  text = ctypes.create_string_buffer(message.encode("utf-8", "replace"))
  arguments = ErrorCreateArgs(
    struct_size=struct_size(ErrorCreateArgs),
    extension_start=None,
    message=ctypes.addressof(text),
    errc=code,
  )
  create = _ERROR_CREATE(api_of(frame).XLA_FFI_Error_Create)
  return create(ctypes.addressof(arguments))


def answer_metadata(frame: Any) -> bool:
  """Tells the API version if that is what the call asks for.

  Args:
    frame: The call's frame.

  Returns:
    Whether it was such a call, with nothing else to be done.
  """
  address = frame.extension_start
  while address:
    extension = InternalExtension.from_address(address)
    if extension.type == EXTENSION_METADATA:
      asked = MetadataExtension.from_address(address)
      metadata = Metadata.from_address(asked.metadata)
      # Left at zero, the version makes the runtime refuse the handler.
      if metadata.struct_size == struct_size(Metadata):
        metadata.api_version.major_version = API_VERSION[0]
        metadata.api_version.minor_version = API_VERSION[1]
        metadata.traits = 0
      return True
    address = extension.next
  return False


def buffers(part: Any, member: str, kind: int) -> list[Any]:
  """The buffers of a call's arguments or results.

  Args:
    part: The frame's `args` or `rets`.
    member: "args" or "rets".
    kind: What each must be, `ARG_BUFFER` or `RET_BUFFER`.

  Returns:
    The buffers.

  Raises:
    ValueError: something that is no buffer of this layout.
  """
  count = part.size
  addresses = _array(ctypes.c_void_p, getattr(part, member), count)
  kinds = _array(ctypes.c_int, part.types, count)
  found = []
  for i in range(count):
    if kinds[i] != kind or not addresses[i]:
      raise ValueError(f"{member}[{i}] is no buffer")
    buffer = Buffer.from_address(addresses[i])
    if buffer.struct_size != struct_size(Buffer):
      raise ValueError(
        f"{member}[{i}] has {buffer.struct_size} bytes, not"
        f" {struct_size(Buffer)}"
      )
    found.append(buffer)
  return found


def dims(buffer: Any) -> tuple[int, ...]:
  """Shape of a buffer."""
  return tuple(_array(ctypes.c_int64, buffer.dims, buffer.rank))


def integers(part: Any) -> collections.abc.Mapping[str, int]:
  """The int32 attributes of a call; others are left out."""
  kinds = _array(ctypes.c_int, part.types, part.size)
  names = _array(ctypes.c_void_p, part.names, part.size)
  values = _array(ctypes.c_void_p, part.attrs, part.size)
  found = {}
  for kind, name, value in zip(kinds, names, values, strict=True):
    if kind != ATTR_SCALAR:
      continue
    scalar = Scalar.from_address(value)
    if scalar.dtype == DTYPE_S32:
      span = ByteSpan.from_address(name)
      text = ctypes.string_at(span.ptr, span.len).decode("utf-8", "replace")
      found[text] = ctypes.c_int32.from_address(scalar.value).value
  return found


def _array(kind, address, count):
  if count == 0:
    return ()
  return (kind * count).from_address(address)
