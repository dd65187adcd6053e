"""The language of masks: functions of positions that compose, the interval that a query sees, and their words.

A mask is added by one subclass of :class:`Mask`. Its ``_shows`` decides each pair; its :meth:`Mask.interval`, if it has
one, spares kernels a pass over the pairs; its name and fields are its words in suite files, records and policies.

A mask function takes query positions and key positions, two integer arrays that broadcast against each other, and
returns a bool array: True where the query may attend to the key. It is called with NumPy arrays, with traced ones and
inside of kernels, so that it may use operators only (``&``, ``|``, ``~``, comparisons, arithmetic). It is hashable, and
equal functions are equal masks. The idea is that of FlexAttention's ``mask_mod`` (PyTorch; arXiv 2412.05496).

>>> import numpy as np
>>> prefix_lm = Causal() | Prefix(2)
>>> prefix_lm(np.arange(4)[:, None], np.arange(4)[None, :]).astype(int)
array([[1, 1, 0, 0],
       [1, 1, 0, 0],
       [1, 1, 1, 0],
       [1, 1, 1, 1]])
>>> str(prefix_lm), parse("causal | prefix(2)") == prefix_lm
('causal | prefix(2)', True)
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .scores import check_function

MaskFunction = Callable[[Any, Any], Any]  # (query positions, key positions) -> whether the query may attend to the key


_LEAST, _MOST = -(2**31), 2**31 - 1


class Interval(NamedTuple):
    """The first and the last key position that each query may see, int32; None where there is no limit.

    ``exact``: it sees every key between, too. Neither end falls as the query's position rises, so that the ends of a
    block of queries are those of its first and its last.
    """

    first: Any = None
    last: Any = None
    exact: bool = False


class Mask:
    """A mask function with a name: ``a & b`` shows what both show, ``a | b`` what either shows, ``~a`` the rest."""

    __slots__ = ("__weakref__",)  # jax.jit refers to a function so

    def __call__(self, query: Any, key: Any) -> Any:
        """Whether each query may attend to each key."""
        return self._shows(query, key)

    def interval(self, query: Any) -> Interval:
        """The keys that queries at these positions (int32) may see; ``Interval()`` where only the pairs tell."""
        return Interval()

    def __str__(self) -> str:
        """The mask in words, which :func:`parse` reads: ``causal & window(255, 0)``; no dataclass has any."""
        if not dataclasses.is_dataclass(self):
            return repr(self)
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return _mask_name(type(self)) + (f"({', '.join(map(str, fields))})" if fields else "")

    def _shows(self, query: Any, key: Any) -> Any:
        raise NotImplementedError

    def __and__(self, other: MaskFunction) -> Mask:
        return Combined(operator.and_, self, other) if callable(other) else NotImplemented

    def __or__(self, other: MaskFunction) -> Mask:
        return Combined(operator.or_, self, other) if callable(other) else NotImplemented

    def __rand__(self, other: MaskFunction) -> Mask:
        return Combined(operator.and_, other, self) if callable(other) else NotImplemented

    def __ror__(self, other: MaskFunction) -> Mask:
        return Combined(operator.or_, other, self) if callable(other) else NotImplemented

    def __invert__(self) -> Mask:
        return Inverted(self)

    def __bool__(self) -> bool:
        raise TypeError(f"a mask is neither true nor false; join {self} by &, | and ~ for `and`, `or` and `not`.")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Combined(Mask):
    """``operation`` (``operator.and_`` or ``operator.or_``) of what two masks show."""

    operation: Callable[[Any, Any], Any]
    first: MaskFunction
    second: MaskFunction

    def _shows(self, query: Any, key: Any) -> Any:
        return self.operation(self.first(query, key), self.second(query, key))

    def interval(self, query: Any) -> Interval:
        """The part that both intervals share, or the least interval that holds both."""
        a, b = (x.interval(query) if isinstance(x, Mask) else Interval() for x in (self.first, self.second))
        xp = _module(query)
        if self.operation is operator.and_:
            return Interval(_either(xp.maximum, a[0], b[0]), _either(xp.minimum, a[1], b[1]), a.exact and b.exact)
        first = None if a.first is None or b.first is None else xp.minimum(a.first, b.first)
        last = None if a.last is None or b.last is None else xp.maximum(a.last, b.last)
        # Two intervals leave no gap where both have no beginning, or no end.
        alike = (a.first is None and b.first is None) or (a.last is None and b.last is None)
        return Interval(first, last, a.exact and b.exact and alike)

    def __str__(self) -> str:
        """``a & b`` or ``a | b``, with brackets where Python would read another mask without them."""
        first, second = (f"({x})" if isinstance(x, Combined) else str(x) for x in (self.first, self.second))
        if isinstance(self.first, Combined) and self.first.operation is self.operation:
            first = str(self.first)
        return f"{first} {'&' if self.operation is operator.and_ else '|'} {second}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Inverted(Mask):
    """What ``mask`` hides."""

    mask: MaskFunction

    def _shows(self, query: Any, key: Any) -> Any:
        return ~self.mask(query, key)

    def __str__(self) -> str:
        """``~mask``."""
        return f"~({self.mask})" if isinstance(self.mask, Combined) else f"~{self.mask}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, slots=True)
class Where(Mask):
    """A function of the user's, so that it composes. A function is equal to itself only: make it once, not per call."""

    function: MaskFunction

    def _shows(self, query: Any, key: Any) -> Any:
        return self.function(query, key)


