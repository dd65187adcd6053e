import dataclasses

from backends.standard import Standard

CUDNN = dataclasses.replace(Standard(), name="cudnn")
