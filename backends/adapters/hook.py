"""What every adapter checks: the options of its caller, and the parameters of the hook that it replaces.

A hook is another library's function. A newer version may pass an argument that this package does not know, and
ignoring the argument could change the result. Therefore an adapter lists the parameters that it knows, and refuses a
hook that has others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

# Options that say what runs. What is computed is said by the library's own arguments.
OPTIONS = ("backend_options", "layer", "mode", "needs_grad", "on_unavailable", "policy")


def check_options(adapter: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that is not in ``OPTIONS``."""
    if strange := sorted(set(options) - set(OPTIONS)):
        raise ValueError(f"{adapter} has no option {', '.join(strange)}; its options are {', '.join(OPTIONS)}.")


def signature_of(hook: Callable[..., Any], known: Collection[str], *, name: str, read: str) -> inspect.Signature:
    """The signature of a hook whose parameters are all in ``known``.

    ``name`` is the hook's name and ``read`` the version that ``known`` was read in, both for the sentence. Raises
    ValueError for a parameter that is not known, or for one that takes any argument.
    """
    signature = inspect.signature(hook)
    strange = [
        str(parameter)
        for parameter in signature.parameters.values()
        if parameter.name not in known or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if strange:
        raise ValueError(
            f"{name} has the parameter {', '.join(strange)}, which this adapter does not know ({read} did not have "
            f"it), so it cannot say whether ignoring it changes the result; use {read}."
        )
    return signature
