"""One cell inside its own process: build, compile, measure memory, judge, and keep ready to be timed.

Nothing is timed here whose numbers were not judged first; a cell that fails says so and is not sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from attnsuite.backends import Target, registry

from . import peers
from .cases import Case, ModelCase, OpCase, RetrievalCase, SelectionCase, StackCase, TextCase, stack_spec
from .errors import CellFailure
from .measure import judge as accuracy
from .measure import memory, speed
from .measure.formulas import op_bytes, op_flops, op_tokens
from .measure.program import Program
from .op_cell import op_program
from .record import TensorError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellRequest:
    """What the runner asks of a cell's process. ``reference`` is the case's .npz, ``memory_limit`` in bytes."""

    case: Case
    mode: str | None = "native"
    requested: str
    resolved: str
    exact: bool
    reference: Path | None
    memory_limit: int
    devices: int = 1
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A cell that ran once: what is known about it, and how to take a sample (None where nothing is timed)."""

    facts: dict[str, Any]
    take_sample: Callable[[], float] | None = None


def prepare(request: CellRequest) -> Prepared:
    """Bring a cell to where it can be sampled. Raises CellFailure where it needs more memory than it may have."""
    case = request.case
    if isinstance(case, TextCase | RetrievalCase):
        return _prepare_quality(case, request)
    if isinstance(case, ModelCase):
        return _prepare_model(case, request)
    if isinstance(case, SelectionCase):
        return _prepare_selection(case, request)
    if isinstance(case, StackCase):
        return _prepare_stack(case, request)
    if request.mode == "interpret":
        return _prepare_interpreted(case, request)
    build = _builder(request)
    program = build(case)
    facts: dict[str, Any] = {"flops": op_flops(case), "bytes_moved": op_bytes(case), "tokens": op_tokens(case)}
    judged, notes = accuracy.judged_case(case)
    outputs, sample, measured = _run(program, request)
    if judged != case:
        del outputs
        outputs = _outputs(build(judged))
    errors = {}
    if request.reference is not None:
        errors = accuracy.judge_outputs(accuracy.named_outputs(outputs), request.reference, case.dtype)
    return Prepared(facts=facts | measured | _judgement(errors, request, notes), take_sample=sample)


def _builder(request: CellRequest) -> Callable[[OpCase], Program]:
    """How the cell makes a program of an op case."""
    if request.requested in peers.PEERS:
        return functools.partial(peers.program, request.requested)
    backend, target = registry.get(request.resolved), Target.here()
    return lambda case: op_program(case, backend, "native", target, request.devices)


def _outputs(program: Program) -> Any:
    """One run, with its outputs as JAX gives them."""
    if program.arrays is not None:
        return program.arrays(program.function(*program.arguments))
    return jax.jit(program.function)(*program.arguments)


def _prepare_interpreted(case: OpCase, request: CellRequest) -> Prepared:
    """The kernel itself, executed once by its interpreter: judged, and never timed."""
    judged, notes = accuracy.judged_case(case, "interpret")
    program = op_program(judged, registry.get(request.resolved), "interpret", Target.here())
    outputs = accuracy.named_outputs(jax.jit(program.function)(*program.arguments))
    errors = {} if request.reference is None else accuracy.judge_outputs(outputs, request.reference, case.dtype)
    return Prepared(facts=_judgement(errors, request, notes))


def _prepare_model(case: ModelCase, request: CellRequest) -> Prepared:
    # An op cell does not pay for importing flax and optax.
    from . import model_accuracy, model_cell  # noqa: PLC0415

    model = model_cell.open_model(case)
    is_peer = request.requested in peers.PEERS
    program = peers.program(request.requested, case) if is_peer else None
    judged = program or model_cell.judged_program(case, model, request.requested)
    errors = {}
    if request.reference is not None:
        errors = model_accuracy.judge_model(case, _outputs(judged), request.reference)
    del judged
    program = program or model_cell.model_program(case, model, request.requested)
    facts = {
        "flops": model_cell.model_flops(case, model.config),
        "tokens": model_cell.model_tokens(case),
        "steps": model_cell.model_steps(case),
        "kv_bytes_per_token": None if is_peer else model_cell.kv_bytes_per_token(case, model.config),
    }
    _, sample, measured = _run(program, request)
    notes = () if is_peer else model_cell.notes(case, model.config, request.requested)
    return Prepared(facts=facts | measured | _judgement(errors, request, notes), take_sample=sample)


