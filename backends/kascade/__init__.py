"""Kascade: calibrated cross-layer sparse attention (arXiv 2512.16391). Everything public is named here."""

from backends.kascade.backend import KASCADE as KASCADE
from backends.kascade.backend import Kascade as Kascade
from backends.kascade.calibration import Calibration as Calibration
from backends.kascade.calibration import load_calibration as load_calibration
from backends.kascade.cost import KeptFraction as KeptFraction
from backends.kascade.cost import kept_fraction as kept_fraction
from backends.kascade.schedule import LayerRole as LayerRole
from backends.kascade.schedule import Schedule as Schedule
from backends.kascade.schedule import dynamic_programming as dynamic_programming
from backends.kascade.schedule import greedy as greedy
from backends.kascade.schedule import layer_similarity as layer_similarity
from backends.kascade.schedule import manual as manual
from backends.kascade.selection import Places as Places
from backends.kascade.selection import Selection as Selection
from backends.kascade.settings import OPTIONS as OPTIONS
from backends.kascade.settings import Settings as Settings
from backends.kascade.settings import Tiling as Tiling
