"""Models of this project in lm-evaluation-harness, so that its tasks compare dense and sparse attention.

:class:`SuiteLM` gives the harness what its tasks ask of a model: log-likelihoods (multiple choice), rolling
log-likelihoods (perplexity) and text (exact match). ``python -m attnsuite.suite.harness`` is the harness's own command
with the model ``attnsuite`` added; llama.md of the docs shows it. The harness is in the extra ``lm-eval``. Read in
version 0.4.13 (``lm_eval/api/model.py``).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import BackendUnavailableError
from attnsuite.models import generate
from attnsuite.models.loss import token_nats
from attnsuite.suite.errors import InputError
from attnsuite.suite.flag_values import parse_options
from attnsuite.suite.kinds.model_program import selected_shares
from attnsuite.suite.layerwise_perplexity import options_of
from attnsuite.suite.measure.tokens import reader_of
from attnsuite.suite.named_model import checkpoint_of, model_of

try:
    import jinja2  # pyright: ignore[reportMissingImports]
    import tqdm  # pyright: ignore[reportMissingModuleSource]
    from lm_eval import utils  # pyright: ignore[reportMissingImports]
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import Collator, truncate_tokens  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    missing = f"the harness is not installed ({error}); pip install '.[lm-eval]'."
    if __name__ == "__main__":
        sys.stderr.write(f"{missing}\n")
        raise SystemExit(2) from None
    raise ModuleNotFoundError(missing) from error

_LINE = 10  # a byte-level model has no token for the beginning of a text: a new line stands there
_MULTIPLE = 64  # lengths are rounded up to it or a multiple of it, so that few programs are compiled
_GENERATION = ("do_sample", "max_gen_toks", "temperature", "top_p", "until")
_log = logging.getLogger(__name__)


@jax.jit
def _judged(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    return -token_nats(logits, targets), logits.argmax(-1) == targets


@register_model("attnsuite")
class SuiteLM(TemplateLM):
    """A model of this project with one attention backend, for lm-evaluation-harness.

    ``model`` is ``text`` (the checkpoint that ships) or a checkpoint's directory. ``options`` are the backend's, as
    ``top_k=0.25;min_keys=0``. ``calibration``, ``schedule``, ``anchors``, ``threshold`` and ``max_reuse_dist`` are for
    a backend whose layers select keys (``kascade``), and mean what they mean in ``attnsuite perplexity``; layers in
    ``anchors`` are separated by ``;``. ``max_length`` is the longest input in tokens (default: the configuration's),
    what is generated included. ``truncation_side`` says what a prompt that is too long loses before text is generated:
    its beginning (``left``), or its ``middle``, as in LongBench. ``seed`` is for sampled text. ``enable_thinking`` is
    given to the checkpoint's chat template.

    The backend that is named runs, or the evaluation ends with the reasons why not: nothing falls back. Every text
    begins with the tokens that the checkpoint's tokenizer puts there. A byte-level model has none: a new line stands
    before a text that has no context. What is too long is cut with a warning.

    Raises InputError for arguments that do not fit. ``device`` is the harness's and is not used: JAX chooses, by
    JAX_PLATFORMS.
    """

    def __init__(
        self,
        model: str = "text",
        *,
        backend: str = "auto",
        options: str = "",
        calibration: str | None = None,
        schedule: str | None = None,
        anchors: str | int = "",
        threshold: float | None = None,
        max_reuse_dist: int | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        truncation_side: str = "left",
        seed: int = 0,
        enable_thinking: bool | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if max_batch_size is not None:
            raise InputError(f"max_batch_size={max_batch_size} is not taken; give batch_size.")
        if device is not None:  # the harness's command gives one, asked or not
            _log.info("device=%s is not used: JAX runs on %s", device, jax.default_backend())
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise InputError(f"batch_size={batch_size!r} must be a number of at least 1.")
        if truncation_side not in ("left", "middle"):
            raise InputError(f"truncation_side={truncation_side!r} must be left or middle.")
        with checkpoint_of(model) as directory:
            overrides: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
            place = str(directory.resolve())  # a relative one may be called as a model is
            self._model = model_of(place, "model", **overrides)
            self._reader = reader_of(place, self._model.config)
            self._ends = _end_tokens(directory).intersection(range(self._model.config.vocab_size))
        flags = {
            "calibration": calibration,
            "schedule": schedule,
            "anchors": str(anchors).replace(";", ",") or None,
            "threshold": threshold,
            "max_reuse_dist": max_reuse_dist,
        }
        backend_options, self.notes = options_of(
            backend,
            parse_options(options.replace(";", ",")),
            {name: value for name, value in flags.items() if value is not None},
            self._model,
        )
        self._attention: dict[str, Any] = {
            "backend": backend,
            "backend_options": backend_options,
            "on_unavailable": "raise",
        }
        self._name, self.max_length, self._batch = model, max_length or self._model.config.max_length, int(batch_size)
        self._side, self._seeds = truncation_side, np.random.default_rng(seed)
        self._thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._logged = 0  # the length of the longest text of which was logged what is kept

    @property
    def eot_token_id(self) -> int:
        """The token that stands before a text without context."""
        return self._reader.front[-1] if self._reader.front else _LINE

    @property
    def tokenizer_name(self) -> str:
        """The model's name: its tokenizer lies beside it."""
        return self._name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, with those in front of it unless ``add_special_tokens`` is False.

        A text that begins with their spelling, as chat templates do, has them already.
        """
        tokens, front = self._reader.encode(np.frombuffer(string.encode(), np.uint8)).tolist(), [*self._reader.front]
        return tokens if add_special_tokens is False or tokens[: len(front)] == front else [*front, *tokens]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that lies beside the checkpoint; the harness keeps it with its results."""
        if isinstance(chat_template, str):
            raise InputError(f"--apply_chat_template {chat_template} is not taken; leave the name out.")
        return self._chat(lambda tokenizer: tokenizer.get_chat_template())

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the checkpoint's chat template has it, rendered by ``transformers``."""
        return self._chat(
            lambda tokenizer: tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._thinking,
            )
        )

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(self._name, local_files_only=True)

    def _chat(self, ask: Callable[[Any], str]) -> str:
        try:
            return ask(self._tokenizer)
        except (ImportError, OSError, ValueError, jinja2.TemplateError) as error:
            raise InputError(f"model {self._name!r} has no chat template that transformers renders: {error}") from error

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Per request the natural log-likelihood of its continuation, and whether each token is the likeliest."""
        rows = [self._fitted(context + continuation, len(continuation)) for _, context, continuation in requests]
        self._log_selected(max(map(len, rows), default=1) - 1)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        for start in range(0, len(rows), self._batch):
            chosen = longest_first[start : start + self._batch]
            tokens, counts = _padded([rows[i][:-1] for i in chosen])
            targets = _padded([rows[i][1:] for i in chosen])[0]
            valid = np.arange(tokens.shape[1]) < counts[:, None]
            logits = self._model(tokens, padding_mask=valid, needs_grad=False, **self._attention)
            scores, likeliest = map(np.asarray, _judged(logits, jnp.asarray(targets)))
            for row, i in enumerate(chosen):
                part = slice(counts[row] - len(requests[i][2]), counts[row])
                found[i] = float(scores[row, part].sum(dtype=np.float64)), bool(likeliest[row, part].all())
        return found

    def _log_selected(self, length: int, *, decoding: bool = False) -> None:
        """Log what is selected of a text of ``length`` tokens, and DENSE where all is selected; once per length.

        With ``decoding`` also what is selected in a step behind so many tokens.
        """
        if length <= self._logged:
            return
        self._logged = length
        lengths_of: dict[str, tuple[int, int | None]] = {
            "in a text of %d tokens, the longest so far: %s": (length, None)
        }
        if decoding:
            lengths_of["in a step of decoding behind %d tokens: %s"] = (1, length)
        for sentence, (queries, capacity) in lengths_of.items():
            found = self._model.resolutions(1, queries, capacity=capacity, needs_grad=False, **self._attention)
            for selected in selected_shares(tuple(found.items()), self._model.config):
                for line in (*self.notes, *selected.lines):
                    _log.warning(sentence, length, line)

    def _fitted(self, tokens: list[int], predicted: int) -> list[int]:
        """The last tokens, as many as the model takes as input and one more, all ``predicted`` ones among them."""
        if predicted > self.max_length:
            raise InputError(f"a continuation has {predicted} tokens, more than max_length={self.max_length}.")
        if len(tokens) - 1 > self.max_length:
            _log.warning("a context of %d tokens loses its beginning: max_length=%d", len(tokens), self.max_length)
        return tokens[-self.max_length - 1 :]

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Per text its log-likelihood, in windows of ``max_length`` that predict each token once."""
        totals: list[float] = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Per request the text behind its context, up to the first of its stop sequences or an end token.

        Requests that ask for the same are generated together, ``batch_size`` at a time.
        """
        ordered = Collator([request.args for request in requests], lambda pair: -len(pair[0]), group_by="gen_kwargs")
        texts: list[str] = []
        for batch in tqdm.tqdm(ordered.get_batched(n=self._batch), "batches of generate_until", disable=disable_tqdm):
            texts += self._continued([context for context, _ in batch], batch[0][1])
        return ordered.get_original(texts)

    def _continued(self, contexts: Sequence[str], options: dict[str, Any]) -> Iterator[str]:
        if strange := sorted(set(options) - set(_GENERATION)):
            raise InputError(f"generation_kwargs {', '.join(strange)} are not taken, only {', '.join(_GENERATION)}.")
        count, until = int(options.get("max_gen_toks", 256)), options.get("until") or []
        sampled, temperature = options.get("do_sample"), options.get("temperature")
        if sampled is None and temperature:
            raise InputError(f"temperature={temperature} without do_sample has two meanings; give do_sample too.")
        if count >= self.max_length:
            raise InputError(f"max_gen_toks={count} leaves no room for a context in max_length={self.max_length}.")
        tokens, counts = _padded([self._prompt(context, self.max_length - count) for context in contexts])
        self._log_selected(int(counts.max()), decoding=True)
        rows = generate(
            self._model,
            tokens,
            count,
            lengths=counts,
            temperature=float(1.0 if temperature is None else temperature) if sampled else 0.0,
            top_p=float(options.get("top_p", 1.0)) if sampled else 1.0,
            seed=int(self._seeds.integers(2**31)),
            stop_token=self._ends,
            **self._attention,
        )
        for row in rows.tolist():
            text = self._reader.decode(list(itertools.takewhile(lambda token: token not in self._ends, row)))
            for stop in [until] if isinstance(until, str) else until:
                text = text.partition(stop)[0] if stop else text
            yield text

    def _prompt(self, context: str, room: int) -> list[int]:
        """The tokens of a context, at most ``room`` of them."""
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        if len(tokens) > room:
            _log.warning("a prompt of %d tokens is cut to %d (truncation_side=%s)", len(tokens), room, self._side)
        return truncate_tokens(tokens, room, self._side)


def _padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens padded on the right to one of few lengths, and how many tokens each has."""
    counts = np.array([len(row) for row in rows])
    longest = max(int(counts.max()), 1)
    multiple = max(_MULTIPLE, 2 ** (longest.bit_length() - 4))  # at most eight lengths between two powers of two
    tokens = np.zeros((len(rows), -(-longest // multiple) * multiple), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return tokens, counts


def _end_tokens(directory: Path) -> frozenset[int]:
    """The tokens that end a text, by ``generation_config.json`` or else ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        if (path := directory / name).is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def main() -> None:
    """The harness's command. A refusal of this package is one sentence and exit code 2."""
    try:
        cli_evaluate()
    except (InputError, BackendUnavailableError) as refusal:
        sys.stderr.write(f"{refusal}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
