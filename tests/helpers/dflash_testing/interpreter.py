"""A faster Triton interpreter: the same numbers in a third of the time, by caching work that every operation repeats.

It replaces internals of Triton. If a release of Triton lacks one of them, kernels run at their usual speed.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from numbers import Number
from typing import Any

import numpy as np

from dflash_kernels.launch import HAS_TRITON

REPLACED = (
    "_patch_builtin", "_patch_lang", "_LangPatchScope", "_get_np_dtype", "_validate_np_data_size", "TensorHandle",
    "interpreter_builder", "interpreter_semantic",
)  # fmt: skip

OPERATORS: dict[str, Any] = {
    f"tensor.__{name}__": function
    for name, function in {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and,
        "or": np.bitwise_or,
    }.items()
}  # fmt: skip
"""Operators of a tensor that work element by element -> numpy's function."""

MOST_CONSTANTS = 10_000
"""A cache of numbers in expressions is emptied at this size."""


def quicken() -> None:
    """Cache values that are constant between operations, and skip steps between an operation and numpy."""
    if not HAS_TRITON:
        return
    from triton.runtime import interpreter

    _read_indices(interpreter)
    if not all(hasattr(interpreter, name) for name in REPLACED):
        return
    _patch_once(interpreter)
    _compare_names(interpreter)
    _remember_types(interpreter)
    _remember_operands(interpreter)
    _remember_shapes(interpreter)
    options = interpreter.interpreter_builder.options
    # Without this option, Triton repeats sums and products in int64 for an assertion that only debug mode makes.
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _read_indices(interpreter: Any) -> None:
    """Let a tensor of one number be an index under every release of numpy.

    Triton 3.6 converts an array [1] with `int`. numpy up to 2.4 warns about the conversion, numpy 2.5 refuses it.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _patch_once(interpreter: Any) -> None:
    """Inspect each patched module and class once, and do not patch again inside a call of a device function."""
    is_builtin, patch_lang = interpreter.tl.core.is_builtin, interpreter._patch_lang
    patched: set[Any] = set()

    @cache
    def builtin_names(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))

    @cache
    def interpreted(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)  # the wrapper only checks that `_semantic` is set
        if function.__qualname__ in OPERATORS:
            return quick_operator(interpreter, partial(function, _semantic=interpreter.interpreter_semantic))

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **options)

        return call

    @cache
    def languages(function: Any) -> frozenset[Any]:
        modules = (interpreter.tl, interpreter.tl.core)
        return frozenset(value for value in function.__globals__.values() if any(value is item for item in modules))

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtin_names(package):
            member = getattr(package, name)
            if is_builtin(member):
                scope.set_attr(package, name, interpreted(member))

    def patch_missing(function: Any) -> Any:
        missing = languages(function) - patched
        if languages(function) and not missing:
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        restore = scope.restore
        patched.update(missing)

        def undo() -> None:
            restore()
            patched.difference_update(missing)

        scope.restore = undo
        return scope

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_missing


def quick_operator(interpreter: Any, operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator of two tensors, or of a tensor and a number, that computes with numpy at once.

    The first call with each pair of types runs Triton's operator. If numpy gives the same array, later calls with these
    types use numpy. Triton decides the type of the result.
    """
    tensor, make_handle = interpreter.tl.core.tensor, interpreter.TensorHandle
    constexpr = interpreter.tl.core.constexpr
    plans: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

    def call(left: Any, right: Any) -> Any:
        if type(right) is constexpr:
            right = right.value
        if type(right) is tensor:
            key: tuple[Any, ...] = (left.type.name, right.type.name)
        elif type(right) is int or (type(right) is float and right):  # 0.0 and -0.0 are equal
            key = (left.type.name, right, type(right))
        else:
            return operator(left, right)
        if key not in plans:
            if len(plans) >= MOST_CONSTANTS:
                plans.clear()
            made = operator(left, right)
            plans[key] = _plan(interpreter, operator.func.__name__, left, right, made)  # type: ignore[attr-defined]
            return made
        plan = plans[key]
        if plan is None:
            return operator(left, right)
        compute, number, dtype, kind = plan
        return tensor(
            make_handle(compute(left.handle.data, right.handle.data if number is None else number), dtype), kind
        )

    return call


