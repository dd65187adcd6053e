"""No command speaks to a network, and none writes outside its directory, the caches and TMPDIR.

``strace`` sees the system calls of a command and of each process that it starts, in a network namespace without
interfaces. A command that takes long has the mark sandbox: ``tox -e sandbox`` runs it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command import TINY, known_machine

ALONE = ("unshare", "--map-root-user", "--net")
FILES = (
    *("open", "openat", "openat2", "creat", "mkdir", "mkdirat", "mknod", "mknodat", "link", "linkat", "symlink"),
    *("symlinkat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "truncate", "chmod", "fchmodat"),
)
WRITING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND")
DEVICES = ("/dev/null", "/dev/tty", "/proc/self/")  # the last: names of a process's own threads


@dataclasses.dataclass(frozen=True)
class Traced:
    """How a command ended, the paths that it and its processes wrote to or tried to, and its calls on networks."""

    code: int
    said: str
    wrote: frozenset[str]
    network: tuple[str, ...]

    def outside(self, *allowed: Path) -> set[str]:
        """Paths that are under none of the allowed folders."""
        inside = (*DEVICES, *(f"{folder}/" for folder in allowed))
        return {path for path in self.wrote if not f"{path}/".startswith(inside) and "/__pycache__" not in path}


def paths_written(line: str, folder: Path) -> list[str]:
    """The paths that a line of strace (with -y) writes to; relative ones of no other folder are in ``folder``."""
    call = re.match(r"\d+ +(\w+)\(", line)
    if call is None or call[1] not in FILES or (call[1].startswith("open") and not WRITING.search(line)):
        return []
    named = re.findall(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, |[(, ])"((?:[^"\\]|\\.)*)"', line)
    made = named[-1:] if "link" in call[1] and not call[1].startswith("unlink") else named  # what it leads to is read
    return [os.path.normpath(Path(base or folder, path)) for base, path in made]


def network_calls(line: str) -> bool:
    """Whether a call names an address of the internet's families: libtpu opens a socket, and sends nothing by it."""
    return bool(re.search(r"(connect|bind|sendto|sendmsg|sendmmsg)\(.*sa_family=AF_INET", line))


def trace(command: list[str], folder: Path, variables: dict[str, str | None]) -> Traced:
    """Run ``command`` in ``folder`` without a network; a variable that is None is unset."""
    log = folder / "strace.log"
    kept = {name: value for name, value in (os.environ | variables).items() if value is not None}
    strace = ["strace", "-f", "-qq", "-y", "--seccomp-bpf", "-s", "4096", "-o", str(log)]
    strace += ["-e", f"trace=%network,{','.join(FILES)}"]
    done = subprocess.run(
        [*ALONE, *strace, *command], capture_output=True, text=True, env=kept, cwd=folder, timeout=200, check=False
    )
    lines = log.read_text(errors="replace").splitlines()
    wrote = frozenset(path for line in lines for path in paths_written(line, folder))
    return Traced(done.returncode, done.stdout + done.stderr, wrote - {str(log)}, tuple(filter(network_calls, lines)))


@pytest.fixture(scope="session", autouse=True)
def _can_trace():
    if shutil.which("strace") is None or shutil.which("unshare") is None:
        pytest.skip("strace and unshare are needed: apt-get install strace util-linux")
    possible = subprocess.run([*ALONE, "true"], capture_output=True, text=True, check=False)
    if possible.returncode:
        pytest.skip(f"this machine allows no user namespaces: {possible.stderr.strip()}")


