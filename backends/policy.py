"""Policies: which backend was the fastest for which problem, as measured on this device. ``auto`` follows one.

``attnsuite choose`` writes a policy from the records of runs (``suite/choosing.py``). This module reads the file and
holds the rule by which a measurement is about a problem:

- The device, the cores of a CPU and every version that the policy names are those of the present process.
- Measured and present problem agree in every field of the spec but these: batch, number of heads, lengths, and the
  value of a scale. They agree in query heads per KV head. They have equally many queries, or both as many as keys.
- The number of keys lies between the smallest and the largest that was measured for such problems.

Of several measurements the nearest in the number of keys decides, then the nearest in batch times heads. Batch and
heads are free, because every backend computes each head of each sequence on its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from attnsuite.sentences import not_accepted, quoted

from . import masks
from .devices import Target, usable_cores
from .spec import AttentionSpec

SCHEMA = 1
VARIABLE = "ATTNSUITE_POLICY"  # the environment variable that names a policy's file

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e100)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_ABSENT = dataclasses.MISSING
_FREE = frozenset({"batch", "query_length", "key_value_length", "num_heads", "num_kv_heads", "scale"})
# What every problem has comes first.
_FIELDS = {f.name: f.default for f in sorted(dataclasses.fields(AttentionSpec), key=lambda f: f.default is not _ABSENT)}
_AGAIN = "make it again on this machine with attnsuite choose"


class PolicyNotUsedWarning(UserWarning):
    """The policy was made on another device or with other versions, and ``auto`` does not follow it."""


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that a policy was made from. ``source`` is the digest of this package's source."""

    directory: str
    suite: str
    date: str
    source: str | None
    git_revision: str | None


class PolicyCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured problem and its fastest exact backend.

    ``problem`` holds the fields of the :class:`AttentionSpec` that are not at their defaults, a mask function by its
    words (:func:`masks.parse`). ``ratio`` is the backend's time relative to ``standard`` in the same rounds, with its
    95% ``interval``; None where there is none. ``memory``: bytes that the program takes (arguments, outputs,
    temporaries).
    """

    case: str
    run: str
    problem: dict[str, bool | int | float | str | tuple[int, ...] | None]
    backend: str
    ratio: _Positive | None
    interval: tuple[_Positive, _Positive] | None
    memory: _Bytes | None


class PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a policy's file. ``device`` is a :class:`Target` as text; ``cores`` are those of a CPU."""

    schema: Literal[1] = SCHEMA
    device: str
    cores: int | None
    versions: dict[str, str]
    runs: tuple[PolicyRun, ...]
    cases: tuple[PolicyCase, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A policy that was read: its name in sentences, its content, and the spec of each of its cases."""

    name: str
    content: PolicyFile
    specs: tuple[AttentionSpec, ...]


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
        text = _content(str(path), about.st_mtime_ns, about.st_size, about.st_ino)
    except (OSError, ValueError, TypeError) as error:  # a null byte in the path; no path at all
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"policy {str(path)!r} cannot be read ({reason}); give a file that attnsuite choose wrote."
        ) from error
    return _parse(text, str(path))


@functools.lru_cache(maxsize=8)
def _content(path: str, *_: int) -> bytes:
    """The bytes of a file; the other arguments say which state of it."""
    return Path(path).read_bytes()


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


def unusable(policy: Policy, target: Target) -> str:
    """Why the policy says nothing of ``target`` in this process; empty if it does."""
    made = policy.content
    if made.device != str(target):
        return f"policy {policy.name} is not used: it was made on {made.device}, and this is {target}; {_AGAIN}."
    if target.platform == "cpu" and made.cores not in (None, usable_cores()):
        return (
            f"policy {policy.name} is not used: it was made with {made.cores} cores of this processor, and this "
            f"process may use {usable_cores()}; {_AGAIN}."
        )
    for name, version in made.versions.items():
        if (found := _version(name)) != version:
            here = f"{found} is" if found else "none is"
            return f"policy {policy.name} is not used: it was made with {name} {version}, and {here} here; {_AGAIN}."
    return ""


@functools.lru_cache(maxsize=1024)
def decide(policy: Policy, spec: AttentionSpec) -> Decision:
    """What the policy says of ``spec``, by the rule of this module; the device is checked by :func:`unusable`."""
    traits = _traits(spec)
    alike = [pair for pair in zip(policy.content.cases, policy.specs, strict=True) if _traits(pair[1]) == traits]
    if not alike:
        return Decision(None, f"policy {policy.name} is not followed: {_unlike(policy, traits)}.")
    lengths = sorted(measured.key_value_length for _, measured in alike)
    if not lengths[0] <= spec.key_value_length <= lengths[-1]:
        return Decision(
            None,
            f"policy {policy.name} is not followed: {spec.key_value_length} keys are outside of what was measured for "
            f"such problems ({lengths[0]} to {lengths[-1]}).",
        )
    case, measured = min(alike, key=lambda pair: _distance(pair[1], spec))
    ratio = "" if case.ratio is None else f", {case.ratio:.3g} times the time of standard"
    message = f"case {case.case} of run {case.run} ({case.backend}{ratio})"
    return Decision(case.backend, f"policy {policy.name}: {message}; {_nearness(measured, spec)}.")


def problem_of(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a spec that are not at their defaults, for a :class:`PolicyCase`."""
    problem = {name: value for name, default in _FIELDS.items() if (value := getattr(spec, name)) != default}
    if spec.value_head_dim == spec.head_dim:
        del problem["value_head_dim"]
    if spec.mask_function is not None:
        problem["mask_function"] = str(spec.mask_function)
    return problem


@functools.lru_cache(maxsize=8)
def _parse(text: bytes, name: str) -> Policy:
    again = "make it with attnsuite choose"
    try:
        content = msgspec.json.decode(text, type=PolicyFile)
        return Policy(name, content, tuple(_spec(case) for case in content.cases))
    except msgspec.ValidationError as error:
        raise ValueError(f"{not_accepted(error, f'policy {name!r}')}; {again}.") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, and _spec's
        raise ValueError(f"policy {name!r} cannot be used: {str(error).rstrip('.')}; {again}.") from error


def _spec(case: PolicyCase) -> AttentionSpec:
    if unknown := sorted(set(case.problem) - set(_FIELDS)):
        raise ValueError(
            f"case {quoted(case.case)} has no field {quoted(unknown[0])}; its fields are {', '.join(_FIELDS)}"
        )
    if missing := [name for name, default in _FIELDS.items() if default is _ABSENT and name not in case.problem]:
        raise ValueError(f"case {quoted(case.case)} lacks the field {missing[0]}")
    try:
        words = case.problem.get("mask_function")
        mask = None if words is None else masks.parse(str(words))
        spec = AttentionSpec(**(case.problem | {"mask_function": mask}))  # pyright: ignore[reportArgumentType]  (checks)
    except (ValueError, TypeError) as error:
        raise ValueError(f"case {quoted(case.case)}: {error}") from error
    return spec


def _traits(spec: AttentionSpec) -> Mapping[str, Any]:
    """What a measured and a present problem have in common, by the name that a sentence gives it."""
    kept = {name: getattr(spec, name) for name in _FIELDS if name not in _FREE}
    kept["query heads per KV head"] = spec.group_size
    kept["scale"] = "its own" if "scale" in spec.features() else None
    square = spec.query_length == spec.key_value_length
    kept["query_length"] = "as many as keys" if square else spec.query_length
    return kept


def _unlike(policy: Policy, traits: Mapping[str, Any]) -> str:
    """The measured problem that differs in the fewest traits, and in which."""
    if not policy.specs:
        return "it has no case"
    others = [_traits(spec) for spec in policy.specs]
    apart = [[name for name in traits if other[name] != traits[name]] for other in others]
    nearest = min(range(len(apart)), key=lambda i: len(apart[i]))
    message = ", ".join(f"{name} ({others[nearest][name]}, here {traits[name]})" for name in apart[nearest])
    return f"no measured problem is like this one; case {policy.content.cases[nearest].case} differs in {message}"


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
