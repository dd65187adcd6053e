from conformance import Conformance


class TestChunked(Conformance):
    backend = "chunked"
    refuses = frozenset({"mask-*", "bias-*"})
