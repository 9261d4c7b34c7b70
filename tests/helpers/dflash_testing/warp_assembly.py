"""Run a program in PTX with loads, branches, matrix products and shared memory, for all warps of one program.

It knows the instructions of our inline assembly. Branches must be uniform within a warp. Floats are float64.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_testing.assembly import OPERATIONS, bfloat16_of

WORD, LANES = 0xFFFFFFFF, 32

Registers = dict[str, Tensor]

COMPARISONS: dict[str, Callable[..., Tensor]] = {"eq": torch.eq, "ne": torch.ne, "ge": torch.ge, "lt": torch.lt}

ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "mov": lambda a: a, "cvt": lambda a: a, "add": torch.add, "mul": torch.mul, "and": torch.logical_and,
    "mad": lambda a, b, c: a * b + c,
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Words of global memory from an address on. Loads outside of it fail."""

    first: int
    words: Tensor

    def load(self, addresses: Tensor) -> Tensor:
        """Return the words at addresses, which are multiples of 4."""
        places = addresses - self.first
        assert not (places % 4).any(), "an address is no multiple of 4"
        assert bool(((places >= 0) & (places < 4 * len(self.words))).all()), "a load outside of memory"
        return self.words[places // 4] & WORD


def run_warps(text: str, warps: int, given: Mapping[str, Tensor], memory: Memory) -> list[Registers]:
    """Return the registers of each warp at the end. `given` has operands [W, 32]."""
    shared: dict[int, Tensor] = {}
    running = [_Warp(text, index, {name: item[index] for name, item in given.items()}, memory, shared)
               for index in range(warps)]  # fmt: skip
    turns = [warp.run() for warp in running]
    while turns:  # until all warps wait at a barrier, or have ended
        ended = [next(turn, "ended") == "ended" for turn in turns]
        assert all(ended) or not any(ended), "some warps wait for others that have ended"
        if all(ended):
            break
    return [warp.registers for warp in running]


@dataclass
class _Warp:
    text: str
    index: int
    registers: Registers
    memory: Memory
    shared: dict[int, Tensor]
    labels: dict[str, int] = field(default_factory=dict)

    def run(self) -> Iterator[str]:
        """Run to the next barrier, and yield there."""
        self.registers["%tid.x"] = self.index * LANES + torch.arange(LANES)
        self.registers["room"] = torch.zeros(LANES, dtype=torch.int64)
        statements, at = self._statements(), 0
        while at < len(statements):
            guard, name, operands = statements[at]
            at += 1
            is_on = self._guard(guard)
            if name.startswith("bra"):
                assert bool(is_on.all()) or not is_on.any(), "a branch that is not uniform"
                at = self.labels[operands[0]] if is_on.all() else at
            elif name.startswith("bar"):
                yield "barrier"
            elif name not in (".reg", ".shared", "griddepcontrol.wait"):
                self._step(name, operands, is_on)

    def _statements(self) -> list[tuple[str, str, list[str]]]:
        """Return guard, name and operands of each statement, and remember labels."""
        found: list[tuple[str, str, list[str]]] = []
        for part in self.text.strip().removeprefix("{").removesuffix("}").split(";"):
            statement = part.strip()
            while label := re.match(r"(\w+):\s*", statement):
                self.labels[label[1]] = len(found)
                statement = statement[label.end() :]
            if statement:
                guard, name, rest = re.fullmatch(r"(@!?\w+\s+)?(\S+)\s*(.*)", statement, re.DOTALL).groups()  # type: ignore[union-attr]
                found.append(((guard or "").strip(), name, re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)))
        return found

    def _guard(self, guard: str) -> Tensor:
        if not guard:
            return torch.ones(LANES, dtype=torch.bool)
        is_on = self.registers[guard.lstrip("@!")]
        return ~is_on if guard.startswith("@!") else is_on

    def _read(self, operand: str) -> Tensor:
        if operand.startswith("0f"):
            return torch.zeros(LANES, dtype=torch.float64)
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("{"):
            low, high = (self.registers[half] for half in re.findall(r"\w+", operand))
            return low | (high << 16)
        return torch.full((LANES,), int(operand, 0))

    def _write(self, target: str, value: Tensor, is_on: Tensor) -> None:
        kept = self.registers.get(target, torch.zeros_like(value))
        self.registers[target] = torch.where(is_on, value, kept)

    def _step(self, name: str, operands: Sequence[str], is_on: Tensor) -> None:
        kind = name.split(".")
        if kind[0] == "ld":
            self._load(operands, is_on, is_shared=kind[1] == "shared")
        elif kind[0] == "st":
            for place, value in enumerate(re.findall(r"\w+", operands[1])):
                for lane, address in enumerate(self._address(operands[0]).tolist()):
                    self.shared[address + 4 * place] = self.registers[value][lane]
        elif kind[0] == "mma":
            self._multiply(*(re.findall(r"\w+", operand) for operand in operands))
        elif operands[0].startswith("{"):
            low, high = re.findall(r"\w+", operands[0])
            word = self._read(operands[1])
            self._write(low, word & 0xFFFF, is_on)
            self._write(high, word >> 16, is_on)
        else:
            self._write(operands[0], self._value(name, kind, [self._read(item) for item in operands[1:]]), is_on)

    @staticmethod
    def _value(name: str, kind: Sequence[str], values: Sequence[Tensor]) -> Tensor:
        if name in OPERATIONS and name != "mov.b32":
            return OPERATIONS[name](*values) & WORD
        return COMPARISONS[kind[1]](*values) if kind[0] == "setp" else ARITHMETIC[kind[0]](*values)

    def _address(self, operand: str) -> Tensor:
        base, *offset = re.findall(r"[\w$]+", operand)
        return self.registers[base] + (int(offset[0]) if offset else 0)

    def _load(self, operands: Sequence[str], is_on: Tensor, *, is_shared: bool) -> None:
        address = self._address(operands[1])
        for place, target in enumerate(re.findall(r"\w+", operands[0])):
            if is_shared:
                value = torch.stack([self.shared[each + 4 * place] for each in address.tolist()])
            else:
                value = torch.zeros(LANES, dtype=torch.int64)
                value[is_on] = self.memory.load(address[is_on] + 4 * place)
            self._write(target, value, is_on)

    def _multiply(self, sums: list[str], first: list[str], second: list[str], _: list[str]) -> None:
        """Multiply 16 x 16 with 16 x 8 bfloat16 numbers: lane 4 g + t has columns 2 t, 2 t + 1 of row g."""
        group, pair = torch.arange(LANES) // 4, 2 * (torch.arange(LANES) % 4)
        left, right = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
        for half in range(2):
            for index, name in enumerate(first):
                column = pair + index // 2 * 8 + half
                left[group + index % 2 * 8, column] = bfloat16_of(self.registers[name] >> 16 * half)
            for index, name in enumerate(second):
                right[pair + index * 8 + half, group] = bfloat16_of(self.registers[name] >> 16 * half)
        product = left @ right
        for index, name in enumerate(sums):
            self.registers[name] = self.registers[name] + product[group + index // 2 * 8, pair + index % 2]
