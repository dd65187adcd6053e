"""Suite files: lists are sweeps, errors name line and key, and every key is printed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from attnsuite.backends import masks
from attnsuite.backends.choices import problem_of
from attnsuite.suite import kinds
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds.formulas import visible_pairs
from attnsuite.suite.kinds.op_case import is_plain, spec_of
from attnsuite.suite.suites import SUITES, find_suite
from suite_keys import generated

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "suite-files.md"
FORWARD = '[[case]]\nkind = "op_forward"\n'
TINY = f'{FORWARD}sequence = 64\nname = "first"\n'


@pytest.fixture
def read(tmp_path):
    """The names of the cases of a suite file with this text."""

    def of(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return [case.name for case in find_suite(str(path)).cases]

    return of


MODEL = '[[case]]\nkind = "model_prefill"\n'
CHOSEN = '[[case]]\nkind = "kascade_text"\n'


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"{FORWARD}sequence = 8\nsoft_cap = 1e6\n", ["forward-s8-h8k8-d64-cap1000000.0-f32"]),
        (
            f"{FORWARD}sequence = [8, 16]\nkv_heads = [8, 2]\nheads = 8\n",  # the first varies slowest
            [f"forward-s{sequence}-h8k{heads}-d64-f32" for sequence in (8, 16) for heads in (8, 2)],
        ),
        (
            '[[case]]\nkind = ["op_decode", "op_forward"]\nsequence = 8\n',
            ["decode-s8-h8k8-d64-f32", "forward-s8-h8k8-d64-f32"],
        ),
        # Names that leave a swept key out are told apart by its value, in the letters of a name.
        (f"{MODEL}top_k = [0.25, 0.5]\n", [f"prefill-text-s1024-f32-top_k{share}" for share in (0.25, 0.5)]),
        (
            f'{CHOSEN}schedule = "manual"\nanchors = ["0", "0,1"]\n',
            [f"kascade-text-prefill-s512-k0.125-t16-anchors{anchors}" for anchors in ("0", "0-1")],
        ),
        (
            f'{CHOSEN}calibration = ["a/held out", "b/held out", "c"]\n',
            [f"kascade-text-prefill-s512-k0.125-t16-calibration{name}" for name in ("held-out-1", "held-out-2", "c")],
        ),
        (
            f'{FORWARD}sequence = 8\nmask = ["causal | prefix(4)", "causal & prefix(4)"]\n',
            [f"forward-s8-h8k8-d64-causal-prefix-4-f32-maskcausal-prefix-4--{number}" for number in (1, 2)],
        ),
        (f"\ufeff{TINY}", ["first"]),  # editors on Windows write this mark
    ],
)
def test_lists_make_a_case_of_each_combination_with_a_name(read, text, names):
    assert read(text) == names


@pytest.mark.parametrize(("first", "measured"), [("", True), ("exact_only = true\n", False)])
def test_suite_of_exact_backends_leaves_out_the_approximate_ones(tmp_path, first, measured):
    path = tmp_path / "mine.toml"
    path.write_text(f"{first}{FORWARD}sequence = 8\n")
    assert ("kascade" in find_suite(str(path)).default_backends()) is measured
    assert "chunked" in find_suite(str(path)).default_backends()


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_no_two_cases_of_a_named_suite_have_one_name(suite):
    found = [case.name for case in suite.cases]
    assert found == list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# none\n\nspeed = 1\n" + FORWARD, "line 3 (speed): it has no key 'speed'"),
        ('peers = ["tensorflow"]\n' + FORWARD, "line 1 (peers): peers: 'tensorflow' is no peer"),
        ('backends = ["flash"]\n' + FORWARD, "line 1 (backends): backends: backend 'flash' is not registered; use"),
        (f"{FORWARD}sequence = 8\n\n{FORWARD}sequence = 0\n", "line 7 (sequence): a case of kind op_forward: sequence"),
        (f"{FORWARD}sequence = [\n  8,\n  0,\n]\nseed = 1\n", "line 3 (sequence): a case of kind op_forward: seq"),
        (f"# one\n{FORWARD}heads = 8\n", "line 2: a case of kind op_forward: it lacks the key sequence"),
        (f"{FORWARD}sequence = 8\nhead_size = 3\n", "line 4 (head_size): a case of kind op_forward: it has no key"),
        (f"{FORWARD}sequence = 8\nheads = 4\nkv_heads = 3\n", "line 4 (heads): case forward-s8-h4k3-d64-f32: num_"),
        (f'{FORWARD}sequence = 8\nname = "seed"\nsoft_cap = -1.0\nseed = 3\n', "line 5 (soft_cap): case seed: logits"),
        ('case = [\n  {kind = "op_forward", sequence = 0},\n]\n', "line 1: a case of kind op_forward: sequence = 0"),
        (f'{FORWARD}name = """\n[[case]]\n"""\nsequence = 8\nseed = -1\n', "line 7 (seed): a case of kind"),
        (f"{FORWARD}sequence = 8\n[case.seed]\na = 1\n", "line 4 (seed): a case of kind op_forward: seed = a table"),
        (f'{FORWARD}sequence = [8, 9]\nname = "a"\n', "line 4 (name): name = 'a' cannot name the cases of a sweep"),
        (f"{FORWARD}sequence = []\n", "line 3 (sequence): sequence = [] lists no value"),
        (f"{FORWARD}sequence = [8, 8]\n", "line 1: two cases named forward-s8-h8k8-d64-f32-sequence8"),
        (f"{FORWARD}sequence = [[8]]\n", "line 3 (sequence): a case of kind op_forward: sequence = a list must be"),
        (f"{FORWARD}sequence = {list(range(1, 102))}\nseed = {list(range(100))}", "make 10100 cases; a table"),
        ("name = 3\n" + TINY, "line 1 (name): name = 3 must be text or nothing"),
        ("all_cores = 2\n" + TINY, "line 1 (all_cores): all_cores = 2 must be true or false"),
        (
            '[[case]]\nkind = "conformance"\nname = "plane"',
            "line 3 (name): case plane: name = 'plane' is no problem",
        ),
        (
            '[[case]]\nkind = "conformance"\nnumber = -1',
            "line 3 (number): a case of kind conformance: number = -1",
        ),
        ("[[case]]\nsequence = 64", "line 1: kind = nothing is not a kind of case"),
        ('[[case]]\nkind = "op_sideways"', "line 2 (kind): kind = 'op_sideways' is not a kind of case"),
        (f"{FORWARD}sequence = true", "sequence = true must be an integer"),
        (f'{TINY}dtype = "int8"', "line 5 (dtype): case first: dtype = 'int8' must be one of float32, bfloat16"),
        (f"{TINY}documents = 65", "documents=65 does not fit"),
        (f'{FORWARD}sequence = 12\nmask = "widow(1)"\n', "line 4 (mask)"),
        (f'{FORWARD}sequence = 64\nname = "a/b"', "name = 'a/b' cannot name a case"),
        ('[[case]]\nkind = "model_prefill"\nragged = true', "ragged = true is about several prompts"),
        ('[[case]]\nkind = "model_train"\nbatch = 2\nragged = true', "ragged = true is about several prompts"),
        ('[[case]]\nkind = "perplexity"\ndtype = "float64"', "dtype = 'float64' must be one of"),
        (TINY + TINY, "line 8 (name): two cases named first"),
        (f"{TINY}soft_cap = 1e400", "soft_cap = inf must be"),
        (f"{FORWARD}sequence = 64\nsoft_cap = 1e20", "logits_soft_cap=1e+20 must be a finite Python float"),
        (f"{TINY}seed = 2026-01-01", "seed = datetime.date(2026, 1, 1) must be"),
        (f"{TINY}seed{'.a' * 2000} = 1", "seed = a table must be"),
    ],
)
def test_error_names_the_line_and_the_key(read, text, told):
    with pytest.raises(InputError, match=r"suite file .*mine\.toml, line") as raised:
        read(text)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no cases"),
        ("[[case", "not valid TOML"),
        (f"{TINY}seed = {'9' * 5000}", "Exceeds the limit"),
        (f"{TINY}seed = {'[' * 2000}", "nested too deeply"),
    ],
)
def test_file_without_lines_to_name_is_refused(read, text, told):
    with pytest.raises(InputError, match=f"suite file .*{told}"):
        read(text)


def test_page_names_every_kind_whose_keys_are_printed():
    printed = re.findall(r"^## (`.*)$", generated(), re.MULTILINE)
    assert re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == printed
    assert {name for names in printed for name in re.findall(r"\w+", names)} <= kinds.built_in().keys()


def test_every_key_of_a_case_is_printed():
    for name, keys in re.findall(r"^## `(\w+)`.*?^Keys: (.*?)$", generated(), re.MULTILINE | re.DOTALL):
        fields = {field.name for field in dataclasses.fields(kinds.built_in()[name].case)} - {"case", "kind"}
        assert fields <= set(re.findall(r"`(\w+)", keys)), name


def test_example_of_the_page_has_the_seven_cases_that_the_page_says(read):
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(read(example)) == 7


def test_mask_of_a_readers_own_has_a_case_a_policy_and_pairs(tmp_path):
    """One class, and no line for it elsewhere: suite file, name, spec, pairs, policy, harvest."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class EveryThird(masks.Mask):
        start: int

        def _shows(self, query, key):
            return (key - self.start) % 3 + 0 * query == 0

    path = tmp_path / "mine.toml"
    path.write_text(f'{FORWARD}sequence = 12\nmask = "every_third(1)"\n')
    (case,) = find_suite(str(path)).cases
    assert case.name == "forward-s12-h8k8-d64-every_third-1-f32"
    spec = spec_of(case)
    assert spec.mask_function == EveryThird(1)
    assert visible_pairs(case) == sum(k % 3 == 1 for q in range(12) for k in range(q + 1))
    assert problem_of(spec)["mask_function"] == "every_third(1)"
    assert not is_plain(dataclasses.asdict(case))