@dataclasses.dataclass(frozen=True)
class Box:
    """A home and a temporary folder of the test's own, and what runs in them."""

    root: Path

    def python(self, *words: object, **variables: str | None) -> Traced:
        own = {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"), "XDG_CACHE_HOME": None,
               "JAX_COMPILATION_CACHE_DIR": None, "JAX_PLATFORMS": "cpu",
               "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # fmt: skip
        return trace([sys.executable, "-P", *map(str, words)], self.root, own | variables)

    def attnsuite(self, *words: object, **variables: str | None) -> Traced:
        return self.python("-m", "attnsuite", *words, **variables)

    def strays(self, traced: Traced, *outputs: Path) -> set[str]:
        """Paths outside ``outputs``, the caches of the home, and TMPDIR."""
        return traced.outside(*outputs, self.root / "home" / ".cache", self.root / "tmp")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    root = tmp_path_factory.mktemp("box")
    for name in ("home", "tmp"):
        (root / name).mkdir()
    return Box(root)


def run_words(box: Box, case: str, out: Path) -> tuple[object, ...]:
    suite = box.root / "tiny.toml"
    suite.write_text(TINY)
    return ("run", "--suite", suite, "--backends", "standard", "--cases", case, "--out", out)


@pytest.fixture(scope="module")
def ran(box: Box):
    """One run, whose report is part of it."""
    return box.attnsuite(*run_words(box, "first", known_machine(box.root / "first")))


def test_run_and_its_report_work_without_a_network_and_ask_for_no_address(ran, box):
    assert ran.code == 0, ran.said
    assert (box.root / "first" / "report.md").exists()
    assert ran.network == ()


def test_run_writes_only_to_its_directory_the_caches_and_tmpdir(ran, box):
    assert str(box.root / "first" / "records.jsonl") in ran.wrote  # the trace sees writing
    assert any(path.startswith(str(box.root / "tmp")) for path in ran.wrote)  # of workers too
    assert not box.strays(ran, box.root / "first")


def test_an_attempt_is_seen(box):
    script = (
        "import pathlib, socket, subprocess, sys\n"
        "pathlib.Path('stray').write_text('')\n"
        "code = 'import os; os.mkdir(\"of-a-child\")'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
        "socket.create_connection(('192.0.2.1', 80), 1)\n"
    )
    traced = box.python("-c", script)
    assert traced.code != 0
    assert "Network is unreachable" in traced.said
    assert traced.network
    assert box.strays(traced) == {str(box.root / "stray"), str(box.root / "of-a-child")}


def test_doctor_without_home_and_tmpdir_needs_no_network(box):
    traced = box.attnsuite("doctor", HOME=None, TMPDIR=None)
    assert traced.code == 0, traced.said
    assert traced.network == ()
    assert not traced.outside(Path("~").expanduser() / ".cache", Path("/tmp"))  # noqa: S108 (what an unset TMPDIR means)


@pytest.mark.usefixtures("ran")
def test_report_with_a_home_where_nothing_can_be_written(box):
    traced = box.attnsuite("report", box.root / "first", HOME="/proc/self")
    assert traced.code == 0, traced.said
    assert traced.network == ()
    assert str(box.root / "first" / "report.md") in {re.sub(r"/[^/]*$", "/report.md", path) for path in traced.wrote}
    assert not box.strays(traced, box.root / "first")


def choose(box):
    return "choose", box.root / "first", "--out", box.root / "out" / "policy.json"


def merge(box):
    assert box.attnsuite(*run_words(box, "second", known_machine(box.root / "second"))).code == 0
    return "report", box.root / "first", box.root / "second", "--out", box.root / "out"


def calibrate(box):
    words = ("--prompts", 1, "--length", 64, "--out", box.root / "out" / "calibration.safetensors")
    return "calibrate", *words


def tune(box):
    out = known_machine(box.root / "out")
    return "tune", "--backends", "chunked", "--cases", "forward-s512-h8k2-d64-bf16", "--out", out


def compile_(box):
    pytest.importorskip("libtpu", reason="compiles for TPUs: pip install '.[tpu]'")
    run_words(box, "first", box.root)  # writes the suite
    words = ("--targets", "v5e", "--backends", "standard", "--suite", box.root / "tiny.toml", "--cases", "first")
    return "compile", *words, "--out", box.root / "out"


@pytest.mark.sandbox
@pytest.mark.parametrize("words", [choose, merge, calibrate, tune, compile_], ids=lambda words: words.__name__)
@pytest.mark.usefixtures("ran")
def test_command_writes_only_where_it_is_told_and_speaks_to_no_network(words, box):
    shutil.rmtree(box.root / "out", ignore_errors=True)
    if words in {choose, calibrate}:
        (box.root / "out").mkdir()
    traced = box.attnsuite(*words(box))
    assert traced.code == 0, traced.said
    assert any(path.startswith(str(box.root / "out")) for path in traced.wrote)
    assert traced.network == ()
    assert not box.strays(traced, box.root / "out")


@pytest.mark.sandbox
@pytest.mark.parametrize("home", [None, "/proc/self"], ids=["unset", "read-only"])
def test_run_with_no_home_to_write_to(home, box):
    shutil.rmtree(box.root / "out", ignore_errors=True)
    traced = box.attnsuite(*run_words(box, "first", known_machine(box.root / "out")), HOME=home, TMPDIR=None)
    assert traced.code == 0, traced.said
    assert (box.root / "out" / "report.md").exists()
