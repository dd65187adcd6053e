"""Masks as functions of positions: named ones that compose, and what a block of such a mask holds.

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
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

EitherArray = Array | np.ndarray
MaskFunction = Callable[[Any, Any], Any]  # (query positions, key positions) -> whether the query may attend to the key


class Mask:
    """A mask function with a name: ``a & b`` shows what both show, ``a | b`` what either shows, ``~a`` the rest."""

    __slots__ = ("__weakref__",)  # jax.jit refers to a function so

    def __call__(self, query: Any, key: Any) -> Any:
        """Whether each query may attend to each key."""
        return self._shows(query, key)

    def _shows(self, query: Any, key: Any) -> Any:
        raise NotImplementedError

    def __and__(self, other: MaskFunction) -> Mask:
        return Combined(operator.and_, self, other)

    def __or__(self, other: MaskFunction) -> Mask:
        return Combined(operator.or_, self, other)

    def __invert__(self) -> Mask:
        return Inverted(self)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Combined(Mask):
    """``operation`` (``operator.and_`` or ``operator.or_``) of what two masks show."""

    operation: Callable[[Any, Any], Any]
    first: MaskFunction
    second: MaskFunction

    def _shows(self, query: Any, key: Any) -> Any:
        return self.operation(self.first(query, key), self.second(query, key))

    def __repr__(self) -> str:
        return f"({self.first} {'&' if self.operation is operator.and_ else '|'} {self.second})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Inverted(Mask):
    """What ``mask`` hides."""

    mask: MaskFunction

    def _shows(self, query: Any, key: Any) -> Any:
        return ~self.mask(query, key)

    def __repr__(self) -> str:
        return f"~{self.mask}"


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


@dataclasses.dataclass(frozen=True, slots=True)
class Window(Mask):
    """Keys at most ``left`` positions before the query and ``right`` behind it."""

    left: int
    right: int = 0

    def _shows(self, query: Any, key: Any) -> Any:
        return (key >= query - self.left) & (key <= query + self.right)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix(Mask):
    """The first ``length`` positions, for every query. ``Causal() | Prefix(n)`` is a prefix language model."""

    length: int

    def _shows(self, query: Any, key: Any) -> Any:
        return 0 * query + key < self.length  # one answer for each pair


@dataclasses.dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Documents of these ``lengths`` one after the other from position 0; a position behind the last sees nothing.

    For documents that are known when the program is compiled, and few. Segment ids are for those of a batch.
    """

    lengths: tuple[int, ...]

    def _shows(self, query: Any, key: Any) -> Any:
        ends = tuple(itertools.accumulate(self.lengths, initial=0))
        same = [(query >= a) & (query < b) & ((key >= a) & (key < b)) for a, b in itertools.pairwise(ends)]
        return functools.reduce(operator.or_, same)


@dataclasses.dataclass(frozen=True, slots=True)
class Tree(Mask):
    """A tree of tokens at positions 0, 1, ... behind a context at negative positions: a draft that is verified.

    ``parents[i]`` is the node before node i on its path, less than i; -1: the context's last token. A node sees the
    context, the nodes of its path, and itself (tree attention of SpecInfer, arXiv 2305.09781).
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or not all(-1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError(
                f"parents={self.parents} must hold for each node the index of an earlier one, or -1 for the context, "
                "such as (-1, 0, 0, 1)."
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

    def _shows(self, query: Any, key: Any) -> Any:
        return (query - key) % self.stride == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbourhood(Mask):
    """Patches of an image in rows of ``width``: those at most ``radius`` rows and ``radius`` columns away.

    As in neighbourhood attention (arXiv 2204.07143), but patches at an edge see fewer instead of a moved square.
    """

    width: int
    radius: int

    def _shows(self, query: Any, key: Any) -> Any:
        rows = abs(query // self.width - key // self.width)
        return (rows <= self.radius) & (abs(query % self.width - key % self.width) <= self.radius)


def check(function: Any) -> None:
    """Raise ValueError unless ``function`` is None or a mask function, which is tried on two queries and three keys."""
    if function is None:
        return
    if not callable(function) or not isinstance(function, Hashable):
        raise ValueError(  # noqa: TRY004 (one kind of error for every field of a spec)
            f"mask_function={function!r} must be a hashable function of query and key positions, such as "
            "masks.Causal() | masks.Prefix(16)."
        )
    found = _evaluated(function, np.arange(2, dtype=np.int32)[:, None], np.arange(3, dtype=np.int32)[None, :])
    if found.dtype != bool or found.shape != (2, 3):
        raise ValueError(
            f"mask_function={function!r} gives {found.dtype} {found.shape} for query positions (2, 1) and key "
            "positions (1, 3); it has to give bool (2, 3), one answer for each pair."
        )


def on_blocks(
    function: MaskFunction,
    query: Int[EitherArray, "batch q_pad"],
    key: Int[EitherArray, "batch kv_pad"],
    real_query: Bool[EitherArray, "#batch q_pad"],
    real_key: Bool[EitherArray, "#batch kv_pad"],
    block_q: int,
    block_kv: int,
) -> tuple[Bool[EitherArray, "batch rows columns"], Bool[EitherArray, "batch rows columns"]]:
    """Whether some, and whether every, real pair of each block is visible, by evaluating the function on each pair.

    The corners of a block do not tell: a dilated mask can show all four and hide the rest. Memory is that of one row of
    blocks at a time. The results are NumPy arrays if the arguments are.
    """

    def row(query: Any, real_query: Any, seen: Any) -> tuple[Any, Any]:
        real = real_query[:, :, None] & real_key[:, None, :]
        blocks = (query.shape[0], block_q, -1, block_kv)
        return (seen & real).reshape(blocks).any((1, 3)), (seen | ~real).reshape(blocks).all((1, 3))

    if all(isinstance(x, np.ndarray) for x in (query, key, real_query, real_key)):
        starts = range(0, query.shape[1], block_q)
        parts = [(query[:, i : i + block_q], real_query[:, i : i + block_q]) for i in starts]
        found = [row(q, real, _evaluated(function, q[:, :, None], key[:, None, :])) for q, real in parts]
        some, every = (np.stack(x, 1) for x in zip(*found, strict=True))
        return some, every
    by_row = [x.reshape(x.shape[0], -1, block_q).swapaxes(0, 1) for x in map(jnp.asarray, (query, real_query))]
    keys = jnp.asarray(key)[:, None, :]
    found = lax.map(lambda x: row(x[0], x[1], function(x[0][:, :, None], keys)), tuple(by_row))
    return found[0].swapaxes(0, 1), found[1].swapaxes(0, 1)


def _evaluated(function: MaskFunction, query: Any, key: Any) -> np.ndarray:
    with jax.ensure_compile_time_eval():  # a function of jax.numpy is traced otherwise, where a plan is made in jit
        return np.asarray(function(query, key))
