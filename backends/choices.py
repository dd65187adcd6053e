"""Policies: files of measured choices, which backend is the fastest for a problem and which options of a backend are.

``attnsuite choose`` and ``attnsuite tune`` write them; :data:`SHIPPED` is one. A choice of a backend is followed by
``auto``. It is about a problem by this rule:

- The device, the cores of a CPU and every version that its source names are those of the present process.
- Entry and present problem agree in every field of the spec but these: batch, number of heads, lengths, and the
  value of a scale. They agree in query heads per KV head. They have equally many queries, or both as many as keys.
- The number of keys lies between the smallest and the largest that was measured for such problems.

Of several the nearest in the number of keys decides, then the nearest in batch times heads. Batch and heads are free,
because every backend computes each head of each sequence on its own.

A choice of options is followed by ``auto``, if its source is of this process, and by a backend whose option ``tuned``
names the file. It is looked up by device, dtype, grouping, head dimension and length. Between two lengths the shorter
one's choice holds; between two head dimensions the wider one's, whose blocks also fit a narrower head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import structs

from attnsuite.sentences import not_accepted, quoted

from . import masks
from .contract import check_options
from .devices import Target, usable_cores
from .spec import AttentionSpec

SCHEMA = 2
VARIABLE = "ATTNSUITE_POLICY"  # the environment variable that names a policy's file
SHIPPED = Path(__file__).with_name("choices.json")

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e100)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Value = bool | int | float | str | tuple[int, ...] | None
_MISSING = dataclasses.MISSING
_FREE = frozenset({"batch", "query_length", "key_value_length", "num_heads", "num_kv_heads", "scale"})
# What every problem has comes first.
_FIELDS = {
    f.name: f.default for f in sorted(dataclasses.fields(AttentionSpec), key=lambda f: f.default is not _MISSING)
}
_SHORT_DTYPES = ("bfloat16", "float16")
_AGAIN = "make it again on this machine with attnsuite choose or attnsuite tune"
_MAKE = "make it with attnsuite choose (backends) or attnsuite tune (options)"


class PolicyNotUsedWarning(UserWarning):
    """The policy was made on another device or with other versions, and ``auto`` does not follow it."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What won for a measured problem: among exact backends ``backend``; or, where given, ``options`` of this backend.

    - ``problem``: the fields of the :class:`AttentionSpec` that are not at their defaults, a mask function by its words
      (:func:`masks.parse`).
    - ``only``: fields of the spec, or facts that the backend knows, with the value that a problem must have.
    - ``ratio``: time relative to ``standard``, or to the backend's default options, in the same rounds, with its 95%
      ``interval``; None where there is none.
    - ``memory``: bytes that the program takes (arguments, outputs, temporaries).
    - ``details``: what else is known, for readers; no code reads it.
    """

    case: str
    problem: dict[str, _Value]
    backend: str
    options: dict[str, _Value] | None = None
    only: dict[str, _Value] = {}
    ratio: _Positive | None = None
    interval: tuple[_Positive, _Positive] | None = None
    memory: _Bytes | None = None
    details: dict[str, Any] = {}


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Choices of one origin: a run's directory, a command, or a table that others measured (``imported``).

    ``device`` is a :class:`Target` as text; ``cores`` are those of a CPU; ``digest`` is that of this package's source.
    """

    name: str
    device: str
    cores: int | None = None
    versions: dict[str, str] = {}
    imported: bool = False
    suite: str = ""
    date: str = ""
    digest: str | None = None
    git_revision: str | None = None
    details: dict[str, Any] = {}
    choices: tuple[Choice, ...]


