"""Reports are pure functions of record files. Everything public is named here."""

from .comparison import compare as compare
from .compiled import compiled_overview as compiled_overview
from .compiled import is_compiled as is_compiled
from .load import ReportError as ReportError
from .load import Run as Run
from .load import load as load
from .render import render as render
from .render import stands_alone as stands_alone
