"""``attnsuite perplexity``: a checkpoint's perplexity on text, layer by layer, in a fraction of its memory.

It is for models that do not fit in memory; for others ``attnsuite run --model`` compares backends. The output and the
record also give the backend, what an approximate backend kept, the result of a unigram model on the same tokens, and
the memory of the process.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attnsuite.backends import BackendFallbackWarning, BackendUnavailableError, Layout
from attnsuite.backends.contract import SelectedShare, SelectsKeys
from attnsuite.models import Checkpoint, ModelConfig, TextFile, Transformer, load_text, open_checkpoint, streamed_nats
from attnsuite.models.parameters import count_parameters
from attnsuite.models.planning import Resolutions, resolve_attention

from .cell import Cell, Outcome
from .errors import InputError
from .flag_values import spelled
from .grid.running import now, record_of
from .kinds import extensions
from .kinds.kind import model_word, of_backend
from .kinds.model_program import selected_shares
from .kinds.quality_case import TextCase
from .measure import environment
from .measure.memory import high_water, mark_baseline
from .measure.tokens import bits, reader_of, unigram_bits
from .named_model import checkpoint_of
from .record import Record
from .statistics import paired_difference
from .store import RECORDS, RunStore

INVALID = "INVALID: no better than a unigram model that knows the frequencies of these tokens"
_GIB = 2**30
_Compared = tuple[dict[str, float], dict[str, tuple[float, ...]], str]  # figures, series, and a line
_ALONE: _Compared = ({}, {}, "")


@dataclasses.dataclass(frozen=True, slots=True)
class _Attention:
    """The resolutions of attention, their options, what they keep (by attention type), and notes."""

    resolutions: Resolutions
    options: dict[str, Any]
    selected: tuple[SelectedShare, ...]
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the backend that runs; several are joined."""
        return "+".join(dict.fromkeys(found.backend.name for _, found in self.resolutions))


def run(
    flags: Any, text: TextFile | None, options: Mapping[str, Any], added: Mapping[str, Any], out: Path
) -> tuple[Record, tuple[str, ...]]:
    """Measure and write the record to ``out``; returns it, and lines to print. Raises InputError.

    ``flags`` are those of the verb (``verbs/perplexity.py``), ``added`` those of the backend's extension. Without
    ``text`` the text that ships is read.
    """
    baseline, begin, started = mark_baseline(), time.perf_counter(), now()
    if (out / RECORDS).is_file():
        raise InputError(f"--out {out} has records already; choose another directory.")
    try:
        with checkpoint_of(flags.model) as directory:
            checkpoint = open_checkpoint(directory, **({} if flags.dtype is None else {"dtype": flags.dtype}))
            attention = _attention(flags, options, added, checkpoint)
            other = None if flags.against is None else _against(flags, checkpoint)
            rows, bytes_per_token = _tokens(flags, text, checkpoint.config)
            with RunStore(out, resume=False) as store:  # before the work, in case it is not writable
                nats = _nats(flags, checkpoint, rows, attention)
                compared = _ALONE if other is None else _compared(nats, _nats(flags, checkpoint, rows, other), other)
                seconds, used = time.perf_counter() - begin, high_water(baseline)
                outcome, figures = _judged(checkpoint.config, attention, rows, nats, bytes_per_token, compared)
                record = record_of(
                    _cell(flags, checkpoint.config, attention),
                    dataclasses.replace(
                        outcome,
                        memory={"process_high_water": used},
                        notes=(*outcome.notes, *_flags(flags, text, attention)),
                    ),
                    suite="perplexity",
                    environment=environment.describe(),
                    started=started,
                    wall_seconds=seconds,
                )
                store.append([record])
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}.") from error
    except (ValueError, BackendUnavailableError) as error:
        raise InputError(str(error)) from error
    size = count_parameters(checkpoint.config) * jax.numpy.dtype(checkpoint.config.param_dtype).itemsize
    cost = (
        f"memory: {used / _GIB:.2f} GiB more than at the start ({baseline.method}), "
        f"for parameters of {size / _GIB:.2f} GiB, read layer by layer"
    )
    return record, (*attention.lines, *figures, cost, f"time: {seconds:.0f} s")


