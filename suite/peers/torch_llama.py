"""The same Llama in Hugging Face's transformers on PyTorch: same configuration, same weights, same tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (extra "peers")
import transformers  # pyright: ignore[reportMissingImports]

from attnsuite.models import Transformer
from attnsuite.models.huggingface import to_hf
from attnsuite.models.parameters import checkpoint_names

from ..kinds import model_program
from ..kinds.model_case import ModelCase
from ..measure.program import Program
from .torch_sdpa import to_torch


def program(case: ModelCase) -> Program:
    """The program of a model case; outputs as those of ``model_program.judged_program``."""
    model = model_program.open_model(case)
    llama, names = _llama(model)
    if case.needs_grad:
        return _train(case, model, llama, names)
    return _decode(case, model, llama) if case.is_decode else _prefill(case, model, llama)


def _llama(model: Transformer) -> tuple[Any, list[str]]:
    names = jax.tree.leaves(checkpoint_names(model.config))
    config = transformers.LlamaConfig(**{k: v for k, v in to_hf(model.config).items() if k != "model_type"})
    llama = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")  # noqa: SLF001 (public there)
    tensors = llama.state_dict()
    if others := (set(names) ^ set(tensors)) - {"lm_head.weight"}:  # which is the embedding where they are tied
        raise ValueError(f"transformers has other weights: {', '.join(sorted(others))} are in one of the two models.")
    for name, x in zip(names, jax.tree.leaves(model.arrays()), strict=True):
        tensors[name].copy_(to_torch(x))  # one at a time: a large model is not held three times
    return llama.to(getattr(torch, model.config.dtype)).eval(), names


def _tokens(case: ModelCase, model: Transformer) -> Any:
    return torch.from_numpy(np.array(model_program.case_tokens(case, model.config))).long()


def _prefill(case: ModelCase, model: Transformer, llama: Any) -> Program:
    tokens = _tokens(case, model)

    def run() -> Any:
        with torch.no_grad():
            return llama(tokens, use_cache=True, logits_to_keep=1).logits

    return Program(run, (), arrays=lambda logits: {"logits": _numpy(logits[:, -1])})


def _decode(case: ModelCase, model: Transformer, llama: Any) -> Program:
    cache = model_program.noisy_cache(case, model)
    dtype = getattr(torch, model.config.dtype)
    layers: Any = zip(cache.keys, cache.values, strict=True)  # of arrays: it has the model's dtype
    held = [tuple(to_torch(x[:, :, : case.sequence]).to(dtype) for x in layer) for layer in layers]
    tokens = torch.from_numpy(np.array(model_program.decoded_tokens(case, model.config))).long()

    def run() -> Any:
        past, logits = transformers.DynamicCache(), []
        for layer, (keys, values) in enumerate(held):
            past.update(keys, values, layer)
        with torch.no_grad():
            for token in tokens.T:
                step = llama(token[:, None], past_key_values=past, use_cache=True)
                past = step.past_key_values
                logits.append(step.logits)
        return logits

    return Program(run, (), arrays=lambda logits: {"logits": np.stack([_numpy(x[:, -1]) for x in logits])})


def _train(case: ModelCase, model: Transformer, llama: Any, names: list[str]) -> Program:
    tokens, parameters = _tokens(case, model), dict(llama.named_parameters())
    # The optimiser of the JAX train step (optax.adamw with its defaults), in its fastest form.
    optimizer = torch.optim.AdamW(llama.parameters(), lr=model_program.LEARNING_RATE, weight_decay=1e-4, fused=True)
    first: dict[str, Any] = {}

    def run() -> Any:
        optimizer.zero_grad()
        logits = llama(tokens, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if not first:  # judged before the first step changes the weights
            gradient = np.concatenate([_numpy(parameters[name].grad).ravel() for name in names])
            first.update(loss=_numpy(loss), gradient=gradient)
        optimizer.step()
        return loss

    return Program(run, (), arrays=lambda _: first)


def _numpy(x: Any) -> np.ndarray:
    return x.detach().float().numpy().copy()
