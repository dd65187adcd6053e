"""Reports: pure functions of record files. This module names everything public."""

from .answer import answer_lines as answer_lines
from .comparison import compare as compare
from .pages.compiled import compiled_overview as compiled_overview
from .pages.compiled import is_compiled as is_compiled
from .read import ReportError as ReportError
from .read import Run as Run
from .read import load as load
from .render import render as render
from .render import stands_alone as stands_alone
