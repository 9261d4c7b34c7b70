"""Run the few PTX instructions of our inline assembly on tensors, on a machine without a GPU."""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def run_assembly(text: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all registers after the assembly. Registers are int64 tensors of unsigned words, all of one shape."""
    registers = dict(given)
    shape = next(iter(given.values())).shape
    body = text.strip().removeprefix("{").removesuffix("}")
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        name, _, rest = statement.partition(" ")
        if name == ".reg":
            continue
        target, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        values = [_read(operand, registers, shape) for operand in operands]
        _write(target, OPERATIONS[name](*values) & WORD, registers)
    return registers


def _read(operand: str, registers: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Return the value of a register, of a pair of halves, or of a number."""
    if operand.startswith("{"):
        low, high = (registers[half] for half in re.findall(r"\w+", operand))
        return low | (high << 16)
    return registers[operand] if operand in registers else torch.full(shape, int(operand, 0))


def _write(target: str, value: Tensor, registers: dict[str, Tensor]) -> None:
    if target.startswith("{"):
        low, high = re.findall(r"\w+", target)
        registers[low], registers[high] = value & 0xFFFF, value >> 16
    else:
        registers[target] = value


def _lop3(first: Tensor, second: Tensor, third: Tensor, table: Tensor) -> Tensor:
    """Look up each bit of the result in the table, by the bits of the three operands."""
    found = torch.zeros_like(first)
    for bit in range(32):
        index = (first >> bit & 1) << 2 | (second >> bit & 1) << 1 | (third >> bit & 1)
        found |= (table >> index & 1) << bit
    return found


def _fma(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Multiply and add both bfloat16 numbers of words, rounded once."""
    halves = [[bfloat16_of(word >> at) for at in (0, 16)] for word in (first, second, third)]
    low, high = ((a * b + c).bfloat16().view(torch.int16).long() & 0xFFFF for a, b, c in zip(*halves, strict=True))
    both: Tensor = low | (high << 16)
    return both


def bfloat16_of(words: Tensor) -> Tensor:
    """Return the bfloat16 numbers in the lower halves of words, as float64."""
    numbers: Tensor = (words & 0xFFFF).to(torch.uint16).view(torch.bfloat16)
    return numbers.double()


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": lambda low, high, b: high << b | low >> (32 - b),
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma,
}
