"""How far a reader has to walk, counted in a real run instead of estimated.

    python -m tests.walks

A walk begins with the call of a function and follows what it calls, depth first, each function once. A *name* is one
that a module on the way imports from another module of sloop, and that a function on the way uses. A file is *entered*
when a call comes from another file, unless what is called stays in its own file until it returns: its name then says
what it does. Who looks again into the file that was entered last has not closed it. The modules of `WORDS` have nothing
but such names, and their insides do not count.
"""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dis import get_instructions
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

from sloop.app.load import load_scenario
from sloop.sim.scenarios import run_scenario

FILES_OF_A_START = 6
ENTRIES_OF_A_START = 2
NAMES_OF_MIXED = 35

WORDS: Final = frozenset(
    f"sloop.{name}"
    for name in (
        *("vocabulary", "events", "actions", "units", "text", "errors", "streams", "options"),
        *("core.views", "profile.profile", "profile.estimate", "profile.interference"),
    )
)
"""Values, events, units, what policies see, and beliefs."""

Step = tuple[str, CodeType]
"""A module and a function of it."""


@dataclass(slots=True)
class Walk:
    """What a call of one function led to."""

    root: Step
    calls: dict[Step, dict[Step, None]] = field(default_factory=dict)
    """By function, which functions it called, in order."""

    def entries(self) -> Counter[str]:
        """How often each module is entered."""
        entered, seen = [self.root[0]], {self.root}

        def visit(step: Step) -> None:
            for called in self.calls[step]:
                if called in seen or (called[0] != step[0] and self._is_word(called)):
                    continue
                seen.add(called)
                if called[0] not in (step[0], entered[-1]):
                    entered.append(called[0])
                visit(called)

        visit(self.root)
        return Counter(entered)

    def _is_word(self, step: Step) -> bool:
        """Whether what is called stays in its own file until it returns."""
        left, seen = [step], {step}
        while left:
            for called in self.calls[left.pop()]:
                if called[0] != step[0]:
                    return False
                if called not in seen:
                    seen.add(called)
                    left.append(called)
        return True

    def names(self) -> set[tuple[str, str]]:
        """The names of other modules that are used, each with its module."""
        return {name for module, code in self.calls for name in _names(module, code)}


def walks_of(root: str, act: Callable[[], object]) -> list[Walk]:
    """The walk of each call of the function with this qualified name while `act` runs."""
    walks: list[Walk] = []
    stack: list[Step] = []
    """The functions that are running, from the root on."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        step = frame.f_globals.get("__name__", ""), frame.f_code
        if event == "return":
            if stack and stack[-1] == step:
                stack.pop()
        elif event == "call" and step[0].startswith("sloop.") and step[0] not in WORDS:
            if stack:
                walks[-1].calls[stack[-1]][step] = None
            elif step[1].co_qualname == root:
                walks.append(Walk(step))
            else:
                return
            walks[-1].calls.setdefault(step, {})
            stack.append(step)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return walks


@cache
def _imported(module: str) -> Mapping[str, tuple[str, str]]:
    """What a module imports from other modules of sloop, by its name there: the other module, and the name in it."""
    path = sys.modules[module].__file__
    assert path is not None
    imports = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.ImportFrom)]
    return {
        each.asname or each.name: (node.module, each.name)
        for node in imports
        if node.module is not None and node.module.startswith("sloop")
        for each in node.names
    }


def _names(module: str, code: CodeType) -> Iterator[tuple[str, str]]:
    """The names of other modules that the instructions of a function use."""
    imported, within = _imported(module), ""
    for each in get_instructions(code):
        if each.opname == "LOAD_GLOBAL" and each.argval in imported:
            value = getattr(sys.modules[module], each.argval)
            within = value.__name__ if isinstance(value, ModuleType) else ""
            if not within:
                yield imported[each.argval]
        elif within and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield within, each.argval
            within = ""
        else:
            within = ""


def run(system: Mapping[str, object], stages: int, hardware: Mapping[str, int], *, seconds: float) -> None:
    """A simulation of stages one after the other, with so many nodes of each kind and as many on demand."""
    profiles: dict[str, dict[str, object]] = {
        "c5.2xlarge": {"latency_ms": {"form": "table", "table": {1: {2: 60, 8: 40}, 8: {2: 400, 8: 180}}}},
        "g4dn.xlarge": {
            "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 2, "gamma": 10},
            "max_cores": 4,
            "accelerator": "T4",
        },
    }
    profiles = {kind: {"max_batch": 8, "max_cores": 8, "load_s": 1} | profiles[kind] for kind in hardware}
    declared = [
        {"name": f"s{at}", "variants": [{"name": "v", "profiles": profiles}]} | ({"after": f"s{at - 1}"} if at else {})
        for at in range(stages)
    ]
    scenario = load_scenario(
        {
            "name": "walks",
            "slo_ms": 900,
            "stages": declared,
            "cluster": {"nodes": [{"hardware": kind, "count": n, "most": 2 * n} for kind, n in hardware.items()]},
            "systems": [system],
            "trace": {"kind": "poisson", "rate": 20},
            "duration_s": seconds,
        }
    )
    run_scenario(scenario, scenario.systems[0])


def starts(provision: str) -> list[Walk]:
    """How a start is decided, from the stage that lacks a replica to the orders."""
    system = {"name": "static", "replicas": 2, "provision": provision}
    walks = walks_of("ControlPath._advance", lambda: run(system, 1, {"c5.2xlarge": 2}, seconds=3))
    return [walk for walk in walks if any(code.co_qualname == "Ledger.reserve" for _, code in walk.calls)]


def plans() -> list[Walk]:
    """How `mixed` makes a plan."""
    system = {"name": "mixed", "initial_rps": 20}
    return walks_of("Mixed.plan", lambda: run(system, 2, {"c5.2xlarge": 2, "g4dn.xlarge": 1}, seconds=15))


def main() -> None:
    lines = []
    for provision in ("as_placed", "cheapest_start"):
        entries = starts(provision)[0].entries()
        lines.append(f"a start, {provision}: {len(entries)} files (at most {FILES_OF_A_START})")
        lines += [f"  {module}: {count} (at most {ENTRIES_OF_A_START})" for module, count in entries.items()]
    names = max((walk.names() for walk in plans()), key=len)
    lines.append(f"a tick of mixed: {len(names)} names of other modules (at most {NAMES_OF_MIXED})")
    for module in sorted({module for module, _ in names}):
        lines.append(f"  {module}: {', '.join(sorted(name for own, name in names if own == module))}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
