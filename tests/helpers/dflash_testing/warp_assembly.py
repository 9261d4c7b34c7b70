"""Run a program in PTX with loads, branches, matrix products and shared memory, for all warps of one program.

It knows the instructions of our inline assembly. Branches must be uniform within a warp. Floats are float64. Copies and
products that run beside a program are in `async_assembly.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_testing.assembly import OPERATIONS, bfloat16_of
from dflash_testing.async_assembly import LANES, WORD, Barriers, Pending, Registers, Shared, Source, shared_rows

COMPARISONS: dict[str, Callable[..., Tensor]] = {"eq": torch.eq, "ne": torch.ne, "ge": torch.ge, "lt": torch.lt}

ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "mov": lambda a: a, "cvt": lambda a: a, "add": torch.add, "mul": torch.mul, "and": torch.logical_and,
    "mad": lambda a, b, c: a * b + c, "xor": torch.bitwise_xor, "selp": lambda a, b, c: torch.where(c, a, b),
    "shfl": lambda a, lane, *_: a[lane],
}  # fmt: skip

IGNORED = (".reg", ".shared", "griddepcontrol", "fence", "createpolicy", "bar.warp", "wgmma.fence")

MOST_POLLS = 20
"""If all warps wait for barriers for so many turns, they wait forever."""


def run_warps(
    text: str, warps: int, given: Mapping[str, Tensor], memory: Source, *, is_late: bool = False
) -> list[Registers]:
    """Return the registers of each warp at the end. `given` has operands [W, 32].

    With `is_late`, copies for all warps are done when a warp waits for them, and otherwise at once. Products are always
    done when a warp waits for them, with what registers and shared memory have then.
    """
    shared: Shared = {}
    barriers = Barriers(memory, shared, is_late)
    running = [_Warp(text, index, {name: item[index] for name, item in given.items()}, memory, shared, barriers)
               for index in range(warps)]  # fmt: skip
    turns, states, polls = [warp.run() for warp in running], ["runs"] * warps, 0
    while set(states) != {"ended"}:
        if set(states) == {"barrier"}:
            states = ["runs"] * warps
        states = [state if state in ("barrier", "ended") else next(turn, "ended")
                  for state, turn in zip(states, turns, strict=True)]  # fmt: skip
        assert not {"barrier", "ended"} <= set(states), "some warps wait for others that have ended"
        polls = polls + 1 if set(states) <= {"poll", "ended"} and "poll" in states else 0
        assert polls < MOST_POLLS, "all warps wait"
    return [warp.registers for warp in running]


@dataclass
class _Warp:
    text: str
    index: int
    registers: Registers
    memory: Source
    shared: Shared
    barriers: Barriers
    labels: dict[str, int] = field(default_factory=dict)
    copies: Pending = field(default_factory=Pending)
    products: Pending = field(default_factory=Pending)

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
            elif name == "bar.sync":
                yield "barrier"
            elif name.startswith("mbarrier.try_wait"):
                is_done = self.barriers.is_done(int(self._address(operands[1])[0]), int(self._read(operands[2])[0]))
                self._write(operands[0], torch.full((LANES,), is_done), is_on)
                if not is_done:
                    yield "poll"
            elif not name.startswith(IGNORED):
                self._step(name, operands, is_on)
                if name.startswith("ld.acquire"):  # another program may have to write first
                    yield "poll"

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

    def _read(self, operand: str, bits: int = 32) -> Tensor:
        if operand.startswith("0f"):
            return torch.zeros(LANES, dtype=torch.float64)
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("{"):
            low, high = (self._read(half) for half in re.findall(r"\w+", operand))
            return low | (high << bits // 2)
        return torch.full((LANES,), int(operand, 0))

    def _write(self, target: str, value: Tensor, is_on: Tensor) -> None:
        kept = self.registers.get(target, torch.zeros_like(value))
        self.registers[target] = torch.where(is_on, value, kept)

    def _step(self, name: str, operands: Sequence[str], is_on: Tensor) -> None:
        kind = name.split(".")
        if name.startswith(("cp.async", "mbarrier", "wgmma")):
            self._step_beside(name, operands, is_on)
        elif kind[0] == "elect":
            self._write(operands[0].split("|")[1], torch.arange(LANES) == 0, is_on)
        elif kind[0] == "ld":
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
            values = [self._read(item, 64 if kind[1] == "b64" else 32) for item in operands[1:]]
            self._write(operands[0], self._value(name, kind, values), is_on)

    def _step_beside(self, name: str, operands: Sequence[str], is_on: Tensor) -> None:
        """Begin or await copies and products that run beside the program, or count at a barrier."""
        pending = self.products if name.startswith("wgmma") else self.copies
        if "commit_group" in name:
            pending.commit()
        elif "wait_group" in name:
            pending.wait(int(operands[0]))
        elif name.startswith("wgmma"):
            sums, numbers = (re.findall(r"\w+", operand) for operand in operands[:2])
            descriptor = int(self._read(operands[2])[0])
            pending.add(lambda: self._multiply_shared(sums, numbers, descriptor))
        elif name.startswith("cp.async.bulk"):
            for lane in is_on.nonzero().flatten().tolist():
                target, first, full = (int(self._address(operands[place])[lane]) for place in (0, 1, 3))
                self.barriers.copy(target, first, int(self._read(operands[2])[lane]), full)
        elif name.startswith("cp.async"):
            to, source = self._address(operands[0]), self._address(operands[1])
            pending.add(lambda: self._copy(to, source, int(operands[2])))
        else:
            given = self._read(operands[1]) if "init" in name else self._read(operands[2]) if "tx" in name else None
            for lane in is_on.nonzero().flatten().tolist():
                at = int(self._address(operands[0 if "init" in name else 1])[lane])
                self.barriers.count(name.split(".")[1:3], at, 0 if given is None else int(given[lane]))

    def _copy(self, to: Tensor, source: Tensor, num_bytes: int) -> None:
        for place in range(0, num_bytes, 4):
            self.shared |= zip((to + place).tolist(), self.memory.load(source + place), strict=True)

    def _multiply_shared(self, sums: list[str], numbers: list[str], descriptor: int) -> None:
        """Multiply 16 x 16 numbers of registers with 16 x N of shared memory."""
        product = _left(self.registers, numbers) @ shared_rows(self.shared, descriptor, len(sums) * 2).T
        _add(self.registers, sums, product)

    @staticmethod
    def _value(name: str, kind: Sequence[str], values: Sequence[Tensor]) -> Tensor:
        if name in OPERATIONS and name != "mov.b32":
            return OPERATIONS[name](*values) & WORD
        if kind[0] == "setp":
            found = COMPARISONS[kind[1]](*values[:2])
            return found & values[2] if kind[2] == "and" else found
        return ARITHMETIC[kind[0]](*values)

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
        right = torch.zeros(16, 8, dtype=torch.float64)
        for half in range(2):
            for index, name in enumerate(second):
                right[PAIR + index * 8 + half, GROUP] = bfloat16_of(self.registers[name] >> 16 * half)
        _add(self.registers, sums, _left(self.registers, first) @ right)


GROUP, PAIR = torch.arange(LANES) // 4, 2 * (torch.arange(LANES) % 4)


def _left(registers: Registers, names: Sequence[str]) -> Tensor:
    """Return 16 x 16 numbers: a lane has columns 2 t, 2 t + 1 of the rows g and g + 8, and those 8 columns further."""
    left = torch.zeros(16, 16, dtype=torch.float64)
    for half in range(2):
        for index, name in enumerate(names):
            column = PAIR + index // 2 * 8 + half
            left[GROUP + index % 2 * 8, column] = bfloat16_of(registers[name] >> 16 * half)
    return left


def _add(registers: Registers, sums: Sequence[str], product: Tensor) -> None:
    """Add a product of 16 x N numbers to the sums of a warp."""
    for index, name in enumerate(sums):
        column = index // 4 * 8 + PAIR + index % 2
        registers[name] = registers[name] + product[GROUP + index % 4 // 2 * 8, column]