@dataclasses.dataclass(frozen=True, slots=True)
class Causal(Mask):
    """Keys up to the query's position."""

    def _shows(self, query: Any, key: Any) -> Any:
        return key <= query

    def interval(self, query: Any) -> Interval:
        """From the first key to the query's own."""
        return Interval(None, query, exact=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Window(Mask):
    """Keys at most ``left`` positions before the query and ``right`` behind it."""

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        _require_at_least(-_MOST, left=self.left, right=self.right)

    def _shows(self, query: Any, key: Any) -> Any:
        return (key >= _moved(query, -self.left)) & (key <= _moved(query, self.right))

    def interval(self, query: Any) -> Interval:
        """The window itself."""
        return Interval(_moved(query, -self.left), _moved(query, self.right), exact=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk(Mask):
    """Keys of the query's own chunk of ``size`` positions, counted from 0 (Llama 4's chunked attention)."""

    size: int

    def __post_init__(self) -> None:
        _require_at_least(1, size=self.size)

    def _shows(self, query: Any, key: Any) -> Any:
        return query // self.size == key // self.size

    def interval(self, query: Any) -> Interval:
        """The chunk itself."""
        size = np.int32(min(self.size, _MOST))
        within = query % size  # from 0, also for negative positions
        return Interval(_moved(query, -within), _moved(query, size - 1 - within), exact=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix(Mask):
    """The first ``length`` positions, for every query. ``Causal() | Prefix(n)`` is a prefix language model."""

    length: int

    def __post_init__(self) -> None:
        _require_at_least(0, length=self.length)

    def _shows(self, query: Any, key: Any) -> Any:
        return 0 * query + key < self.length  # one answer for each pair

    def interval(self, query: Any) -> Interval:
        """The prefix itself."""
        return Interval(None, query * 0 + np.int32(self.length - 1), exact=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Documents of these ``lengths`` one after the other from position 0; a position behind the last sees nothing.

    For documents that are known when the program is compiled, and few. Segment ids are for those of a batch.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, tuple) or not self.lengths:
            raise ValueError(f"lengths={self.lengths!r} must be a tuple with the length of each document.")
        for length in self.lengths:
            _require_at_least(1, length=length)

    def _shows(self, query: Any, key: Any) -> Any:
        ends = tuple(itertools.accumulate(self.lengths, initial=0))
        same = [(query >= a) & (query < b) & ((key >= a) & (key < b)) for a, b in itertools.pairwise(ends)]
        return functools.reduce(operator.or_, same)

    def interval(self, query: Any) -> Interval:
        """The query's document; nothing before the first and behind the last."""
        starts = itertools.accumulate(self.lengths[:-1], initial=0)
        xp, first, last = _module(query), query * 0, query * 0 - 1
        for start, length in zip(starts, self.lengths, strict=True):
            first = xp.where(query >= start + length, first + length, first)
            last = xp.where(query >= start, last + length, last)
        return Interval(first, last, exact=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Tree(Mask):
    """A tree of tokens at positions 0, 1, ... behind a context at negative positions: a draft that is verified.

    ``parents[i]`` is the node before node i on its path, less than i; -1: the context's last token. A node sees the
    context, the nodes of its path, and itself (tree attention of SpecInfer, arXiv 2305.09781).
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = isinstance(self.parents, tuple) and all(isinstance(x, int | np.integer) for x in self.parents)
        if not whole or not self.parents or not all(-1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError(
                f"parents={self.parents} must hold for each node the index of an earlier one, or -1 for the context, "
                "as a tuple such as (-1, 0, 0, 1)."
            )

    @property
    def depths(self) -> tuple[int, ...]:
        """How many nodes of its path lie before each node."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return tuple(found)

    def _shows(self, query: Any, key: Any) -> Any:
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), node))
        pairs = [(query == path[-1]) & (key == node) for path in paths for node in path]
        return functools.reduce(operator.or_, pairs) | (key < 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Dilated(Mask):
    """Keys a multiple of ``stride`` positions away. ``Window(w * stride) & Dilated(stride)`` is a dilated window."""

    stride: int

    def __post_init__(self) -> None:
        _require_at_least(1, stride=self.stride)

    def _shows(self, query: Any, key: Any) -> Any:
        return (query - key) % self.stride == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbourhood(Mask):
    """Patches of an image in rows of ``width``: those at most ``radius`` rows and ``radius`` columns away.

    As in neighbourhood attention (arXiv 2204.07143), but patches at an edge see fewer instead of a moved square.
    """

    width: int
    radius: int

    def __post_init__(self) -> None:
        _require_at_least(1, width=self.width)
        _require_at_least(0, radius=self.radius)

    def _shows(self, query: Any, key: Any) -> Any:
        rows = abs(query // self.width - key // self.width)
        return (rows <= self.radius) & (abs(query % self.width - key % self.width) <= self.radius)


def parse(text: str) -> Mask:
    """The mask that this description names: ``causal & window(255)``, ``causal | prefix(16)``, ``~dilated(2)``.

    A word is the name of a subclass of :class:`Mask` in lower case, its numbers are the fields in their order; ``&``,
    ``|``, ``~`` and brackets are Python's. Raises ValueError, with the names that there are.
    """
    try:
        return _parsed(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise ValueError(
            f"mask = {text!r} is not accepted ({error}); it is made of {', '.join(sorted(_named_masks()))}, with whole "
            "numbers in brackets, joined by &, | and ~, such as 'causal & window(255)'."
        ) from error


def description_of(function: MaskFunction | None) -> str | None:
    """The description that :func:`parse` reads as this function; None for one that has none (a user's function)."""
    try:
        return text if isinstance(function, Mask) and parse(text := str(function)) == function else None
    except ValueError:
        return None


def _parsed(node: ast.expr) -> Mask:
    match node:
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as operation, right):
            join = operator.and_ if isinstance(operation, ast.BitAnd) else operator.or_
            return Combined(join, _parsed(left), _parsed(right))
        case ast.UnaryOp(ast.Invert(), operand):
            return Inverted(_parsed(operand))
        case ast.Name(name):
            return _named(name)()
        case ast.Call(ast.Name(name), arguments, []):
            numbers = [ast.literal_eval(argument) for argument in arguments]
            if not all(type(x) is int for n in numbers for x in (n if isinstance(n, tuple) else (n,))):
                raise ValueError(f"{ast.unparse(node)} has something else than whole numbers")
            return _named(name)(*numbers)
    raise ValueError(f"{ast.unparse(node)} is no mask")


def _named(name: str) -> Callable[..., Mask]:
    if name not in (named := _named_masks()):
        raise ValueError(f"{name} is no mask")
    return named[name]


def _named_masks() -> dict[str, type[Mask]]:
    """The masks that can be named, a reader's own among them: each subclass but those that hold functions.

    A dataclass with slots is the second class of its name: the later one counts.
    """

    def below(kind: type[Mask]) -> Iterator[type[Mask]]:
        for sub in kind.__subclasses__():
            yield from (sub, *below(sub))

    with_functions = {Combined.__name__, Inverted.__name__, Where.__name__}
    return {_mask_name(kind): kind for kind in below(Mask) if kind.__name__ not in with_functions}


def _mask_name(kind: type[Mask]) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def _require_at_least(least: int, **numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int | np.integer) or not least <= number <= _MOST:
            raise ValueError(f"{name}={number!r} must be an integer from {least} to 2**31 - 1.")


def _either(choose: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else choose(a, b)


def _module(x: Any) -> Any:
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def _moved(position: Any, by: Any) -> Any:
    """``position + by`` in int32, held at its ends."""
    xp = _module(position)
    by = xp.asarray(by, xp.int32)
    return (xp.clip(position, _LEAST - xp.minimum(by, 0), _MOST - xp.maximum(by, 0)) + by).astype(xp.int32)


def check(function: Any) -> None:
    """Raise ValueError unless ``function`` is None or a mask function, which is tried on two queries and three keys."""
    expected = "query and key positions, such as masks.Causal() | masks.Prefix(16)"
    check_function("mask_function", function, expected, _fault)


@functools.lru_cache(maxsize=64)
def _fault(function: MaskFunction) -> str:
    """Why a function is no mask function; empty if it is one. It is called with numbers, and traced as in a kernel."""
    query, key = np.arange(2, dtype=np.int32)[:, None], np.arange(3, dtype=np.int32)[None, :]
    try:
        found = evaluated(function, query, key)
        jax.eval_shape(function, query, key)
    except jax.errors.TracerArrayConversionError:
        return (
            "depends on a traced array, or calls NumPy; numbers of a batch go into mask, segment ids, positions or "
            "lengths, and functions and tables have to be those of jax.numpy."
        )
    except Exception as error:  # noqa: BLE001 (whatever the function raises)
        return (
            f"raises {type(error).__name__} ({error}) for query positions (2, 1) and key positions (1, 3); it takes "
            "these two integer arrays, for every batch entry and head, and &, | and ~ for `and`, `or`, `not`."
        )
    if found.dtype == bool and found.shape == (2, 3):
        return ""
    return (
        f"gives {found.dtype} {found.shape} for query positions (2, 1) and key positions (1, 3); it has to give bool "
        "(2, 3), one answer for each pair."
    )


def evaluated(function: MaskFunction, query: Any, key: Any) -> np.ndarray:
    """What a mask function says of positions that are known, inside of ``jit`` too."""
    with jax.ensure_compile_time_eval():  # a function of jax.numpy is traced otherwise, where a plan is made in jit
        return np.asarray(function(query, key))
