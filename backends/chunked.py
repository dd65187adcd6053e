import dataclasses

from backends.standard import Standard

CHUNKED = dataclasses.replace(Standard(), name="chunked")
