"""docs/how-to/coming-from.md: every name on our side exists, and every name that the guides are known for is there."""

import configparser
import dataclasses
import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from attnsuite.suite.verbs import VERBS
from attnsuite.suite.verbs.flags import extended

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")
KNOWN_ELSEWHERE = {"JAX_PLATFORMS"}  # JAX's own
GUIDES = (
    *("--threshold", "max_len", "d_model", "use_flash_attention", "ProductionTransformer", "KASCADE_KERNEL_AVAILABLE"),
    *("generate_dynamic_schedule", "load_layer_lazy", "precompute_freqs_cis", "KascadeAnchorAttention"),
    *("KascadeReuseAttention", "benchmark_kascade_final.py", "convert_llama_weights.py", "use_splash_kernel"),
    *("get_flash_attention_config", "adaptive_flash_attention", "PADDING_SEGMENT_ID", "KascadeBlockSizes"),
)


def rows(page):
    """The cells of the tables' rows: there, here, what changed."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "there":
            yield cells


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def command_exists(words):
    """A verb, and flags that it has; what follows them is not read."""
    verb, *rest = shlex.split(words)
    if verb not in VERBS:
        return False
    kind = getattr(importlib.import_module(f"attnsuite.suite.verbs.{verb}"), verb.capitalize())
    fields = {field.name for field in dataclasses.fields(extended(kind, verb))}
    return {word[2:].replace("-", "_") for word in rest if word.startswith("--")} <= fields


def attribute_exists(dotted):
    """An attribute of a module of attnsuite, or of a class there; a field of a dataclass counts."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["attnsuite", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if part in getattr(found, "__dataclass_fields__", ()):
                return part == parts[-1]
            found = getattr(found, part, None)
            if found is None:
                return False
        return True
    return False


def exists(name):
    if name.startswith("attnsuite "):
        return command_exists(name.removeprefix("attnsuite "))
    if name.startswith(".["):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return name[len(".[") : -1] in project["optional-dependencies"]
    if name.startswith("tox -e "):
        tox = configparser.ConfigParser(interpolation=None)
        tox.read(ROOT / "tox.ini")
        return f"testenv:{name.removeprefix('tox -e ')}" in tox
    if "/" in name:
        return (ROOT / name).is_file()
    return name in KNOWN_ELSEWHERE or attribute_exists(name)


def test_every_row_says_something_and_every_name_on_our_side_exists():
    table = list(rows(PAGE))
    assert len(table) > 90
    assert not [there for there, here, why in table if not names(here) and not (here == "nothing" and why)]
    assert not [name for _, here, _ in table for name in names(here) if not exists(name)]
    assert not [name for name in GUIDES if not any(name in there for there, _, _ in table)]


@pytest.mark.parametrize(
    "name",
    [
        "models.ModelConfig.d_model",
        "models.no_such_function",
        "attnsuite walk --model DIR",
        "attnsuite run --tile_sizes 3",
        "models/no_such_file.py",
        "tox -e nothing",
        ".[nothing]",
        "KASCADE_TILE_CACHE",
    ],
)
def test_name_that_does_not_exist_is_found_out(name):
    assert not exists(name)
