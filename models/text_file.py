"""The text in a file, in the forms that people have: plain text, and JSON lines with the text in a field.

Plain text is read unchanged. WikiText's raw form is plain text: its headings (``= Title =``) stay, as in published
perplexities. The texts of JSON lines are joined by empty lines. A file of another form is refused, because its bytes
are no text.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

_OTHER_FORMS = {b"PAR1": "Parquet", b"\x1f\x8b": "compressed by gzip", b"PK\x03\x04": "a zip archive"}
_LINES = (".jsonl", ".ndjson")


@dataclasses.dataclass(frozen=True, slots=True)
class TextFile:
    """A file of text. ``field`` names the field of JSON lines that holds the text; None for plain text."""

    path: str
    field: str | None = None

    def __fspath__(self) -> str:
        """The path."""
        return self.path

    def __str__(self) -> str:
        """The path, and the field if there is one."""
        return self.path if self.field is None else f"{self.path} (field {self.field})"

    def resolved(self) -> TextFile:
        """The same file for a process in another directory."""
        return dataclasses.replace(self, path=str(Path(self.path).resolve()))

    def read(self) -> bytes:
        """The text as bytes. Raises OSError, and ValueError with a sentence for a file of another form."""
        if Path(self.path).is_char_device():  # /dev/zero has no end
            raise ValueError(f"text file {self.path!r} is a device; give a file of text.")
        data = Path(self.path).read_bytes()
        for magic, form in _OTHER_FORMS.items():
            if data.startswith(magic):
                raise ValueError(f"text file {self.path!r} is {form}; save it as plain text, or as JSON lines.")
        if self.field is not None:
            return _joined(data, self.path, self.field)
        if fields := _fields(data, only=not self.path.endswith(_LINES)):
            raise ValueError(
                f"text file {self.path!r} holds JSON lines with the fields {', '.join(fields)}; name the one that "
                f"holds the text (field={fields[-1]!r}, --text-field {fields[-1]})."
            )
        return data


def _fields(data: bytes, *, only: bool) -> list[str]:
    """The fields of the first line, if it is a JSON object; with ``only`` if the second line is one too."""
    lines = [line for line in data.split(b"\n", 64)[:64] if line.strip()][: 2 if only else 1]
    found = [_object(line) for line in lines]
    return list(found[0]) if found and all(isinstance(each, dict) for each in found) and found[0] else []


def _object(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None


def _joined(data: bytes, path: str, field: str) -> bytes:
    texts = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        found, where = _object(line), f"text file {path!r}, line {number}"
        if not isinstance(found, dict):
            raise ValueError(f"{where} is no JSON object; leave the field out for plain text.")  # noqa: TRY004
        if not isinstance(text := found.get(field), str):
            strings = ", ".join(name for name, value in found.items() if isinstance(value, str)) or "none"
            raise ValueError(f"{where} has no text in a field {field!r}; fields with text: {strings}.")  # noqa: TRY004
        texts.append(text)
    return "\n\n".join(texts).encode("utf-8", errors="replace")