def _nats(flags: Any, checkpoint: Checkpoint, rows: np.ndarray, attention: _Attention) -> np.ndarray:
    return streamed_nats(checkpoint, rows, batch=flags.batch, resolutions=attention.resolutions)


def _against(flags: Any, checkpoint: Checkpoint) -> _Attention:
    """The attention to compare with. Raises BackendUnavailableError where it would be replaced."""
    resolutions = resolve_attention(
        checkpoint.config,
        batch=flags.batch,
        query_length=flags.seq_len - 1,
        needs_grad=False,
        backend=flags.against or "auto",
        on_unavailable="raise",
    )
    return _Attention(resolutions, {}, (), ())


def _compared(nats: np.ndarray, theirs: np.ndarray, other: _Attention) -> _Compared:
    """Nats per token more than ``theirs``, paired by sequence, with a 95% interval over the sequences."""
    mine, beside = (tuple(map(float, x.mean(1))) for x in (nats, theirs))
    lost = paired_difference(mine, beside) if np.isfinite((mine, beside)).all() else None
    if lost is None:
        return {}, {}, f"compared with {other.name}: nothing, since losses are not finite"
    figures = {"against_perplexity": float(np.exp(np.mean(beside))), "nats_lost": lost.value}
    sentence = "no interval below 6 sequences"
    if lost.low is not None and lost.high is not None:
        figures |= {"nats_lost_low": lost.low, "nats_lost_high": lost.high}
        sentence = f"95% interval {lost.low:+.4f} to {lost.high:+.4f}"
    line = (
        f"compared with {other.name} on the same tokens: perplexity {figures['against_perplexity']:.4f}; "
        f"{lost.value:+.4f} nats per token lost ({sentence}, paired by sequence)"
    )
    return figures, {"against_nll": beside}, line


def _tokens(flags: Any, text: TextFile | None, config: ModelConfig) -> tuple[np.ndarray, float | None]:
    """Windows of tokens, and the bytes per token; None for random tokens."""
    if flags.random_tokens:
        shape = (flags.sequences, flags.seq_len)
        return np.random.default_rng(0).integers(0, config.vocab_size, shape), None
    data = load_text().held_out if text is None else load_text(text, held_out=0.0).train
    return reader_of(flags.model, config).spread(data, flags.seq_len, flags.sequences)


def _attention(flags: Any, options: Mapping[str, Any], added: Mapping[str, Any], checkpoint: Checkpoint) -> _Attention:
    """The attention, resolved and planned once before anything is measured, so that a refusal comes first."""
    config, length = checkpoint.config, flags.seq_len - 1
    options, sources = options_of(flags.backend, options, added, checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendFallbackWarning)  # said below
        resolutions = resolve_attention(
            config,
            batch=flags.batch,
            query_length=length,
            needs_grad=False,
            backend=flags.backend,
            options=options,
        )
    lines: list[str] = []
    for kind, found in resolutions:
        of = f" of {kind} layers" if len(resolutions) > 1 else ""
        instead = (
            ""
            if found.mode == "native" and found.requested == found.backend.name
            else (f" ({found.requested} was asked for)")
        )
        lines += [f"backend{of}: {found.backend.name}{instead}", *(f"because {reason}" for reason in found.reasons)]
        if found.mode == "fallback":
            lines += [f"the options of {flags.backend} were not used: another backend ran"] if options else []
            continue
        plan = found.plan(Layout())
        lines += [f"note: {note}" for note in plan.notes]
        if not found.backend.exact and not isinstance(found.backend, SelectsKeys):
            lines.append(f"kept: {found.backend.name} is approximate and does not say what it keeps")
    selected = selected_shares(resolutions, config)
    lines += [line for one in selected for line in one.lines] + list(sources if selected else ())
    return _Attention(resolutions, options, selected, tuple(lines))


