"""Prints the seconds of a train step of Llama-3.2-1B's shape, in JAX with flash_cpu beside transformers on PyTorch.

Measures: give it an idle machine, with 23 GiB of memory: weights, gradients and AdamW's moments are 18.4 GiB in
PyTorch. So the two take turns as processes. Each makes one step, and then times the next ones. float32, one sequence of
256 tokens, random weights; the state is updated in place (in JAX the arguments are donated), PyTorch's AdamW is fused.

    python tests/large_train_step.py        # eight minutes; needs the extra "peers"
"""

import importlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnsuite.models import ModelConfig, Transformer
from attnsuite.models.huggingface import to_hf
from attnsuite.models.planning import resolve_attention
from attnsuite.suite.kinds.model_program import LEARNING_RATE, train_step

TOKENS, STEPS, ROUNDS = 256, 3, 2
SIDES = ("flash_cpu", "transformers")


def config():
    return ModelConfig.from_preset("llama-3.2-1b", dtype="float32")


def tokens():
    return np.random.default_rng(0).integers(0, config().vocab_size, (1, TOKENS))


def flash_cpu():
    found = resolve_attention(config(), backend="flash_cpu", batch=1, query_length=TOKENS, needs_grad=True)
    run, start = train_step(config(), found)
    step = jax.jit(run, donate_argnums=(0, 1))
    params = Transformer(config(), rngs=nnx.Rngs(0)).arrays()
    held, batch = [params, start(params)], jnp.asarray(tokens(), jnp.int32)
    del params

    def one():
        *held[:], loss = step(*held, batch)
        return float(loss)

    return one


def transformers():
    torch, library = (importlib.import_module(name) for name in ("torch", "transformers"))
    settings = {key: value for key, value in to_hf(config()).items() if key != "model_type"}
    model = library.LlamaForCausalLM._from_config(library.LlamaConfig(**settings), attn_implementation="sdpa").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=1e-4, fused=True)
    batch = torch.from_numpy(tokens())

    def one():
        optimizer.zero_grad()
        logits = model(batch, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, batch[0, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    return one


def main() -> None:
    if len(sys.argv) > 1:
        step = {"flash_cpu": flash_cpu, "transformers": transformers}[sys.argv[1]]()
        losses, times = [step()], []
        for _ in range(STEPS):
            start = time.perf_counter()
            losses.append(step())
            times.append(time.perf_counter() - start)
        shown = ", ".join(f"{x:.2f}" for x in times), ", ".join(f"{x:.2f}" for x in losses)
        sys.stdout.write(f"{sys.argv[1]}: {shown[0]} s; losses {shown[1]}\n")
        return
    for side in SIDES * ROUNDS:
        subprocess.run([sys.executable, __file__, side], check=True)


if __name__ == "__main__":
    main()