class _PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Literal[2]
    sources: tuple[Source, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A choice with its source, and the spec of its problem."""

    source: Source
    choice: Choice
    spec: AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A policy that was read: its name in sentences, and its choices."""

    name: str
    entries: tuple[Entry, ...]

    @staticmethod
    def of(name: str, sources: Iterable[Source]) -> Policy:
        """The policy of these sources. Raises ValueError for a choice whose problem is none."""
        return Policy(name, tuple(_entries(sources)))

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the choices are from."""
        return tuple({id(each.source): each.source for each in self.entries}.values())

    @property
    def backends(self) -> tuple[Entry, ...]:
        """The choices of a backend."""
        return tuple(each for each in self.entries if each.choice.options is None)


AnyPolicy = Policy | str | os.PathLike[str]  # read already, or the path of its file


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What a policy says of a problem: the backend, or None; and a sentence, which measurement or why none."""

    backend: str | None
    sentence: str


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """The policy in a file, which is read again when it changes, and not at every call.

    Raises ValueError, with a sentence, for a file that holds no policy.
    """
    try:
        about = Path(path).stat()
        policy = _read(str(path), about.st_mtime_ns, about.st_size, about.st_ino)
    except (OSError, ValueError, TypeError) as error:  # a null byte in the path; no path at all
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"policy {str(path)!r} cannot be read ({reason}); give a file of attnsuite choose or attnsuite tune."
        ) from error
    if isinstance(policy, str):
        raise ValueError(policy)  # noqa: TRY004 (it is a sentence about the file)
    return policy


@functools.lru_cache(maxsize=8)
def _read(name: str, *_: int) -> Policy | str:
    """The policy in a file, or what is wrong with it; the other arguments say which state of the file."""
    text = Path(name).read_bytes()
    try:
        return Policy.of(name, msgspec.json.decode(text, type=_PolicyFile).sources)
    except msgspec.ValidationError as error:
        return f"{not_accepted(error, f'policy {name!r}')}; {_MAKE}."
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, and _spec's
        place = re.search(r"\(byte (\d+)\)", str(error))
        line = f", line {1 + text.count(10, 0, int(place[1]))}" if place else ""  # 10: the end of a line
        return f"policy {name!r} cannot be used: {str(error).rstrip('.')}{line}; {_MAKE}."


def merged(sources: Iterable[Source]) -> tuple[Source, ...]:
    """The sources with each choice once: a later one replaces that of the same problem on the same device."""

    def key(source: Source, choice: Choice) -> bytes:
        tuned = None if choice.options is None else choice.backend
        return msgspec.json.encode((source.device, source.cores, tuned, choice.problem, choice.only), order="sorted")

    sources = tuple(sources)
    latest = {key(source, choice): choice for source in sources for choice in source.choices}
    left = {id(choice) for choice in latest.values()}
    deduplicated = (structs.replace(each, choices=tuple(c for c in each.choices if id(c) in left)) for each in sources)
    return tuple(source for source in deduplicated if source.choices)


def to_json(sources: Sequence[Source]) -> str:
    """The text of a policy's file, a line per choice."""

    def lines(source: Source) -> str:
        head = msgspec.json.encode(structs.replace(source, choices=())).decode().removesuffix("]}")
        return f"{head}\n" + ",\n".join(msgspec.json.encode(choice).decode() for choice in source.choices) + "\n]}"

    return f'{{"schema":{SCHEMA},"sources":[\n' + ",\n".join(map(lines, sources)) + "\n]}\n"


def policy_of(named: AnyPolicy | None) -> Policy | None:
    """The policy that is given, or the one that ``$ATTNSUITE_POLICY`` names; None without either.

    Raises ValueError as :func:`load_policy`.
    """
    if isinstance(named, Policy):
        return named
    if named is not None:
        return load_policy(named)
    path = os.environ.get(VARIABLE)
    try:
        return load_policy(path) if path else None
    except ValueError as error:
        raise ValueError(f"${VARIABLE}: {error}") from error


def usable(policy: Policy, target: Target) -> tuple[Policy, str]:
    """What of the policy holds for ``target`` in this process; and, if that chooses no backend, why it does not."""
    return _usable(policy, target, usable_cores() if target.platform == "cpu" else None)


@functools.lru_cache(maxsize=64)
def _usable(policy: Policy, target: Target, cores: int | None) -> tuple[Policy, str]:
    reasons = {id(each.source): _unlike_here(each.source, str(target), cores) for each in policy.entries}
    valid = Policy(policy.name, tuple(each for each in policy.entries if not reasons[id(each.source)]))
    wanted = policy.backends or policy.entries
    if not wanted or valid.backends or (valid.entries and not policy.backends):
        return valid, ""
    nearest = min((each.source for each in wanted), key=lambda source: source.device != str(target))
    return valid, f"policy {policy.name} is not used: it was made {reasons[id(nearest)]}; {_AGAIN}."


