"""With both compilers installed: what compiles for TPUs and GPUs that are not here, and what must be rejected."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

import compilers
from attnsuite.backends import Target
from attnsuite.suite.cell import Outcome
from attnsuite.suite.compile import schedules, topologies
from attnsuite.suite.compile.compilation import compiled
from attnsuite.suite.grid.process import Worker
from attnsuite.suite.grid.running import answered
from attnsuite.suite.kinds import make_case
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.store import RECORDS, parse_records
from command import installed
from landing import is_landing, swept

pytestmark = compilers.needed

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "compiled" / RECORDS

SUITE = """
[[case]]
kind = "op_forward_backward"
sequence = 140
heads = 4
kv_heads = 2
head_dim = 128
dtype = "bfloat16"
documents = 3
name = "packed"

# A TPU's compiler takes longer for larger arrays. On v6e, standard and chunked take 8.6 and 6.5 seconds for the case
# above with 300 tokens, 2.2 and 2.6 with 140; decode takes all backends 12 at 1024 slots, 5 at 512.
[[case]]
kind = "op_forward"
sequence = 1024
heads = 2
kv_heads = 1
head_dim = 128
dtype = "bfloat16"
name = "forward"

[[case]]
kind = "op_decode"
sequence = 512
heads = 4
kv_heads = 2
head_dim = 128
dtype = "bfloat16"
name = "decode"

[[case]]
kind = "model_prefill"
model = "debug"
sequence = 256
name = "prefill"
"""

# Kernels that no compiler may take: a block that is no multiple of a tile (TPU) or no power of two (Triton), and one
# tile larger than the memory of a core.
ILLEGAL = """
import dataclasses
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, triton as plgpu
from attnsuite.backends.contract import Plan
from attnsuite.backends.features import FEATURES, Takes

def copy(x_ref, y_ref, *scratch):
    y_ref[...] = x_ref[...] + 1
    for ref in scratch:  # in use, or it would not be allocated
        ref[:8, :128] = x_ref[:8, :]
        y_ref[:8, :] += ref[:8, :128]

def gram(x_ref, y_ref):
    y_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

@dataclasses.dataclass(frozen=True)
class Illegal:
    name: str
    exact: bool = True

    def takes(self, target, mode):
        return Takes(features=frozenset(FEATURES))

    def refuses(self, spec, target, mode, options):
        alone = not spec.needs_grad and spec.query_length == 1024
        return () if alone else (f"{self.name} is for the case forward alone.",)

    def plan(self, spec, layout, *, target, mode="native", options=None):
        gpu, oversized = target.platform == "cuda", self.name == "oversized"
        kernel = gram if gpu and oversized else copy
        block = (100, 96) if self.name == "illegal_block" else (256, 512) if kernel is gram else (128, 128)
        tile = (256, 256) if kernel is gram else block
        extra = {"compiler_params": plgpu.CompilerParams()} if gpu else {}
        if oversized and not gpu:
            extra = {"scratch_shapes": [pltpu.VMEM((2**15, 2**11), jnp.float32)]}  # 256 MiB
        def run(q, k, v, layer, carry):
            x = jnp.zeros((2 * block[0], block[1]), jnp.float32) + q.astype(jnp.float32).mean()
            y = pl.pallas_call(
                kernel, out_shape=jax.ShapeDtypeStruct((2 * tile[0], tile[1]), jnp.float32), grid=(2,),
                in_specs=[pl.BlockSpec(block, lambda i: (i, 0))], out_specs=pl.BlockSpec(tile, lambda i: (i, 0)),
                **extra,
            )(x)
            return q + y.mean().astype(q.dtype), carry
        return Plan(run)

def __getattr__(name):
    return Illegal(name)
