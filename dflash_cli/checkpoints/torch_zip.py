"""Find the tensors in a file of `torch.save` without unpickling it.

Such a file is a zip archive with a pickle that describes the objects and one plain file for each storage. The pickle
is read here as a list of opcodes, of which only those that build dictionaries, numbers, strings and tensors are known;
anything else, any other global above all, is refused, and nothing is ever imported or called. The tensor's bytes stay
where they are. Source: torch/serialization.py, torch/_utils.py::_rebuild_tensor_v2; Python's pickletools.
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

from dflash_runtime.checkpoint.files import DTYPE_BYTES, TensorInfo
from dflash_runtime.errors import CheckpointError, UnsupportedError

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
    """A name that a pickle asks for; never looked up."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """A file of the archive that holds elements."""

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
    """The dictionary in a file of `torch.save`; a tensor becomes the `TensorInfo` of its bytes in the file.

    Raises:
        UnsupportedError: anything but a dictionary of contiguous tensors, numbers and strings.
    """
    if not file.is_file():
        raise _refusal(file, "is no regular file")
    try:
        with zipfile.ZipFile(file) as archive:
            if any(item.header_offset < 0 for item in archive.infolist()):  # what stood before was cut off
                raise zipfile.BadZipFile
            if len(archive.infolist()) > MAX_MEMBERS:
                raise _refusal(file, "has more members than a dictionary of tensors needs")
            pickle = next((item for item in archive.infolist() if item.filename.endswith("/data.pkl")), None)
            if pickle is None or pickle.file_size > MAX_PICKLE_BYTES or not _is_plain(pickle):
                raise _refusal(file, "has no small data.pkl, which torch.save writes")
            value = _Machine(file).run(archive.read(pickle))
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise _refusal(file, "holds no dictionary")
            root = pickle.filename.removesuffix("data.pkl")
            return {
                key: _find_bytes(item, key, archive, root, file) if isinstance(item, _Tensor) else item
                for key, item in value.items()
            }
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, struct.error) as error:
        raise _refusal(file, "is no archive of torch.save") from error


class _Machine:
    """The stack of a pickle, without any way to import or to call."""

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
                    raise _refusal(self._file, f"asks for the pickle operation {opcode.name if opcode else code!r}")
                argument = _argument(opcode, stream)
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise _refusal(self._file, "holds a damaged pickle") from error
        raise _refusal(self._file, "holds a pickle without an end")

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
            raise _refusal(self._file, f"asks for {module}.{name}")
        self._stack.append(_Global(module, name))

    def pop_mark(self) -> list[Any]:
        """Everything above the last mark."""
        at = max(index for index, item in enumerate(self._stack) if item is _MARK)
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def push_tuple(self, count: int | None = None) -> None:
        """A tuple of the last `count` items, or of everything above the mark."""
        if count is None:
            self._stack.append(tuple(self.pop_mark()))
            return
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def set_items(self, pairs: list[Any]) -> None:
        """Put keys and values into the dictionary below them."""
        if not isinstance(self._stack[-1], dict):
            raise ValueError("no dictionary to put items into")
        self._stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items([key, value])

    def load_storage(self) -> None:
        """A storage by its persistent id: ('storage', class, key, device, number of elements)."""
        kind, storage, key, _, _ = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or storage.name not in STORAGES:
            raise _refusal(self._file, "refers to something that is no storage")
        self._stack.append(_Storage(str(key), STORAGES[storage.name]))

    def reduce(self) -> None:
        """The two calls that are known: an empty ordered dictionary, and a tensor."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if function == _Global(*ORDERED) and arguments == ():
            self._stack.append({})
            return
        if function != _Global(*REBUILD):
            raise _refusal(self._file, "calls something that is no tensor")
        storage, offset, shape, stride = arguments[:4]
        has_storage = isinstance(storage, _Storage) and isinstance(offset, int) and offset >= 0
        if not has_storage or not _is_contiguous(shape, stride):
            raise _refusal(self._file, "holds a tensor that is not contiguous")
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
"""The operations that are read at all; the first other one ends the reading."""


def _argument(opcode: pickletools.OpcodeInfo, stream: io.BytesIO) -> Any:
    """An operation's argument; the two lines of a global are taken as they are, without escapes."""
    if opcode.name == "GLOBAL":
        return " ".join(stream.readline().rstrip(b"\n").decode("ascii") for _ in range(2))
    return opcode.arg.reader(stream) if opcode.arg is not None else None


def _is_plain(member: zipfile.ZipInfo) -> bool:
    """Whether a member's bytes stand in the archive as they are."""
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
    """Where a tensor's bytes lie in the file: behind the local header of its storage, which is stored as it is."""
    try:
        member = archive.getinfo(f"{root}data/{tensor.storage.key}")
    except KeyError as error:
        raise _refusal(file, f"lacks the storage of {name!r}") from error
    width = int(DTYPE_BYTES[tensor.storage.dtype])
    begin, num_bytes = tensor.offset * width, math.prod(tensor.shape) * width
    if not _is_plain(member) or begin + num_bytes > member.file_size:
        raise CheckpointError(f"the storage of {name!r} is smaller than its tensor", path=file)
    with file.open("rb") as stream:
        stream.seek(member.header_offset)
        header = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
    data = member.header_offset + LOCAL_HEADER.size + header[-2] + header[-1]
    if data + member.file_size > file.stat().st_size:
        raise CheckpointError(f"truncated: {file.stat().st_size} bytes", path=file)
    return TensorInfo(name, tensor.storage.dtype, tensor.shape, file, data + begin, data + begin + num_bytes)


def _refusal(file: Path, why: str) -> UnsupportedError:
    return UnsupportedError(f"{file}: {why}; pickles are never executed, so it is refused")
