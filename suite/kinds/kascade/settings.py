"""Kascade's settings from the fields of a case."""

from __future__ import annotations

from typing import Any

from attnsuite.backends.kascade import Settings

from ...errors import InputError


def settings_of(case: Any, **others: Any) -> Settings:
    """The settings of a selection or stack case, without a schedule; ``others`` replace some. Raises InputError.

    Query tiles are as long as key tiles even where single keys are selected, so that all rows share one own region.
    """
    names = ("top_k", "min_keys", "tile_size", "granularity")
    fields: dict[str, Any] = {name: getattr(case, name) for name in names if hasattr(case, name)}
    fields["kernel"] = case.kernel or None
    try:
        return Settings(**{**fields, "query_tile": case.tile_size, **others})
    except ValueError as error:
        raise InputError(f"case {case.name}: {str(error).removeprefix('kascade: ')}") from error