def _unlike_here(source: Source, device: str, cores: int | None) -> str:
    """What differs between a source and this process; empty if nothing does."""
    if source.device != device:
        return f"on {source.device}, and this is {device}"
    if cores is not None and source.cores not in (None, cores):
        return f"with {source.cores} cores of this processor, and this process may use {cores}"
    for name, version in source.versions.items():
        if (found := _version(name)) != version:
            return f"with {name} {version}, and {f'{found} is' if found else 'none is'} here"
    return ""


@functools.lru_cache(maxsize=1024)
def decide(policy: Policy, spec: AttentionSpec) -> Decision:
    """What the policy says of ``spec``, by the rule of this module; sources are checked by :func:`usable`."""
    traits = _traits(spec)
    alike = [each for each in policy.backends if _traits(each.spec) == traits]
    if not alike:
        return Decision(None, f"policy {policy.name} is not followed: {_unlike(policy, traits)}.")
    lengths = sorted(each.spec.key_value_length for each in alike)
    if not lengths[0] <= spec.key_value_length <= lengths[-1]:
        return Decision(
            None,
            f"policy {policy.name} is not followed: {spec.key_value_length} keys are outside of what was measured for "
            f"such problems ({lengths[0]} to {lengths[-1]}).",
        )
    nearest = min(alike, key=lambda each: _distance(each.spec, spec))
    choice = nearest.choice
    ratio = "" if choice.ratio is None else f", {choice.ratio:.3g} times the time of standard"
    message = f"case {choice.case} of run {nearest.source.name} ({choice.backend}{ratio})"
    return Decision(choice.backend, f"policy {policy.name}: {message}; {_nearness(nearest.spec, spec)}.")


