"""The verbs of ``attnsuite``, one module each: a frozen dataclass of its flags, and ``run``, which gives the exit code.

A verb's module is imported when the verb is used. ``run`` imports the computing modules inside, so that help and errors
in flags wait for neither JAX nor the rooms below.
"""

from __future__ import annotations

# A line of help for each verb. A verb's module has its name, its class the name with a capital.
VERBS = {
    "run": "Measure every backend on every case of a suite and write a report.",
    "judge": "Hold backends, or a function of yours (my.py:fn), to the contract, on random problems too.",
    "compile": "Compile every backend for devices that are not here: does it compile, does it fit. Nothing is run.",
    "tune": "Find options of a backend: the fastest here, or the most plausible for a device that is not here.",
    "choose": "Write a policy: the fastest exact backend of each measured problem, for auto to follow.",
    "compare": "Hold the second run against the first, cell by cell, or show the trend of each cell over many runs.",
    "report": "Render the report of runs again from their records, or of shards as one run.",
    "doctor": "Show devices, versions, and for each backend the mode it would run in or why it would not.",
    "harvest": "Trace a step of yours (train.py:fn), and print the attention calls in it as a suite file.",
    "calibrate": "Measure over some text how well one layer's selection serves another, and show the schedule.",
    "convert": "Write a checkpoint (Hugging Face's safetensors or .bin, Meta's .pth) as safetensors and JSON.",
    "train": "Train a model on text, or LoRA adapters on top of one; a killed run goes on with --resume.",
    "perplexity": "Perplexity of a checkpoint on text, layer by layer: for models larger than memory.",
}

# Modules with the flags that a backend's extension adds to verbs (FLAGS), where the command line names the backend.
EXTENSIONS = ("kascade",)
