"""A bundle: a run as one file that can be sent, and that shows whether it was edited.

``attnsuite report DIR --bundle FILE.zip`` packs, ``attnsuite report FILE.zip`` verifies. A bundle is a zip with four
files: ``bundle.json`` (the versions, the digest of the source, a hash of each file and a chain of hashes over the
records), ``run.json``, ``records.jsonl`` and ``log.txt`` (a line per record, made from the records). A run of ``--suite
device`` has two more, what its backends were held to. Paths, the user's and the machine's name are replaced before
anything is hashed.

The hashes find what was edited, added, removed or reordered, and what was damaged; :func:`contradictions` finds records
that contradict themselves: what was judged is restated, and times are held to limits. Neither is a signature: a record
that somebody invents whole, with the hashes made anew, passes if it agrees with itself.

Nothing is extracted: the files are read into memory, within limits, and only those of the names above.
"""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import io
import json
import lzma
import math
import os
import re
import socket
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from attnsuite.backends import oracle

from . import files, typed
from .errors import InputError, as_input
from .kinds import kind_of
from .measure import plausible
from .measure.tensor_errors import pass_of
from .record import Record, RecordError, TensorError
from .reportable import shows_speed, times_of
from .statistics import median
from .store import CONFORMANCE, MANIFEST, RECORDS, parse_manifest, parse_records, read_manifest, read_record
from .summary import record_line
from .typed import Count
from .user_function import is_reference

SCHEMA = 1
HEAD, LOG = "bundle.json", "log.txt"
_PARTS = ("", f"{CONFORMANCE}/")  # folders of a run; the second one may be missing
_MEMBERS = frozenset({HEAD, LOG, *(part + name for part in _PARTS for name in (MANIFEST, RECORDS))})
_NEEDED = frozenset({HEAD, LOG, MANIFEST, RECORDS})
_LARGEST_FILE, _LARGEST = 2**26, 2**28  # bytes: of the zip, and of what it holds
_TIME = (1980, 1, 1, 0, 0, 0)  # of every member, so that one run has one bundle
_PATH = re.compile(r"(?<![\w.)\]</])(?!/(?:proc|sys|dev)/)(?:~|\.\.?)?(?:/[\w.+@~=-]+)+/?")
# bfloat16 operations per second without sparsity, as the vendors publish them; per device as JAX counts devices.
PEAKS = {
    "v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 1153.5e12, "a100": 312e12, "h100": 989.4e12,
    "h200": 989.4e12, "b200": 2250e12,
}  # fmt: skip
_ABOVE_PUBLISHED = 1.05
_FREE = ("error", "reasons", "notes", "flags")  # fields of a record in which a user's or a machine's name may occur


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """``bundle.json``. ``chain`` is the last of the hashes of the records, each of which covers those before it."""

    schema: Count
    versions: dict[str, str]
    source: str
    records: Count
    chain: str
    sha256: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle: the texts of the run's files, and the records of the run itself."""

    texts: dict[str, str]
    records: tuple[Record, ...]

    def write(self, directory: Path) -> None:
        """Write what belongs to the run. Raises InputError if the directory has records."""
        if (directory / RECORDS).exists():
            raise InputError(f"{directory} already has records; choose another --out.")
        files.check_directory(directory)
        for name in sorted(self.texts.keys() - {HEAD, LOG}):
            files.check_directory((directory / name).parent)
            files.write_text(directory / name, self.texts[name])


def pack(directory: Path, out: Path) -> int:
    """Write the run in ``directory`` as the bundle ``out``; returns the number of records.

    Raises InputError for a run that cannot be read, that would not be taken back, or that mixes versions.
    """
    names = _Names.here()
    texts: dict[str, str] = {}
    for part in _PARTS:
        if not part or (directory / part / RECORDS).exists():
            texts[part + MANIFEST], texts[part + RECORDS] = _cleaned(directory / part, names)
    lines, cleaned = _lines(texts), _records(_lines(texts))
    texts[LOG] = _log(cleaned)
    sources = {record.environment.get("source", "") for record in cleaned}
    if len(sources) != 1:
        raise InputError(f"{directory} has records of {len(sources)} versions of the source; a bundle is of one.")
    head = Head(
        schema=SCHEMA,
        versions=dict(cleaned[0].environment.get("versions", {})),
        source=sources.pop(),
        records=len(lines),
        chain=_chain(lines),
        sha256={name: _sha256(text) for name, text in texts.items()},
    )
    texts = {HEAD: json.dumps(dataclasses.asdict(head), indent=1, sort_keys=True) + "\n"} | texts
    for name, text in texts.items():
        if (left := names.left_in(text)) is not None:
            raise InputError(
                f"{directory}: {name} would still hold {left!r}, which names you or your machine; rename the file, "
                "case or directory in whose name it stands, and run it again."
            )
    with as_input(f"{directory} would be refused as a bundle: "):
        _whole(cleaned, head)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), text, zipfile.ZIP_DEFLATED)
    files.write_bytes(out, content.getvalue())
    return len(lines)


