"""Reports: pure functions of record files. This module names everything public."""

from attnsuite.submodules import submodules_of

from .answer import answer_lines as answer_lines
from .answer import installs as installs
from .answer import unmeasured as unmeasured
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .pages.compiled import compiled_overview as compiled_overview
from .pages.compiled import is_compiled as is_compiled
from .pages.conformance import conformance_overview as conformance_overview
from .pages.conformance import write_badges as write_badges
from .read import ReportError as ReportError
from .read import Run as Run
from .read import load as load
from .regressions import Limits as Limits
from .regressions import Regression as Regression
from .regressions import parse_limits as parse_limits
from .render import render as render
from .render import stands_alone as stands_alone
from .timeline import draw_profiles as draw_profiles
from .trend import by_machine as by_machine
from .trend import trend_page as trend_page

__getattr__ = submodules_of(__name__)
