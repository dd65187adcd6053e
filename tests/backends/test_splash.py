"""The splash backend through Pallas' interpreter: the contract, and what its kernel leaves to its caller."""

from conformance import Conformance
import pytest

pytestmark = pytest.mark.foreign_numerics  # JAX's kernel promotes dtypes and ranks by itself


class TestSplash(Conformance):
    backend = "splash"
    mode = "interpret"
    refuses = frozenset(
        {
            "*-float16",
            "positions-*",
            "rows-before-every-key",
            "decode-4",
            "chunk-of-prefill",
            "combination-ragged",
            "mask-*",
            "bias-*",
        }
    )
