"""Prints the licences of every installed distribution as a table: `tox -e licences`, or `python docs/licences.py`.

What a distribution says of itself is taken: its licence expression, else its classifiers, else the first line of its
licence field. Nobody has read the licences themselves.
"""

import importlib.metadata

NOT_LISTED = {"attnsuite", "pip", "setuptools"}  # the package itself, and what an environment begins with


def licence(metadata: importlib.metadata.PackageMetadata) -> str:
    """The licence that a distribution names; ``not said`` if it names none."""
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [
        text.split(" :: ")[-1] for text in metadata.get_all("Classifier") or () if text.startswith("License")
    ]
    field = (metadata.get("License") or "not said").strip().splitlines()[0]
    return ", ".join(name for name in classifiers if name != "OSI Approved") or field


def table() -> str:
    """A row for each licence, with the distributions under it and their versions."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        if (name := distribution.metadata["Name"]) not in NOT_LISTED:
            found.setdefault(licence(distribution.metadata), []).append(f"{name} {distribution.version}")
    rows = [f"| {words} | {', '.join(sorted(names, key=str.lower))} |" for words, names in sorted(found.items())]
    return "\n".join(["| licence | distributions |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())  # noqa: T201 (its output)
