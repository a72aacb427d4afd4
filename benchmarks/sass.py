"""What a compiled kernel consists of: loops, spills and instruction counts, read from its SASS."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MATRIX = re.compile(r"^(HGMMA|HMMA|UTC\w*MMA)\b")
_SPILL = re.compile(r"^(STL|LDL)\b")


@dataclass(frozen=True)
class Sass:
    registers: int
    stack_bytes: int  # a thread's stack frame: what does not fit into registers
    instructions: list[str]  # without predicates
    loops: list[frozenset[int]]  # natural loops, as sets of indices into `instructions`

    def count(self, pattern: str, within: frozenset[int] | None = None) -> int:
        chosen = self.instructions if within is None else [self.instructions[i] for i in sorted(within)]
        return sum(re.match(pattern, text) is not None for text in chosen)

    @property
    def product_loops(self) -> list[frozenset[int]]:
        """Innermost of the loops that multiply matrices: with tensor cores, or a quarter of it float32 multiply-adds."""
        multiplying = [a for a in self.loops if self.count(_MATRIX.pattern, a) or 4 * self.count("FFMA", a) > len(a)]
        return [a for a in multiplying if not any(b < a for b in multiplying)]

    @property
    def tile_loop(self) -> frozenset[int]:
        """The loop around the product loops; empty where there is none."""
        around = [a for a in self.loops if any(b < a for b in self.product_loops)]
        return max(around, key=len, default=frozenset())

    @property
    def epilogue(self) -> frozenset[int]:
        """What the tile loop runs between its products."""
        return self.tile_loop - frozenset().union(*self.product_loops) if self.tile_loop else frozenset()

    @property
    def spills_in_product_loops(self) -> int:
        return sum(self.count(_SPILL.pattern, loop) for loop in self.product_loops)

    @property
    def spills(self) -> int:
        return self.count(_SPILL.pattern)

    @property
    def matrix_instructions(self) -> dict[str, int]:
        found = [m.group(1) for text in self.instructions if (m := _MATRIX.match(text))]
        return {name: found.count(name) for name in sorted(set(found))}


def read(cubin: bytes) -> Sass:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        text = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    instructions, labels = _parse(text)
    return Sass(
        int(found.group(1)),
        int(found.group(2)),
        [re.sub(r"^@!?U?P\w+\s+", "", i) for i in instructions],
        list(_natural_loops(instructions, labels)),
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _parse(text: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in order, and the index at which each label stands."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(instructions)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(code.group(1))
    return instructions, labels


def _successors(instructions: list[str], labels: dict[str, int]) -> list[list[int]]:
    following = []
    for i, text in enumerate(instructions):
        conditional = text.startswith("@") or " UP" in text or " !UP" in text
        operation = re.sub(r"^@!?U?P\w+\s+", "", text)
        # A call may be a jump out of a loop that never returns, or a subroutine's: both ways on are followed.
        target = re.search(r"`\((\.L_\w+)\)", operation) if operation.startswith(("BRA", "CALL")) else None
        ends = operation.startswith(("EXIT", "RET", "BRX", "BRA"))
        after = [labels[target.group(1)]] if target and target.group(1) in labels else []
        if (conditional or not ends) and i + 1 < len(instructions):
            after.append(i + 1)
        following.append(after)
    return following


def _natural_loops(instructions: list[str], labels: dict[str, int]) -> Iterator[frozenset[int]]:
    """For each header, what can reach a jump back to it without passing it. A header dominates the loop it heads.

    Blocks that lie elsewhere in the text (waits that spin) belong to the loop that jumps to them.
    """
    after = _successors(instructions, labels)
    before: list[list[int]] = [[] for _ in instructions]
    for i, targets in enumerate(after):
        for j in targets:
            before[j].append(i)
    for header in sorted({j for i, targets in enumerate(after) for j in targets if j <= i}):
        beyond = _reachable(0, after, avoiding=header)
        back = [i for i in before[header] if i not in beyond and i in _reachable(header, after)]
        if back:
            body = {header}
            waiting = [i for i in back if i != header]
            while waiting:
                i = waiting.pop()
                if i not in body:
                    body.add(i)
                    waiting.extend(before[i])
            yield frozenset(body)


def _reachable(start: int, after: list[list[int]], avoiding: int | None = None) -> set[int]:
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        i = waiting.pop()
        if i not in seen and i != avoiding:
            seen.add(i)
            waiting.extend(after[i])
    return seen
