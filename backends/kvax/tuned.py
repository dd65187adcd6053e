"""Block sizes from a file that ``attnsuite tune`` wrote, by device kind and spec; nothing is read unless asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from backends.contract import AttentionSpec
from backends.devices import Target

SCHEMA_VERSION = 1
OPTIONS = {"tuned": "path of a JSON file that `attnsuite tune` wrote, with an entry for the device and the spec"}


def tuned_options(path: object, spec: AttentionSpec, target: Target) -> dict[str, Any]:
    """The winner's options for this device kind and spec; the last entry that fits.

    Raises ValueError where the file cannot be read, is not such a file, or has no entry that fits.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"kvax: tuned={path!r} is not accepted; give the path of a file.")  # noqa: TRY004 (an option)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        schema, entries = data["schema"], list(data["entries"])
        wanted = ("kvax", target.kind, spec_fields(spec))
        found = [dict(x["options"]) for x in entries if (x["backend"], x["device"], x["spec"]) == wanted]
    except OSError as error:
        raise ValueError(f"kvax: tuned={str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"kvax: tuned={str(path)!r} is not a file that `attnsuite tune` wrote ({type(error).__name__}: {error})."
        ) from error
    if schema != SCHEMA_VERSION:
        raise ValueError(f"kvax: tuned={str(path)!r} has schema {schema!r}; this version reads {SCHEMA_VERSION}.")
    if not found:
        raise ValueError(
            f"kvax: tuned={str(path)!r} has no entry for {target} and this spec; add one with `attnsuite tune`, or "
            "leave the option out for the defaults."
        )
    return found[-1]


def spec_fields(spec: AttentionSpec) -> dict[str, Any]:
    """A spec as JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(spec)))