def _cleaned(directory: Path, names: _Names) -> tuple[str, str]:
    """The texts of ``run.json`` and ``records.jsonl``, in which nobody is named. Raises InputError."""
    records, _, warning = parse_records(directory / RECORDS)
    if warning or not records:
        raise InputError(
            f"{directory} has no whole run: {warning or 'there is no record.'} End it with --resume first."
        )
    manifest = dataclasses.asdict(read_manifest(directory))
    if manifest.get("file"):
        manifest["file"] = PurePath(manifest["file"]).name
    if manifest.get("text"):
        manifest["text"]["path"] = PurePath(manifest["text"]["path"]).name
    functions = [name for name in manifest["backends"] if is_reference(name)]

    def cleaned(text: str) -> Any:
        for name in sorted(functions, key=len, reverse=True):  # of a function of the user's its file and name stay
            text = text.replace(json.dumps(name)[1:-1], json.dumps(PurePath(name).name)[1:-1])
        return names.without(json.loads(text))

    lines = (json.dumps(cleaned(record.to_json())) + "\n" for record in records)
    return json.dumps(cleaned(json.dumps(manifest)), indent=1, sort_keys=True) + "\n", "".join(lines)


def _lines(texts: dict[str, str]) -> list[str]:
    """The lines of all records. Raises ValueError for a file that does not end in a whole line."""
    found = []
    for name in (part + RECORDS for part in _PARTS if part + RECORDS in texts):
        *lines, tail = texts[name].split("\n")
        if tail or not lines:
            raise ValueError(f"its {name} is cut off")
        found += lines
    return found


def verified(path: Path) -> Bundle:
    """The bundle in this file. Raises InputError, with the reason, for one that is no bundle or that was edited."""
    try:
        texts = _members(path)
        head, lines = _hashed(texts)
        records = _records(lines)
        _whole(records, head)
        for name in (part + MANIFEST for part in _PARTS if part + MANIFEST in texts):
            with as_input(f"its {name} is damaged or of another version: "):
                parse_manifest(typed.parse_json(texts[name].encode()))
    except RecordError as error:
        raise InputError(f"{path} is refused: a line is no record ({error}).") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, ValueError) as error:
        raise InputError(f"{path} is refused: {str(error).rstrip('.')}.") from error
    except (zlib.error, lzma.LZMAError, RuntimeError) as error:
        raise InputError(f"{path} is refused: it is damaged ({error}).") from error
    return Bundle(texts, records[: texts[RECORDS].count("\n")])


def _hashed(texts: dict[str, str]) -> tuple[Head, list[str]]:
    """The head and the lines of the records, after their hashes were compared. Raises ValueError."""
    try:
        head = typed.convert(typed.parse_json(texts[HEAD].encode()), Head)
    except ValueError as error:
        raise ValueError(f"its {HEAD} is damaged ({error})") from error
    if head.schema != SCHEMA:
        raise ValueError(f"it has schema {head.schema}, and this version reads {SCHEMA}")
    lines = _lines(texts)
    if len(lines) != head.records:
        raise ValueError(f"it says {head.records} records and has {len(lines)}; some were added or removed")
    if _chain(lines) != head.chain:
        raise ValueError("a record was edited, or the records were reordered")
    digests = {name: _sha256(text) for name, text in texts.items() if name != HEAD}
    if digests != head.sha256:
        edited = [name for name in digests if digests[name] != head.sha256.get(name)]
        raise ValueError(f"its {', '.join(edited) or HEAD} was edited")
    return head, lines


def _whole(records: Sequence[Record], head: Head) -> None:
    """Raises ValueError where the records contradict each other, the head or themselves."""
    if len({record.key for record in records}) != len(records):
        raise ValueError("two records have one key (of a function's file the folder is left out; rename one of two).")
    for record in records:
        found = record.environment.get("source"), dict(record.environment.get("versions", {}))
        if found != (head.source, head.versions):
            raise ValueError(f"{record.key} is of other versions than the bundle")
    if (why := next(contradictions(records), None)) is not None:
        raise ValueError(why)


def _members(path: Path) -> dict[str, str]:
    """The texts of the four files. Raises ValueError for anything else that a zip can hold."""
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"it has more than {_LARGEST_FILE >> 20} MiB")
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        named = [info.filename for info in infos]
        if len(set(named)) != len(named) or not _NEEDED <= set(named) <= _MEMBERS:
            found = ", ".join(repr(name[:60]) for name in named[:7])
            raise ValueError(f"it holds {found or 'nothing'}; a bundle holds {', '.join(sorted(_NEEDED))}")
        left, texts = _LARGEST, {}
        for info in infos:
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or info.flag_bits & 1:
                raise ValueError(f"its {info.filename} is no plain file")
            with archive.open(info) as member:  # what the zip says of sizes is not believed
                data = member.read(left + 1)
            if len(data) > left:
                raise ValueError(f"it holds more than {_LARGEST >> 20} MiB")
            left -= len(data)
            with as_input(f"its {info.filename} is not UTF-8: "):
                texts[info.filename] = data.decode()
    return texts


