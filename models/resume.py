"""The state of a training run on disk, for resuming it after a kill: parameters, optimiser state and the step.

Orbax writes a step under another name and renames it when it is whole, so that a kill during a save loses only that
save; two are kept. The batches of a step follow from the seed and its number. So nothing else is kept, and a resumed
run equals an uninterrupted one bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

import jax

INSTALL = "pip install '.[train]'"


class SavedSteps:
    """The saved steps below a directory; made by :func:`open_saved`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def latest(self) -> int | None:
        """The last step that was saved whole, or None."""
        return self._manager.latest_step()

    def save(self, step: int, tree: Any) -> None:
        """Write the arrays of ``tree`` as those after ``step`` updates; returns when they are on disk."""
        import orbax.checkpoint as ocp  # noqa: PLC0415 (an optional package)

        with ThreadPoolExecutor(1) as whole:  # an interrupt waits: Orbax's threads would report that they end
            whole.submit(self._manager.save, step, args=ocp.args.StandardSave(_named(tree))).result()
            self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of ``step`` in a tree of the structure, shapes and dtypes of ``like``.

        Raises ValueError, in a sentence, where what was saved does not fit or cannot be read.
        """
        import orbax.checkpoint as ocp  # noqa: PLC0415 (an optional package)

        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _named(like))
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (OSError, ValueError, KeyError, TypeError) as error:
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise ValueError(f"saved step {step} cannot be restored: {first}") from error
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in _named(like)])


def missing() -> str | None:
    """Why nothing can be saved here, as the beginning of a sentence; None where it can."""
    if util.find_spec("orbax") is not None and util.find_spec("orbax.checkpoint") is not None:
        return None
    return f"saving and resuming needs the package orbax-checkpoint, which is not installed; {INSTALL}"


@contextmanager
def open_saved(directory: str | Path) -> Iterator[SavedSteps]:
    """The saved steps in ``directory``, which is made. Raises ValueError where orbax-checkpoint is missing."""
    if reason := missing():
        raise ValueError(f"{reason}.")
    import orbax.checkpoint as ocp  # noqa: PLC0415 (an optional package)

    logging.getLogger("absl").setLevel(logging.ERROR)  # it reports every step of every save
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(Path(directory).resolve(), options=options) as manager:
        yield SavedSteps(manager)


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their number: the structure is known to whoever restores, and Orbax need not learn it."""
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