def with_tuned(
    options: Mapping[str, Any],
    backend: str,
    accepted: Mapping[str, str],
    target: Target,
    spec: AttentionSpec,
    facts: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options over those of the policy that ``tuned`` names, and a sentence for each source that others measured.

    ``accepted`` are the backend's options. Raises ValueError if the file holds no policy, no options for such a problem
    on this device, or one that is not accepted.
    """
    options = dict(options)
    if (named := options.pop("tuned", None)) is None:
        return options, ()
    policy = named if isinstance(named, Policy) else load_policy(named)
    if not (found := tuned(policy, backend, target, spec, facts)):
        raise ValueError(
            f"policy {policy.name!r} has no options for {backend} on {target} in {spec.dtype} with "
            f"head_dim={_width(spec)}; add them with attnsuite tune, or leave tuned out for the defaults."
        )
    sources = dict.fromkeys(each.source.name for each in found if each.source.imported)
    notes = tuple(f"Block sizes follow figures that others measured: {source}." for source in sources)
    of_policy = {name: value for each in found for name, value in (each.choice.options or {}).items()}
    return check_options(f"policy {policy.name!r}: {backend}", of_policy, accepted) | options, notes


def tuned(
    policy: Policy, backend: str, target: Target, spec: AttentionSpec, facts: Mapping[str, Any] | None = None
) -> tuple[Entry, ...]:
    """The policy's options of a backend for ``spec``: of the forward pass, and of the backward if there is one.

    A CPU without choices of its own takes those of another CPU, or of a narrower head. Other devices do not: blocks for
    a narrow head may need more memory than a core has for a wide one. float16 without a choice of its own takes that of
    bfloat16, whose blocks have the same size.
    """
    passes = (False, True) if spec.needs_grad else (False,)
    found = (_tuned(policy, backend, target, spec, facts or {}, gradient) for gradient in passes)
    return tuple(each for each in found if each is not None)


def _tuned(
    policy: Policy, backend: str, target: Target, spec: AttentionSpec, facts: Mapping[str, Any], gradient: bool
) -> Entry | None:
    def alike(entry: Entry) -> bool:
        choice, other = entry.choice, entry.spec
        kinds = (choice.backend, entry.source.device.partition(":")[0], other.group_size > 1, other.needs_grad)
        return kinds == (backend, target.platform, spec.group_size > 1, gradient) and all(
            (facts[name] if name in facts else getattr(spec, name, ...)) == value for name, value in choice.only.items()
        )

    matching = [each for each in policy.entries if each.choice.options is not None and alike(each)]
    same_device = [each for each in matching if each.source.device.partition(":")[2] == target.kind]
    matching = same_device if same_device or target.platform != "cpu" else matching
    wide = [each for each in matching if _width(each.spec) >= _width(spec)]
    if wide or target.platform != "cpu":
        matching = [each for each in wide if _width(each.spec) == min(_width(other.spec) for other in wide)]
    for dtype in (spec.dtype, *(_SHORT_DTYPES if spec.dtype in _SHORT_DTYPES else ())):
        of_dtype = sorted((each for each in matching if each.spec.dtype == dtype), key=lambda each: _length(each.spec))
        if of_dtype:
            shorter = [each for each in of_dtype if _length(each.spec) <= _length(spec)]
            return shorter[-1] if shorter else of_dtype[0]
    return None


def lookup_key(spec: AttentionSpec) -> dict[str, Any]:
    """By what options are looked up for a problem, beside the backend, the device, and what a choice itself asks for.

    Of head dimensions the largest counts, of the two lengths the smaller.
    """
    return {
        "dtype": spec.dtype,
        "grouped": spec.group_size > 1,
        "head_dim": _width(spec),
        "gradient": spec.needs_grad,
        "length": _length(spec),
    }


def _width(spec: AttentionSpec) -> int:
    return max(spec.head_dim, spec.value_head_dim or 0)


def _length(spec: AttentionSpec) -> int:
    return min(spec.query_length, spec.key_value_length)


def problem_of(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a spec that are not at their defaults, for a :class:`Choice`."""
    problem = {name: value for name, default in _FIELDS.items() if (value := getattr(spec, name)) != default}
    if spec.value_head_dim == spec.head_dim:
        del problem["value_head_dim"]
    if spec.mask_function is not None:
        problem["mask_function"] = str(spec.mask_function)
    return problem


def _entries(sources: Iterable[Source]) -> Iterator[Entry]:
    for i, source in enumerate(sources):
        for k, choice in enumerate(source.choices):
            try:
                yield Entry(source, choice, _spec(choice.problem))
            except (ValueError, TypeError) as error:
                raise ValueError(f"sources[{i}].choices[{k}], case {quoted(choice.case)}: {error}") from error


def _spec(problem: Mapping[str, Any]) -> AttentionSpec:
    if unknown := sorted(set(problem) - set(_FIELDS)):
        raise ValueError(f"the problem has no field {quoted(unknown[0])}; its fields are {', '.join(_FIELDS)}")
    if missing := [name for name, default in _FIELDS.items() if default is _MISSING and name not in problem]:
        raise ValueError(f"the problem lacks the field {missing[0]}")
    description = problem.get("mask_function")
    return AttentionSpec(**{**problem, "mask_function": None if description is None else masks.parse(str(description))})


def _traits(spec: AttentionSpec) -> Mapping[str, Any]:
    """What a measured and a present problem have in common, by the name that a sentence gives it."""
    traits = {name: getattr(spec, name) for name in _FIELDS if name not in _FREE}
    traits["query heads per KV head"] = spec.group_size
    traits["scale"] = "its own" if "scale" in spec.features() else None
    square = spec.query_length == spec.key_value_length
    traits["query_length"] = "as many as keys" if square else spec.query_length
    return traits


def _unlike(policy: Policy, traits: Mapping[str, Any]) -> str:
    """The measured problem that differs in the fewest traits, and in which."""
    if not policy.backends:
        return "it chooses no backend"
    others = [_traits(each.spec) for each in policy.backends]
    apart = [[name for name in traits if other[name] != traits[name]] for other in others]
    nearest = min(range(len(apart)), key=lambda i: len(apart[i]))
    message = ", ".join(f"{name} ({others[nearest][name]}, here {traits[name]})" for name in apart[nearest])
    return f"no measured problem is like this one; case {policy.backends[nearest].choice.case} differs in {message}"


def _distance(measured: AttentionSpec, spec: AttentionSpec) -> tuple[float, float]:
    return (
        abs(math.log(measured.key_value_length / spec.key_value_length)),
        abs(math.log((measured.batch * measured.num_heads) / (spec.batch * spec.num_heads))),
    )


def _nearness(measured: AttentionSpec, spec: AttentionSpec) -> str:
    sizes = {
        "keys": (measured.key_value_length, spec.key_value_length),
        "sequences": (measured.batch, spec.batch),
        "heads": (measured.num_heads, spec.num_heads),
    }
    apart = [f"{there} {name} there, {here} here" for name, (there, here) in sizes.items() if there != here]
    return "; ".join(apart) or "the same sizes"


@functools.cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: an empty name
        return None
