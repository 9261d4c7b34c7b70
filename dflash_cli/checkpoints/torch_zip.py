"""Find the tensors in a file of `torch.save` without unpickling it.

The file is a zip archive with a pickle that describes the objects, and one uncompressed member for each storage. This
module interprets the few pickle operations that build dictionaries, numbers, strings and tensors. It refuses all other
operations and all other globals, and never imports or calls a name of the pickle. Tensor data is not copied.
Source: torch/serialization.py, torch/_utils.py::_rebuild_tensor_v2; Python's pickletools.
"""

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.stored.safetensors_header import DTYPE_BYTES, TensorInfo
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.read_files import read_range

MAX_PICKLE_BYTES = 64 * 1024
MAX_MEMBERS = 64
ENCRYPTED = 1

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
}
"""Storage class -> safetensors' name of its element type."""

REBUILD = ("torch._utils", "_rebuild_tensor_v2")
ORDERED = ("collections", "OrderedDict")
LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True, slots=True)
class _Global:
    """A global that a pickle names. It is never imported."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """A member of the archive that holds elements."""

    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Elements [offset, offset + product of shape) of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]


_MARK = object()


def read_torch_zip(file: Path) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`. A tensor becomes the `TensorInfo` of its bytes in the file.

    Raises:
        UnsupportedError: the file holds something other than a dictionary of contiguous tensors, numbers and strings.
        CheckpointError: the file ends before a tensor does.
    """
    if not file.is_file():
        raise _refusal(file, "not-a-regular-file", "not a regular file")
    try:
        with zipfile.ZipFile(file) as archive:
            if any(item.header_offset < 0 for item in archive.infolist()):  # the file lacks its beginning
                raise zipfile.BadZipFile
            if len(archive.infolist()) > MAX_MEMBERS:
                raise _refusal(file, "too-many-members", f"found more than {MAX_MEMBERS} members in the archive")
            pickle = next((item for item in archive.infolist() if item.filename.endswith("/data.pkl")), None)
            if pickle is None or pickle.file_size > MAX_PICKLE_BYTES or not _is_plain(pickle):
                raise _refusal(
                    file, "no-pickle", f"expected a data.pkl of at most {MAX_PICKLE_BYTES} bytes in the archive"
                )
            value = _Machine(file).run(archive.read(pickle))
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise _refusal(file, "not-a-dictionary", "expected a dictionary with text keys")
            root = pickle.filename.removesuffix("data.pkl")
            return {
                key: _find_bytes(item, key, archive, root, file) if isinstance(item, _Tensor) else item
                for key, item in value.items()
            }
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, struct.error) as error:
        raise _refusal(file, "not-an-archive", "not an archive of torch.save") from error


