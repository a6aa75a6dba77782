"""What a reader of a plan should know and its tables do not show."""

from __future__ import annotations

from textwrap import shorten

from ..planning.solution import Solution
from ..solving.solve import Assignment
from ..tracing.tape import Tape, draws, starred


def plan_notes(solution: Solution) -> tuple[str, ...]:
    """Notes in the order of how much they matter."""
    analysis = solution.analysis
    return (
        *_opaque(analysis.tape),
        *(
            f"no rule for {name} (in {fqn}): all that it touches is replicated"
            for name, fqn in sorted(analysis.unknown.items())
        ),
        *(
            f"could not be localized; its inputs are replicated: {shorten(where, 160)}"
            for where in dict.fromkeys(map(starred, solution.ruled_out.values()))
        ),
        *_random_numbers(analysis.tape),
        *(f"guessed: {guess}" for guess in dict.fromkeys(analysis.tape.guesses)),
        *_replicated(solution.layouts.assignment),
    )


def _opaque(tape: Tape) -> list[str]:
    modules = {starred(fqn): why for (fqn, _), why in reversed(tape.opaque.items())}
    return [
        f"opaque: {name} could not be traced ({shorten(why, 120)}): it is replicated"
        for name, why in reversed(modules.items())
    ]


def _random_numbers(tape: Tape) -> list[str]:
    drawing = sorted({starred(tape.calls[op.call].fqn) for op in draws(tape)})
    names = ", ".join(name or "the model" for name in drawing)
    return [f"random numbers are drawn in {names}: seed all ranks alike"] if drawing else []


def _replicated(assignment: Assignment) -> list[str]:
    now, fewest = assignment.replicated
    if now >= fewest:
        return []
    return [
        f"with the fewest collectives, {fewest:.0%} of the matrices would be replicated; more collectives "
        f"were accepted, so that {now:.0%} are"
    ]
