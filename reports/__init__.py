"""Reports are pure functions of record files. Everything public is named here."""

from reports.comparison import compare as compare
from reports.compiled import compiled_overview as compiled_overview
from reports.compiled import is_compiled as is_compiled
from reports.load import ReportError as ReportError
from reports.load import Run as Run
from reports.load import load as load
from reports.loss_curves import render_curves as render_curves
from reports.render import render as render