class _Machine:
    """The stack machine of a pickle, without operations that import or call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The value that a pickle describes."""
        try:
            stream = io.BytesIO(data)
            while code := stream.read(1):
                opcode = OPCODES.get(code.decode("latin-1"))
                if opcode is None or opcode.name not in KNOWN:
                    name = opcode.name if opcode else repr(code)
                    raise _refusal(self._file, "pickle-operation", f"asks for the pickle operation {name}", name)
                argument = _argument(opcode, stream)
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise _refusal(self._file, "pickle-damaged", "the pickle is damaged") from error
        raise _refusal(self._file, "pickle-damaged", "the pickle has no end")

    def _step(self, name: str, argument: Any) -> None:
        if name in LITERALS:
            self._stack.append(argument)
        elif name in CONSTANTS:
            self._stack.append(CONSTANTS[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._find(argument)
        elif name in ACTIONS:
            ACTIONS[name](self)

    def _find(self, argument: str | None) -> None:
        if argument is None:
            name, module = self._stack.pop(), self._stack.pop()
        else:
            module, _, name = argument.partition(" ")
        if (module, name) not in (REBUILD, ORDERED) and not (module == "torch" and name in STORAGES):
            raise _refusal(self._file, "pickle-global", f"asks for {module}.{name}", f"{module}.{name}")
        self._stack.append(_Global(module, name))

    def pop_mark(self) -> list[Any]:
        """Remove and return the items above the last mark."""
        at = max(index for index, item in enumerate(self._stack) if item is _MARK)
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def push_tuple(self, count: int | None = None) -> None:
        """Replace the last `count` items, by default the items above the last mark, by one tuple."""
        if count is None:
            self._stack.append(tuple(self.pop_mark()))
            return
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def set_items(self, pairs: list[Any]) -> None:
        """Put keys and values, which alternate in `pairs`, into the dictionary on top of the stack."""
        if not isinstance(self._stack[-1], dict):
            raise ValueError("expected a dictionary on the stack")
        self._stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items([key, value])

    def load_storage(self) -> None:
        """Replace a persistent id, ('storage', class, key, device, number of elements), by its storage."""
        kind, storage, key, _, _ = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or storage.name not in STORAGES:
            raise _refusal(self._file, "not-a-storage", "refers to something other than a storage")
        self._stack.append(_Storage(str(key), STORAGES[storage.name]))

    def reduce(self) -> None:
        """Replace a call by its result. Known calls make an empty ordered dictionary or a tensor."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if function == _Global(*ORDERED) and arguments == ():
            self._stack.append({})
            return
        if function != _Global(*REBUILD):
            raise _refusal(self._file, "pickle-call", "calls a function other than the one that makes a tensor")
        storage, offset, shape, stride = arguments[:4]
        has_storage = isinstance(storage, _Storage) and isinstance(offset, int) and offset >= 0
        if not has_storage or not _is_contiguous(shape, stride):
            raise _refusal(self._file, "not-contiguous", "holds a tensor that is not contiguous")
        self._stack.append(_Tensor(storage, offset, shape))


OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
LITERALS = frozenset(
    {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
)  # fmt: skip
CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
ACTIONS: dict[str, Callable[[_Machine], None]] = {
    "TUPLE": _Machine.push_tuple,
    "TUPLE1": lambda machine: machine.push_tuple(1),
    "TUPLE2": lambda machine: machine.push_tuple(2),
    "TUPLE3": lambda machine: machine.push_tuple(3),
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda machine: machine.set_items(machine.pop_mark()),
    "BINPERSID": _Machine.load_storage,
    "REDUCE": _Machine.reduce,
}
KNOWN = frozenset(
    {
        *LITERALS, *CONSTANTS, *ACTIONS, "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL",
        "STACK_GLOBAL", "PROTO", "FRAME", "STOP",
    }
)  # fmt: skip
"""The operations that are interpreted."""


def _argument(opcode: pickletools.OpcodeInfo, stream: io.BytesIO) -> Any:
    """The argument of an operation. The two lines of GLOBAL may contain no escapes."""
    if opcode.name == "GLOBAL":
        return " ".join(stream.readline().rstrip(b"\n").decode("ascii") for _ in range(2))
    return opcode.arg.reader(stream) if opcode.arg is not None else None


def _is_plain(member: zipfile.ZipInfo) -> bool:
    """Whether a member is neither compressed nor encrypted."""
    return member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & ENCRYPTED


def _is_contiguous(shape: Any, stride: Any) -> bool:
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
        return False
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        return False
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _find_bytes(tensor: _Tensor, name: str, archive: zipfile.ZipFile, root: str, file: Path) -> TensorInfo:
    """The location of a tensor's bytes in the file. They follow the local header of the storage's member."""
    try:
        member = archive.getinfo(f"{root}data/{tensor.storage.key}")
    except KeyError as error:
        raise _refusal(file, "no-storage", f"lacks the storage of {name!r}", name) from error
    width = int(DTYPE_BYTES[tensor.storage.dtype])
    begin, num_bytes = tensor.offset * width, math.prod(tensor.shape) * width
    if not _is_plain(member) or begin + num_bytes > member.file_size:
        raise CheckpointError(
            f"the storage of {name!r} is smaller than its tensor", id="storage-too-small", path=file, field=name
        )
    begins = member.header_offset
    header = LOCAL_HEADER.unpack(read_range(file, begins, begins + LOCAL_HEADER.size, name))
    data = member.header_offset + LOCAL_HEADER.size + header[-2] + header[-1]
    if data + member.file_size > file.stat().st_size:
        size = file.stat().st_size
        raise CheckpointError(f"truncated: {size} bytes", id="file-truncated", path=file, found=size)
    return TensorInfo(name, tensor.storage.dtype, tensor.shape, file, data + begin, data + begin + num_bytes)


def _refusal(file: Path, id: str, why: str, found: str | None = None) -> UnsupportedError:
    return UnsupportedError(
        f"{why}; pickles are never executed, so the file is refused", id=f"torch-zip-{id}", path=file, found=found
    )
