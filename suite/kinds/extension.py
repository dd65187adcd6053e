"""What one backend brings to the suite beside its row in every case: flags, suites, rows, and sections of a page.

An approximate backend cannot be judged by closeness to the oracle. Its extension has the cases that measure what it
loses, beside controls that have to fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..cell import Case

if TYPE_CHECKING:
    from attnsuite.models import Checkpoint, ModelConfig, Transformer


class Extension:
    """The additions of the backend ``backend``.

    ``suites`` names its suites among the files of ``suite/suites/``. ``model_suite`` is the name of the suite that is
    made for a checkpoint (``run --suite NAME --model DIR``), empty for none. ``rows`` are the rows beside its own in
    the suite of a checkpoint. ``page`` names the module of ``attnsuite.reports`` whose ``PAGE`` shows its cases. Its
    flags are declared in ``attnsuite.suite.verbs``, which the command line reads without JAX; here they come as data.
    """

    backend: ClassVar[str]
    suites: ClassVar[tuple[str, ...]] = ()
    model_suite: ClassVar[str] = ""
    rows: ClassVar[tuple[str, ...]] = ()
    page: ClassVar[str] = ""

    def apply(self, flags: Mapping[str, Any], cases: Sequence[Case]) -> tuple[Case, ...]:
        """The cases with the fields that the flags give. Raises InputError where no case has them."""
        raise NotImplementedError

    def swept_rows(self, flags: Mapping[str, Any]) -> tuple[str, ...]:
        """The rows to measure where the flags ask for several cases in place of one; () where they do not."""
        return ()

    def model_sizes(self, config: ModelConfig) -> Mapping[str, Any]:
        """Fields of the timed cases of a checkpoint, from which :meth:`case_options` makes options."""
        return {}

    def model_cases(self, config: ModelConfig, shared: Mapping[str, Any], suite: str) -> tuple[Case, ...]:
        """Cases of its own in the suite of a checkpoint, or in ``suite``. Raises InputError for a model without them.

        ``shared`` has the model, the length and the number of the sequences.
        """
        return ()

    def case_options(self, case: Any, config: ModelConfig) -> Mapping[str, Any]:
        """The backend's options in a case of a whole model."""
        return {}

    def model_options(
        self, options: Mapping[str, Any], flags: Mapping[str, Any], model: Checkpoint | Transformer
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The backend's options from ``options`` and ``flags``, and notes on where they come from.

        Raises InputError for flags that do not fit the model.
        """
        return dict(options), ()