def _records(lines: Sequence[str]) -> tuple[Record, ...]:
    """Raises RecordError."""
    return tuple(read_record(line.encode()) for line in lines)


def _chain(lines: Sequence[str]) -> str:
    digest = ""
    for line in lines:
        digest = hashlib.sha256(f"{digest}\n{line}".encode()).hexdigest()
    return digest


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _log(records: Sequence[Record]) -> str:
    lines = (f"{record.started} {record.wall_seconds or 0:9.2f} s  {record_line(record).plain}\n" for record in records)
    return "".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    """What names the user or the machine."""

    home: str
    user: str
    host: str

    @staticmethod
    def here() -> _Names:
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # no such user in a container
            user = ""
        home = os.path.expanduser("~")  # noqa: PTH111 (Path.home raises where there is none)
        return _Names(home, user, socket.gethostname())

    def without(self, value: Any, *, free: bool = False) -> Any:
        """``value`` as JSON has it, without paths; in free text also without the two names. A node gets no name."""
        if isinstance(value, dict):
            inner = {
                self._text(name, free=False): self.without(x, free=free or name in _FREE) for name, x in value.items()
            }
            return {name: x for name, x in inner.items() if name != "node"}
        if isinstance(value, list):
            return [self.without(x, free=free) for x in value]
        return self._text(value, free=free) if isinstance(value, str) else value

    def _text(self, text: str, *, free: bool) -> str:
        text = _PATH.sub("<path>", text)
        text = text.replace(self.home, "<path>") if len(self.home) > 1 else text
        for name, instead in ((self.host, "<host>"), (self.user, "<user>")) if free else ():
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text) if name else text
        return text

    def left_in(self, text: str) -> str | None:
        """A home directory or a machine's name that is still there."""
        names = (name for name in (self.home, self.host) if len(name) > 5)
        return next((name for name in names if name in text), None)


def contradictions(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for each contradiction.

    - An exact cell that is ``wrong`` has a tensor outside its bound, unless it was held to the contract, which finds
      faults of other kinds too. (One that is ``ok`` with such a tensor is no record.)
    - The bound of an attention call follows from the standard backend's error (``backends/oracle.py``).
    - The samples, all their calls counted, fit into the wall time of the cell.
    - No exact cell is faster than its machine could be (``measure/plausible.py``), nor than the published peak of a
      known device.
    """
    for record in records:
        for why in (*_judged(record), *_timed(record)):
            yield f"{record.key}: {why}."


def _judged(record: Record) -> Iterator[str]:
    for name, error in record.accuracy.items():
        if kind_of(record.kind).is_call and not _follows(record, name, error):
            yield f"the bound of {name} does not follow from the standard backend's error"
    if record.exact and record.accuracy:
        right = all(error.passed for error in record.accuracy.values())
        if record.status == "wrong" and right and record.facts is None:
            yield "it is wrong with every tensor inside its bound"


def _follows(record: Record, name: str, error: TensorError) -> bool:
    dtype = str(record.problem.get("dtype"))
    if dtype not in oracle.EPSILON:
        return True
    bounds = [oracle.allowed_error(standard, dtype, pass_of(name)) for standard in (error.standard_error, None)]
    return any(math.isclose(error.allowed, bound, rel_tol=1e-6) for bound in bounds)


def _timed(record: Record) -> Iterator[str]:
    if not all(sample > 0 for sample in (*record.samples, *record.device_seconds, *record.cached_seconds)):
        yield "a time is not above zero"
    seconds = sum(record.samples) * record.environment.get("calls_per_sample", 1)
    seconds += sum(record.device_seconds) + sum(record.cached_seconds)
    if record.wall_seconds is not None and seconds > record.wall_seconds:
        yield f"its samples take {seconds:.3g} s and the whole cell {record.wall_seconds:.3g} s"
    if not (record.exact and record.flops and shows_speed(record)):
        return
    times, machine = times_of(record), record.environment.get("machine", {})
    if (why := plausible.floor(times, record, str(record.problem.get("dtype")), machine)) is not None:
        yield why.rstrip(".")
    rate, peak = record.flops / median(times).value, PEAKS.get(record.target.partition(":")[2])
    if peak is not None and rate > _ABOVE_PUBLISHED * peak * record.devices:
        yield f"it computes {rate / peak:.3g} times as fast as the device's published peak"
