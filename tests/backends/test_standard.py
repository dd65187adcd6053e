from conformance import Conformance


class TestStandard(Conformance):
    backend = "standard"