def _prepare_quality(case: TextCase | RetrievalCase, request: CellRequest) -> Prepared:
    from . import quality  # noqa: PLC0415 (as above)

    if isinstance(case, TextCase):
        found = quality.perplexity(case, request.requested, request.text)
    else:
        found = quality.recall(case, request.requested)
    facts = {"quality": found.figures, "series": found.series}
    return Prepared(facts=facts | _judgement(found.accuracy, request, found.notes))


def _prepare_selection(case: SelectionCase, request: CellRequest) -> Prepared:
    from .kascade import quality  # noqa: PLC0415 (as above)

    if request.reference is None:
        raise CellFailure("crashed", f"{case.name} has no dense logits to compare with.")
    found = quality.measure(case, request.requested, request.reference, request.text)
    facts = {"quality": found.figures, "series": found.series}
    return Prepared(facts=facts | _judgement({}, request, found.notes))


def _prepare_stack(case: StackCase, request: CellRequest) -> Prepared:
    from .kascade import stack  # noqa: PLC0415 (as above)

    errors = stack.judge(case, request.requested, request.devices)
    facts: dict[str, Any] = {"quality": stack.figures(case, request.requested), "tokens": stack_spec(case).query_length}
    notes = (*stack.plan_notes(case, request.requested), stack.JUDGED)
    # With everything selected an approximate row has to be exact, so that its numbers are held to the same rule.
    judgement = _judgement(errors, dataclasses.replace(request, exact=True), notes)
    if judgement["wrong"] is not None:
        return Prepared(facts=facts | judgement)
    _, sample, measured = _run(stack.stack_program(case, request.requested, request.devices), request)
    return Prepared(facts=facts | measured | judgement, take_sample=sample)


def _run(program: Program, request: CellRequest) -> tuple[Any, Callable[[], float], dict[str, Any]]:
    """Compile, check the sizes, run once for memory, once more where that is quick, and say how to sample."""
    if program.arrays is None:
        compiled = speed.compile_program(program.function, program.arguments)
        sizes = memory.compiled_sizes(compiled.call, request.devices)
    else:
        compiled, sizes = speed.Compiled(program.function), {}
    needed = sum(size for size in sizes.values() if size)
    target = Target.here()
    limit = request.memory_limit
    available = limit if target.platform == "cpu" or target.memory_bytes is None else target.memory_bytes
    if needed > available:
        raise CellFailure("oom", f"the compiled program needs {_gib(needed)}, and the limit is {_gib(available)}.")
    jax.block_until_ready(program.arguments)
    start = time.perf_counter()
    outputs, used, method = memory.measure(compiled.call, program.arguments)
    seconds = time.perf_counter() - start
    if seconds < 1.0:  # the first call also pays for thread pools and page faults
        seconds = speed.sample(compiled.call, program.arguments, 1)
    calls = speed.calls_per_sample(seconds)
    if program.arrays is not None:
        outputs = program.arrays(outputs)
    facts = {
        "lower_seconds": compiled.lower_seconds,
        "compile_seconds": compiled.compile_seconds,
        "memory": sizes | used,
        "memory_method": method,
        "calls": calls,
    }
    return outputs, lambda: speed.sample(compiled.call, program.arguments, calls), facts


def _judgement(errors: dict[str, TensorError], request: CellRequest, notes: tuple[str, ...]) -> dict[str, Any]:
    """The errors, and why the cell is wrong if it is; an approximate backend is wrong only where it is not finite."""
    held = errors if request.exact else {name: e for name, e in errors.items() if e.max_error is None}
    return {
        "accuracy": {name: dataclasses.asdict(e) for name, e in errors.items()},
        "wrong": accuracy.describe_failure(held),
        "notes": notes,
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def case_reference(case: Case, path: Path, text: str | None = None) -> bool:
    """Write what cells are judged by to ``path``; False for a case that brings its own comparison.

    An op case comes as :func:`attnsuite.suite.accuracy.judged_case` made it, short enough for the oracle.
    """
    if isinstance(case, SelectionCase):
        from .kascade import dense  # noqa: PLC0415 (as above)

        dense.write_dense(case, path, text)
        return True
    if isinstance(case, OpCase):
        accuracy.write_reference(case, path)
        return True
    if isinstance(case, ModelCase):
        from . import model_accuracy  # noqa: PLC0415 (as above)

        model_accuracy.write_model_reference(case, path)
        return True
    return False