"""
TPUS = swept(["tpu:v5e", "tpu:v6e"], ["tpu:v6e"])
ILLEGAL_NAMES = ("illegal_block", "oversized", "legal")
BACKENDS = (
    "standard",
    "chunked",
    "cudnn",
    "splash",
    "pallas_flash",
    "paged_attention",
    "ragged_paged_attention",
    "tpu_flash_attention",
    *ILLEGAL_NAMES,
)
# A kind of device takes a process a minute or more. A change is held to one TPU and one GPU.
FIRST_KINDS = ("v6e", "h100")
KINDS = FIRST_KINDS if is_landing() else ("v5e", *FIRST_KINDS)


@pytest.fixture(scope="module")
def illegal(tmp_path_factory):
    entries = "".join(f"{name} = illegal_kernels:{name}\n" for name in ILLEGAL_NAMES)
    folder = tmp_path_factory.mktemp("illegal")
    return installed(folder, f"[attnsuite.backends]\n{entries}", illegal_kernels=ILLEGAL)


def compile_records(attnsuite, folder, *flags, path=None):
    flags = ("--out", folder / "run", "--cache", folder / "cache", *flags)
    code, stdout, stderr = attnsuite.finish(attnsuite.start("compile", *flags, path=path), seconds=580)
    assert code == 0, stderr
    return {record.key: record for record in parse_records(folder / "run" / RECORDS)[0]}, stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory, attnsuite, illegal):
    """One process per kind of device: a process takes longer to start than many a cell to compile."""
    folder = tmp_path_factory.mktemp("compile")
    (folder / "suite.toml").write_text(SUITE)
    flags = ("--suite", folder / "suite.toml", "--targets", ",".join(KINDS), "--backends", ",".join(BACKENDS))
    return compile_records(attnsuite, folder, *flags, path=illegal)


def test_compilers_are_here_where_they_are_required():
    assert not compilers.MISSING


@pytest.mark.parametrize("case", ["packed", "forward", "decode", "prefill"])
@pytest.mark.parametrize(
    ("backend", "kinds"), [("standard", KINDS), ("chunked", KINDS), ("splash", ("v5e", "v6e"))], ids=str
)
def test_kernels_compile_and_fit(run, case, backend, kinds):
    for record in run[0].values():
        if record.case == case and record.requested == backend and record.target.partition(":")[2] in kinds:
            assert (record.status, record.mode) == ("ok", "compile"), record.error
            assert 0 < record.memory["compiled_peak"] < record.environment["target_memory"]
            assert record.compile_seconds > 0
            assert record.samples == ()


@pytest.mark.parametrize("target", [*TPUS, "cuda:h100"])
@pytest.mark.parametrize(
    ("cell", "platform"),
    [
        ("decode/paged_attention", "tpu"),
        ("decode/ragged_paged_attention", "tpu"),
        ("forward/tpu_flash_attention", "tpu"),
        ("forward/pallas_flash", "cuda"),
        ("forward/legal", "both"),  # with an illegal block it is rejected
    ],
)
def test_kernel_of_a_platform_compiles_for_it(run, cell, platform, target):
    record = run[0][f"{cell}/{target}/compile"]
    assert (record.status == "ok") is (platform in (target.partition(":")[0], "both")), record.error


@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize("backend", ["standard", "splash"])
def test_program_for_a_tpu_moves_at_most_a_twentieth_more_than_the_librarys_own(run, backend, target):
    program = run[0][f"forward/{backend}/{target}/compile"].program
    own, library = program.operations, program.by_hand
    assert own.bytes_accessed <= 1.05 * library.bytes_accessed, f"{own} against {library}"
    assert own.conditionals == 0


def test_every_cell_has_one_record_and_is_in_the_table(run):
    assert len(run[0]) == 4 * len(BACKENDS) * len(KINDS)
    assert "| v6e" in run[1].replace("  ", "")
    assert "report.md" in run[1]


def test_what_a_backend_refuses_is_not_compiled(run):
    for key in (
        "forward/splash/cuda:h100/compile",
        "forward/cudnn/cuda:h100/compile",
        "packed/pallas_flash/tpu:v6e/compile",
    ):
        record = run[0][key]
        assert (record.status, record.mode, record.memory) == ("unsupported", None, {})
        assert record.reasons


@pytest.mark.parametrize("target", [*TPUS, "cuda:h100"])
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("illegal_block", {"tpu": "divisible by", "cuda": "power of 2"}),
        ("oversized", {"tpu": "vmem", "cuda": "Shared memory"}),
    ],
)
def test_illegal_kernel_is_rejected_with_the_compilers_reason(run, backend, words, target):
    record = run[0][f"forward/{backend}/{target}/compile"]
    assert record.status == "crashed", record
    assert words[target.partition(":")[0]] in record.error
    assert "\n" not in record.error


def test_slice_holds_a_share_of_what_one_chip_holds(run, tmp_path, attnsuite):
    """Arguments of a call in a shard_map on four chips: a quarter of those on one."""
    (tmp_path / "suite.toml").write_text(SUITE, encoding="utf-8")
    words = ["--suite", tmp_path / "suite.toml", "--cases", "packed", "--backends", "chunked"]
    (four,) = compile_records(attnsuite, tmp_path, *words, "--targets", "v6e:2x2")[0].values()
    one = run[0]["packed/chunked/tpu:v6e/compile"]
    assert (one.status, four.status, four.target) == ("ok", "ok", "tpu:v6e:2x2")
    # Two chips share the KV heads, two the 140 tokens; the ids of the tokens are whole on each.
    ids = 4 * 140
    assert four.memory["compiled_argument"] - ids == pytest.approx((one.memory["compiled_argument"] - ids) / 4, rel=0.1)
    assert "2 of context and 2 of heads" in four.notes[0]


class TestOwnCommand:
    """A class is dealt to a worker by itself (``--dist loadscope``): the run of the others takes longest of all."""

    def test_more_than_the_device_has_does_not_fit(self, tmp_path, attnsuite):
        (tmp_path / "suite.toml").write_text('[[case]]\nkind = "op_forward"\nsequence = 262144\nname = "long"\n')
        found, _ = compile_records(
            attnsuite, tmp_path, "--suite", tmp_path / "suite.toml", "--targets", "v5e,a100", "--backends", "standard"
        )
        assert {record.status for record in found.values()} == {"oom"}
        assert "HBM" in found["long/standard/tpu:v5e/compile"].error
        assert "has 80 GiB" in found["long/standard/cuda:a100/compile"].error

    def test_published_page_matches_a_fresh_small_run(self, tmp_path, attnsuite):
        """Same cells, same statuses; with the same compilers the same bytes."""
        published = {record.key: record for record in parse_records(PUBLISHED)[0]}
        cases = ("decode-*",) if is_landing() else ("decode-*", "forward-s32768*-bf16")
        kinds = ("v5e",) if is_landing() else ("v5e", "h100")
        words = ("--cases", ",".join(cases), "--targets", ",".join(kinds), "--backends", "chunked,splash")
        fresh, _ = compile_records(attnsuite, tmp_path, *words)
        assert len(fresh) == len(cases) * len(kinds) * 2
        for key, record in fresh.items():
            before = published[key]
            assert (record.status, record.mode) == (before.status, before.mode)
            assert make_case(record.problem) == make_case(before.problem)
            assert set(record.memory) == set(before.memory)
            compilers = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
            if all(record.environment["versions"][name] == before.environment["versions"][name] for name in compilers):
                assert record.memory.get("compiled_argument") == before.memory.get("compiled_argument")

    def test_schedule_is_read_from_what_the_compiler_writes(self, tmp_path):
        case = OpCase(kind="op_forward", sequence=256, heads=2, kv_heads=2, head_dim=128, dtype="bfloat16")
        with Worker(2**33, topologies.ENVIRONMENT | schedules.variables(tmp_path)) as worker:
            answer = answered(worker.ask(300, compiled, case, "splash", Target.named("v5e"), tmp_path), Outcome)
        assert (answer.status, answer.notes) == ("ok", ())
        (found,) = answer.schedules
        assert found.kernel.startswith("splash")
        assert found.grid_steps == 2  # a block of 256 for each head
        assert 0 < found.mxu_bundles < found.step_bundles < found.bundles
        assert found.vector_bytes > 4096 * (found.fills + found.spills)
        assert list(tmp_path.iterdir()) == []

    def test_launches_are_read_from_what_xla_writes_for_a_gpu(self, tmp_path):
        case = OpCase(kind="op_forward", sequence=256, heads=2, kv_heads=2, head_dim=64, batch=3, dtype="bfloat16")
        with Worker(2**33, topologies.ENVIRONMENT | schedules.variables(tmp_path, "cuda")) as worker:
            answer = answered(worker.ask(300, compiled, case, "pallas_flash", Target.named("h100"), tmp_path), Outcome)
        assert answer.status == "ok"
        (found,) = answer.kernels
        assert (found.name, found.configuration) == ("mha_forward", {"num_warps": 4})
        assert found.blocks == 3 * 2 * 2  # a block of 128 queries for each head of each sequence
        assert 64 * 128 * 2 < found.shared_bytes < 227 * 1024
        assert answer.notes == (() if util.find_spec("triton") else (schedules.NO_ASSEMBLER,))
        assert list(tmp_path.iterdir()) == []
