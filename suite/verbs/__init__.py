"""The verbs of ``attnsuite``, one module each: a frozen dataclass of its flags, and ``run``, which gives the exit code.

A verb's module is imported when the verb is used. ``run`` imports the computing modules inside, so that help and errors
in flags wait for neither JAX nor the rooms below.
"""

from __future__ import annotations

# A line of help for each verb. A verb's module has its name, its class the name with a capital.
VERBS = {
    "run": "Measure every backend on every case of a suite and write a report.",
    "doctor": "Show devices, versions, and for each backend the mode it would run in or why it would not.",
    "judge": "Hold every backend, some, or a function of yours (my.py:fn) to the contract on this device.",
    "harvest": "Trace a step of yours (train.py:fn), and print the attention calls in it as a suite file.",
    "tune": "Find options of a backend: the fastest here, or the most plausible for a device that is not here.",
    "calibrate": "Measure over some text how well one layer's selection serves another, and show Kascade's schedule.",
    "report": "Render the report of a run again from its records, or put shards together as one run.",
    "choose": "Write a policy: the fastest exact backend of each measured problem, for auto to follow.",
    "compare": "Hold the second run against the first, cell by cell, or show the trend over many runs.",
    "compile": "Compile every backend for devices that are not here: does it compile, does it fit. Nothing is run.",
    "convert": "Write a checkpoint (Hugging Face's safetensors, or Meta's .pth) as safetensors and JSON.",
    "train": "Train a model on text, or LoRA adapters on top of one; a killed run goes on with --resume.",
    "curves": "Train with every backend and hold its loss curve to the standard backend's, within its noise.",
    "sharded": "Hold attention that is dealt to many devices to the oracle, on devices of the host.",
    "perplexity": "Perplexity of a checkpoint on text, layer by layer: for models larger than memory.",
}