def _plan(interpreter: Any, name: str, left: Any, right: Any, made: Any) -> tuple[Any, ...] | None:
    """Return how numpy computes an operator: its function, the number's array, and the types of handle and result.

    `None` if the operator converts an operand in another way than numpy does.
    """
    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.core.tensor
    compute, kind, number = OPERATORS[f"tensor.{name}"], left.type.scalar, None
    if not isinstance(right, tensor):
        is_compared = name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
        if kind.is_ptr() or (kind.is_int() and (type(right) is float or kind.is_bool())):
            return None
        right = semantic.to_tensor(right) if is_compared else semantic.scalar_constant(right, dtype=kind)
        number = right.handle.data
    if kind.is_ptr():
        if name != "__add__" or not right.dtype.is_int_signed():
            return None
        compute = partial(_address, max(1, kind.element_ty.primitive_bitwidth // 8))
    elif not _converts_like_numpy(kind, right.type.scalar):
        return None
    found = compute(left.handle.data, right.handle.data)
    is_same = found.dtype == made.handle.data.dtype and found.tobytes() == made.handle.data.tobytes()
    return (
        (compute, number, made.handle.dtype, made.type) if is_same and found.shape == made.handle.data.shape else None
    )


def _address(step: int, pointers: Any, offsets: Any) -> Any:
    """Addresses of elements of `step` bytes, modulo 2**64. Operators of numpy's scalars would warn of an overflow."""
    return np.add(pointers, np.multiply(offsets.astype(np.uint64), np.uint64(step)))


def _converts_like_numpy(left: Any, right: Any) -> bool:
    """Whether two types are one, or two integers of the same signedness, or two floats that numpy has."""
    if left == right:
        return True
    if left.is_bool() or right.is_bool():
        return False
    if left.is_int() and right.is_int():
        return bool(left.is_int_signed() == right.is_int_signed())
    return all(kind.is_floating() and kind.name in ("fp16", "fp32", "fp64") for kind in (left, right))


def _compare_names(interpreter: Any) -> None:
    """Compare a type with itself, and unwrap values that nothing wraps, without a look at every class."""
    core = interpreter.tl.core
    unwrap, equals = core._unwrap_if_constexpr, core.dtype.__eq__
    bare = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrap_wrapped(value: Any) -> Any:
        return value if type(value) in bare else unwrap(value)

    def equals_quickly(self: Any, other: Any) -> bool:
        if self is other:
            return True
        return bool(self.name == other.name if type(other) is core.dtype else equals(self, other))

    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrap_wrapped, equals_quickly


def _remember_types(interpreter: Any) -> None:
    """Cache values that depend on a type's name only: the array type, its size, and the shape of a tensor."""
    core = interpreter.tl.core
    fits_type = interpreter._validate_np_data_size
    fits: dict[tuple[int, str], bool] = {}
    get_np_dtype, make_block, make_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, tuple[Any, Any]] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = get_np_dtype(kind)
        return dtypes[name]

    def fits_once(array: Any, kind: Any) -> bool:
        key = (array.itemsize, kind.name)
        if key not in fits:
            fits[key] = fits_type(array, kind)
        return fits[key]

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key in blocks:
            self.__dict__.update(blocks[key])
            return
        make_block(self, element_ty, shape)
        blocks[key] = dict(self.__dict__)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[type.name]

    def handle_init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits.get((data.itemsize, dtype.name)):
            self.__post_init__()

    interpreter._get_np_dtype, interpreter._validate_np_data_size = np_dtype, fits_once
    core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    interpreter.TensorHandle.__init__ = handle_init


def _remember_operands(interpreter: Any) -> None:
    """Cache how two operands get one type and one shape.

    Two tensors of one type stay as they are. Two types decide what both are cast to. A number beside a tensor becomes
    the same array each time.
    """
    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.core.tensor
    make_handle, match = interpreter.TensorHandle, semantic.binary_op_type_checking_impl
    stays: dict[tuple[str, bool], bool] = {}
    constants: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def stays_as_it_is(kind: Any, is_division: bool) -> bool:
        """Whether two operands of this type are used unchanged. Division converts types of 16 bits or fewer."""
        key = (kind.name, is_division)
        if key not in stays:
            scalar = kind.scalar
            stays[key] = not scalar.is_ptr() and (scalar.is_int() or not is_division or scalar.primitive_bitwidth > 16)
        return stays[key]

    casts: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def together(left: Any, right: Any, settings: tuple[bool, ...]) -> tuple[Any, Any]:
        """Cast two tensors to the types of earlier operands with the same types, and give them one shape."""
        key = (left.type.name, right.type.name, *settings)
        if key not in casts:
            pair = match(left, right, *settings)
            kinds = [made.type.scalar for made in pair]
            casts[key] = tuple(
                None if kind == given.type.scalar else kind for kind, given in zip(kinds, (left, right), strict=True)
            )  # type: ignore[assignment]
            return pair  # type: ignore[no-any-return]
        left_kind, right_kind = casts[key]
        left = left if left_kind is None else semantic.cast(left, left_kind)
        right = right if right_kind is None else semantic.cast(right, right_kind)
        return semantic.broadcast_impl_value(left, right)  # type: ignore[no-any-return]

    def beside(
        number: Any, other: Any, is_left: bool, settings: tuple[bool, ...], convert: Callable[[], tuple[Any, Any]]
    ) -> Any:
        """Return both operands. The number's array is cached if the tensor stays as it is."""
        key = (other.type.name, number, type(number), is_left, settings)
        if key in constants:
            data, dtype, kind = constants[key]
            made = tensor(make_handle(data, dtype), kind)
            return (made, other) if is_left else (other, made)
        pair = convert()
        made, kept = pair if is_left else pair[::-1]
        if kept is other:
            if len(constants) >= MOST_CONSTANTS:
                constants.clear()
            made.handle.data.setflags(write=False)
            constants[key] = made.handle.data, made.handle.dtype, made.type
        return pair

    def operands(
        left: Any, right: Any, left_pointer: bool = False, right_pointer: bool = False, arithmetic: bool = True,
        division: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        settings = (left_pointer, right_pointer, arithmetic, division)
        if isinstance(left, tensor):
            if isinstance(right, tensor):
                if left.type.name == right.type.name and stays_as_it_is(left.type, division):
                    return left, right
                return together(left, right, settings)
            elif isinstance(right, Number):
                return beside(right, left, False, settings, lambda: match(left, right, *settings))  # type: ignore[no-any-return]
        elif isinstance(left, Number) and isinstance(right, tensor):
            return beside(left, right, True, settings, lambda: match(left, right, *settings))  # type: ignore[no-any-return]
        return match(left, right, *settings)  # type: ignore[no-any-return]

    semantic.binary_op_type_checking_impl = operands


def _remember_shapes(interpreter: Any) -> None:
    """Cache the common type of a scalar and a block, and of two blocks with the same number of axes.

    A scalar becomes a block without a copy of its number per element.
    """
    from numpy import ndarray

    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.core.tensor
    builder, match = interpreter.interpreter_builder, semantic.broadcast_impl_value
    make_handle = interpreter.TensorHandle
    plans: dict[tuple[str, str], tuple[Any, Any]] = {}

    def spread(value: Any, kind: Any) -> Any:
        if kind is None:
            return value
        if value.type.is_block():
            return tensor(builder.create_broadcast(value.handle, kind.shape), kind)
        data = value.handle.data  # [1]
        return tensor(make_handle(ndarray(kind.shape, data.dtype, data, 0, (0,) * len(kind.shape)), kind.scalar), kind)

    def broadcast(left: Any, right: Any) -> tuple[Any, Any]:
        key = (left.type.name, right.type.name)
        if key in plans:
            left_kind, right_kind = plans[key]
            return spread(left, left_kind), spread(right, right_kind)
        pair = match(left, right)
        ranks = {len(value.type.shape) for value in (left, right) if value.type.is_block()}
        if len(ranks) < 2:
            changed = [None if made is given else made.type for made, given in zip(pair, (left, right), strict=True)]
            plans[key] = changed[0], changed[1]
        return pair  # type: ignore[no-any-return]

    semantic.broadcast_impl_value = broadcast
