"""A graph of model function calls: declared, checked before anything runs, executed, and drawn.

A call takes named values and makes others; a name is made once. Who makes what another takes runs before it, and
nothing else decides the order, but for one thing: the calls of one *thread* keep the order in which the graph lists
them.
A model's engine has a thread, since its calls are collectives, which every rank must make in the same order; threads
run beside each other.

Pure: what a call does is the caller's.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Self

import anyio

from areal_async.errors import UserError

BEFORE = "_before_"
"""Stands in the name of a value that another call changes (``Graph.having``)."""


class CallKind(StrEnum):
    """What a call does with a model."""

    GENERATE = "generate"
    """Samples from it."""
    INFERENCE = "inference"
    """Asks it without changing it."""
    TRAIN = "train"
    """Changes it."""
    COMPUTE = "compute"
    """Needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionCall:
    """One node of the graph."""

    name: str
    kind: CallKind
    role: str = ""
    """Role of the model that is called (``actor``, ``critic``, ...); empty for ``compute`` alone."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """The calls of one step. ``checked`` gives one that can be executed."""

    calls: tuple[FunctionCall, ...]
    given: tuple[str, ...] = ()
    """Values that are there before the first call."""
    results: tuple[str, ...] = ()
    """Values that the caller wants; any other has to be taken by a call."""

    def checked(self, roles: Collection[str]) -> Self:
        """Return the same graph with every call after those it takes from, else in the order given.

        Args:
            roles: models that there are.

        Raises:
            UserError: calls of one name, a value made twice, by nobody or for nobody, a model that is not there,
                or calls that wait for each other.
        """
        self._check_names()
        self._check_roles(roles)
        self._check_values()
        return replace(self, calls=tuple(self._sorted()))

    def rest(self, done: Collection[str]) -> Self:
        """Return what is left when the calls named ``done`` have run elsewhere: what they made is given."""
        left = tuple(call for call in self.calls if call.name not in done)
        made = [name for call in self.calls if call.name in done for name in call.outputs]
        taken = {name for call in left for name in call.inputs} | set(self.results)
        return replace(self, calls=left, given=tuple(name for name in (*self.given, *made) if name in taken))

    def having(self, call: FunctionCall) -> Self:
        """Return the graph with one more call.

        One that takes and makes the same value comes between the call that made it and those that take it: the former's
        is then called ``<value>_before_<call>``.
        """
        calls, added = list(self.calls), call
        for name in call.outputs:
            makers = [place for place, one in enumerate(calls) if name in one.outputs]
            if makers and name in call.inputs:
                before = f"{name}{BEFORE}{call.name}"
                maker = calls[makers[0]]
                calls[makers[0]] = replace(maker, outputs=_renamed(maker.outputs, name, before))
                added = replace(added, inputs=_renamed(added.inputs, name, before))
        return replace(self, calls=(*calls, added))

    def mermaid(self) -> str:
        """Return the picture, as Mermaid's flowchart: calls are nodes, values stand on the arrows."""
        lines = ["flowchart TD"]
        makers = {name: call.name for call in self.calls for name in call.outputs}
        for name in self.given:
            lines.append(f"  {name}_value([{name}])")
        for call in self.calls:
            label = f"{call.name}<br/>{call.kind.value}" + (f" {call.role}" if call.role else "")
            lines.append(f'  {call.name}["{label}"]')
        for call in self.calls:
            for maker in dict.fromkeys(makers[name] for name in call.inputs if name in makers):
                made = [name for name in call.inputs if makers.get(name) == maker]
                lines.append(f"  {maker} -- {', '.join(made)} --> {call.name}")
            lines += [f"  {name}_value --> {call.name}" for name in call.inputs if name not in makers]
        for name in self.results:
            lines.append(f"  {makers.get(name, f'{name}_value')} --> {name}_value([{name}])")
        return "\n".join(lines)

    def _check_names(self) -> None:
        names = [call.name for call in self.calls]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"graph: got several calls named {', '.join(twice)}, need a name of its own for each")

    def _check_roles(self, roles: Collection[str]) -> None:
        for call in self.calls:
            if call.kind is CallKind.COMPUTE and call.role:
                raise UserError(f"graph: call {call.name} computes and names the model {call.role}, need none")
            if call.kind is not CallKind.COMPUTE and call.role not in roles:
                have = ", ".join(sorted(roles)) or "none"
                raise UserError(
                    f"graph: call {call.name} ({call.kind.value}) got the model {call.role or 'of no name'}, need one "
                    f"of {have}"
                )

    def _check_values(self) -> None:
        makers: dict[str, str] = dict.fromkeys(self.given, "the caller")
        for call in self.calls:
            for name in call.outputs:
                if name in makers:
                    raise UserError(f"graph: {name} is made by {makers[name]} and by {call.name}, need one maker")
                makers[name] = call.name
        takers = {name: call.name for call in self.calls for name in call.inputs} | dict.fromkeys(
            self.results, "the caller"
        )
        for name, taker in takers.items():
            if name not in makers:
                raise UserError(f"graph: {taker} takes {name}, which nobody makes; there are {', '.join(makers)}")
        for name, maker in makers.items():
            if name not in takers:
                raise UserError(f"graph: {maker} makes {name}, which nobody takes; take it or leave it out")

    def _sorted(self) -> Iterator[FunctionCall]:
        makers = {name: call.name for call in self.calls for name in call.outputs}
        takes = {call.name: [makers[name] for name in call.inputs if name in makers] for call in self.calls}
        try:
            TopologicalSorter(takes).prepare()
        except CycleError as exc:
            ring = ", ".join(name for name in takes if name in exc.args[1])
            raise UserError(
                f"graph: the calls {ring} wait for each other's values, need an order without a ring"
            ) from exc
        left, have = list(self.calls), set(self.given)
        while left:
            ready = next(call for call in left if have.issuperset(call.inputs))
            left.remove(ready)
            have.update(ready.outputs)
            yield ready


def plain_name(name: str) -> str:
    """Return what a value was called before a call came between it and those that take it."""
    return name.partition(BEFORE)[0]


Work = Callable[[FunctionCall, dict[str, Any]], Awaitable[Mapping[str, Any]]]
"""Does a call: its inputs by name -> its outputs by name."""


async def execute(
    graph: Graph, work: Work, given: Mapping[str, Any], *, thread: Callable[[FunctionCall], str]
) -> dict[str, Any]:
    """Run the calls of a checked graph and return its results by name.

    Calls of one thread run one after another, in the graph's order; those of different threads run together as soon as
    their inputs are there. A call that raises cancels the others. A graph of one thread runs straight through.

    Args:
        given: the graph's ``given`` values.
        thread: the name of a call's thread.
    """
    values = {name: given[name] for name in graph.given}
    made = {name: anyio.Event() for call in graph.calls for name in call.outputs}
    threads: dict[str, list[FunctionCall]] = {}
    for call in graph.calls:
        threads.setdefault(thread(call), []).append(call)

    async def run_thread(calls: Sequence[FunctionCall]) -> None:
        for call in calls:
            for name in call.inputs:
                if name in made:
                    await made[name].wait()
            outputs = await work(call, {name: values[name] for name in call.inputs})
            for name in call.outputs:
                values[name] = outputs[name]
                made[name].set()

    if len(threads) == 1:
        await run_thread(graph.calls)
    else:
        # None can wait for itself, nor two for each other: each is a part of one order in which all calls could run.
        async with anyio.create_task_group() as running:
            for calls in threads.values():
                running.start_soon(run_thread, calls)
    return {name: values[name] for name in graph.results}


def _renamed(names: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if name == old else name for name in names)