def options_of(
    backend: str, options: Mapping[str, Any], flags: Mapping[str, Any], model: Checkpoint | Transformer
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The backend's options, with what the flags of its extension say; and notes on where they come from.

    Raises InputError for flags of another backend, and for flags that do not fit the model.
    """
    if not flags:
        return dict(options), ()
    extension = extensions().get(backend)
    if extension is None:
        raise InputError(
            f"--backend {backend} does not take {spelled(flags)}; leave that out, or use --backend "
            f"{' or '.join(extensions())}."
        )
    return extension.model_options(options, flags, model)


def _judged(
    config: ModelConfig,
    attention: _Attention,
    rows: np.ndarray,
    nats: np.ndarray,
    bytes_per_token: float | None,
    compared: _Compared,
) -> tuple[Outcome, tuple[str, ...]]:
    """What was measured, and its figures as lines. A loss that is not finite has no figure: the status is ``wrong``."""
    finite, low = bool(np.isfinite(nats).all()), unigram_bits(rows)
    by = f"by {attention.name}" + "".join(
        f", which kept {selected.pairs:.4f} of the causal pairs" for selected in attention.selected
    )
    quality = {"sequences": float(len(nats))}
    for selected in attention.selected:
        quality |= selected.figures
    error, notes, lines = None, [*attention.lines], []
    more, series, line = compared
    if finite:
        mean = float(nats.mean())
        quality |= {"perplexity": float(np.exp(mean)), "nll_mean": mean}
        lines.append(f"perplexity per token: {np.exp(mean):.4f} over {nats.size} tokens ({mean:.4f} nats), {by}")
        if bytes_per_token is not None:
            mine, other = bits(mean, bytes_per_token), low / bytes_per_token
            quality |= {"bits_per_byte": mine, "unigram_bits_per_byte": other}
            lines.append(f"bits per byte: {mine:.4f}, unigram model: {other:.4f}")
        quality |= more
        lines += filter(None, [line])
        if mean / np.log(2) >= low:
            lines.append(INVALID)
            notes.append(INVALID)
    else:
        row, token = np.argwhere(~np.isfinite(nats))[0]
        error = (
            f"{int((~np.isfinite(nats)).sum())} of {nats.size} losses are not finite, the first at token {token + 1} "
            f"of sequence {row}: all weights are, what is computed overflows {config.dtype}; try another --dtype."
        )
        lines.append(f"INVALID: {error}")
    outcome = Outcome(
        status="ok" if finite else "wrong",
        error=error,
        notes=tuple(notes),
        tokens=int(nats.size),
        quality=quality,
        series={"nll": tuple(map(float, nats.mean(1))), **series} if finite else {},
    )
    return outcome, tuple(lines)


def _cell(flags: Any, config: ModelConfig, attention: _Attention) -> Cell:
    name = f"perplexity-{model_word(str(Path(flags.model).resolve()))}-s{flags.seq_len}-{config.dtype}"
    fields = {"name": name, "model": flags.model, "sequence": flags.seq_len, "sequences": flags.sequences}
    case = TextCase(**fields, dtype=config.dtype)  # pyright: ignore[reportArgumentType]  (the case checks it)
    return of_backend(case, flags.backend, lambda _: attention.resolutions)


def _flags(flags: Any, text: TextFile | None, attention: _Attention) -> Iterator[str]:
    """Notes on what the case does not say: text, batch and options."""
    what = "random tokens" if flags.random_tokens else text or "the held-out prose that ships with Python"
    yield f"text: {what}; batch: {flags.batch}"
    if flags.against is not None:
        yield f"compared with: {flags.against}"
    options = {name: value for name, value in attention.options.items() if name != "schedule"}
    if options:
        yield "options: " + ", ".join(f"{name}={value}" for name, value in options.items())
