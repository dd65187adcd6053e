"""A user's function in a subprocess, behind the contract: the judge calls it with arrays alone.

Neither the oracle nor a seed is in the subprocess. An argument is an array, a number, or the text of a mask. The judge
traces a callback instead of the function. The callback writes the arrays to files in the folder of the subprocess.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from attnsuite.backends import Takes, from_function, masks, registry
from attnsuite.backends.function import FunctionBackend
from attnsuite.testing.cases import leaning

from .cell import Process, Start
from .errors import CellFailure
from .measure import arrays
from .user_function import load, register_functions

_SCORES = {"leaning": leaning}
_INPUTS = ("query", "key", "value")


class SubprocessFunctionError(Exception):
    """What the function raised in its process, as ``Type: message``."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SubprocessFunction:
    """The function ``reference`` in its ``process``.

    ``description`` is what was found out of a plain function; empty where it declared what it takes.
    """

    reference: str
    process: Process
    description: str

    def __call__(self, query: Any, key: Any, value: Any, **keywords: Any) -> Any:
        """The output, whose gradients are computed there too."""
        inputs = {"query": query, "key": key, **({} if value is None else {"value": value})}
        inputs |= {name: x for name, x in keywords.items() if hasattr(x, "dtype")}
        settings = {name: _encoded(name, x) for name, x in keywords.items() if name not in inputs}
        shapes = {name: (x.shape, str(x.dtype)) for name, x in inputs.items()}
        call = jax.custom_vjp(lambda inputs: self._called(outputs, settings, shapes, inputs))

        def pulled(inputs: dict[str, Any], cotangent: Any) -> tuple[dict[str, Any]]:
            ends = {f"cotangent {i}": x for i, x in enumerate(jax.tree.leaves(cotangent))}
            found = self._called(gradients, settings, shapes | _shapes(ends), inputs | ends)
            return ({name: found.get(name) for name in inputs},)

        call.defvjp(lambda inputs: (call(inputs), inputs), pulled)
        return call(inputs)

    def _called(
        self, function: Callable[..., Any], settings: dict[str, Any], shapes: Mapping[str, Any], inputs: dict[str, Any]
    ) -> Any:
        call = (function.__name__, self.reference, json.dumps(settings, sort_keys=True))
        form = self._call(outline, *call, {name: [list(shape), dtype] for name, (shape, dtype) in shapes.items()})

        def there(inputs: dict[str, Any]) -> Any:
            sent, answer = (self.process.folder() / uuid.uuid4().hex for _ in range(2))
            arrays.save(sent, inputs)
            self._call(computed, *call, sent, answer)
            sent.unlink()
            found = arrays.load(answer)
            answer.unlink()
            return found

        leaves = {name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (shape, dtype) in form.items()}
        found = jax.pure_callback(there, leaves, inputs, vmap_method="sequential")
        return found if function is gradients else _made(found)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.process.ask(function, *arguments)
        except CellFailure as failure:
            raise SubprocessFunctionError(failure.message) from failure


def register_in_subprocess(reference: str, start: Start) -> None:
    """Register the function under its name, in a process that ``start`` makes. Raises InputError."""
    if reference in registry.names():
        return
    process = start(None)
    answer = process.ask(found_out, reference)
    features, dtypes, exact, description = msgspec.convert(answer, tuple[frozenset[str], tuple[str, ...], bool, str])
    takes = Takes(features=features, dtypes=dtypes, modes=("native", "compile"))  # pyright: ignore[reportArgumentType]
    function = SubprocessFunction(reference, process, description)
    registry.register(from_function(function, takes=takes, name=reference, exact=exact))


def subprocess_function_of(backend: Any) -> SubprocessFunction | None:
    """The function in its process; None for a backend of this process."""
    function = backend.function if isinstance(backend, FunctionBackend) else None
    return function if isinstance(function, SubprocessFunction) else None


def found_out(reference: str) -> tuple[list[str], tuple[str, ...], bool, str]:
    """In the function's process: its features and dtypes, whether it is exact, and what was found out of it."""
    backend, description = load(reference)
    registry.register(backend)
    return sorted(backend.declared.features), backend.declared.dtypes, backend.exact, description


def outline(name: str, reference: str, settings: str, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict:
    """In the function's process: shape and dtype of each result by name. What JAX raises for the program is raised."""
    inputs = {key: jax.ShapeDtypeStruct(shape, dtype) for key, (shape, dtype) in shapes.items()}
    return _shapes(_program(name, reference, settings).lower(inputs).out_info)


def computed(name: str, reference: str, settings: str, inputs: Path, answer: Path) -> None:
    """In the function's process: write the results for the arrays in a file."""
    found = _program(name, reference, settings)(jax.device_put(arrays.load(inputs)))
    arrays.save(answer, found)


def outputs(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The results of a call by name. Raises TypeError for what is neither an array nor a tuple."""
    rest = {name: x for name, x in inputs.items() if name not in _INPUTS and not name.startswith("cotangent ")}
    found = function(*(inputs.get(name) for name in _INPUTS), **rest)
    form, leaves = "pair" if isinstance(found, tuple | list) else "one", jax.tree.leaves(found)
    if not leaves or (form == "one" and leaves[0] is not found):
        raise TypeError(f"it returns a {type(found).__name__}, and the contract says one array.")
    return {f"{form} {i}": x for i, x in enumerate(leaves)}


def gradients(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The gradients by argument, for the cotangents among the arrays."""
    floats = {
        name: x
        for name, x in inputs.items()
        if jnp.issubdtype(x.dtype, jnp.floating) and not name.startswith("cotangent ")
    }
    found, pull = jax.vjp(lambda floats: list(outputs(function, inputs | floats).values()), floats)
    return pull([inputs[f"cotangent {i}"] for i in range(len(found))])[0]


_PROGRAMS = {"outputs": outputs, "gradients": gradients}


@functools.cache
def _program(name: str, reference: str, settings: str) -> Any:
    keywords: dict[str, Any] = {key: _decoded(key, x) for key, x in json.loads(settings).items()}
    function = functools.partial(_loaded(reference).function, **keywords)
    return jax.jit(functools.partial(_PROGRAMS[name], function))


def _loaded(reference: str) -> Any:
    register_functions([reference])
    return registry.get(reference)


def _made(found: Mapping[str, Any]) -> Any:
    """The results as the function returned them."""
    leaves = [found[name] for name in sorted(found)]
    return tuple(leaves) if any(name.startswith("pair") for name in found) else leaves[0]


def _encoded(name: str, setting: Any) -> Any:
    """A setting as JSON. Raises SubprocessFunctionError for a function that has no name in another process."""
    if name == "mask_function" and (encoded := masks.description_of(setting)):
        return encoded
    if name == "score_function" and setting in _SCORES.values():
        return next(word for word, function in _SCORES.items() if function is setting)
    if callable(setting):
        raise SubprocessFunctionError(f"ValueError: {name}={setting!r} has no name that another process knows.")
    return setting


def _decoded(name: str, word: Any) -> Any:
    if name == "mask_function":
        return masks.parse(word)
    if name == "score_function":
        return _SCORES[word]
    return tuple(word) if isinstance(word, list) else word


def _shapes(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (x.shape, str(x.dtype)) for name, x in found.items()}
