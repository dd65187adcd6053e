"""Kascade: calibrated cross-layer sparse attention (arXiv 2512.16391). This module names everything public."""

from .backend import KASCADE as KASCADE
from .backend import Kascade as Kascade
from .backend import default_kernel as default_kernel
from .cost import KeptFraction as KeptFraction
from .cost import kept_fraction as kept_fraction
from .layer_statistics import Calibration as Calibration
from .layer_statistics import load_calibration as load_calibration
from .schedule import GREEDY_RULES as GREEDY_RULES
from .schedule import LOSS_RULE as LOSS_RULE
from .schedule import GreedyRule as GreedyRule
from .schedule import LayerRole as LayerRole
from .schedule import Schedule as Schedule
from .schedule import dynamic_programming as dynamic_programming
from .schedule import greedy as greedy
from .schedule import greedy_anchors as greedy_anchors
from .schedule import greedy_by_loss as greedy_by_loss
from .schedule import layer_similarity as layer_similarity
from .schedule import manual as manual
from .schedule import published_schedule as published_schedule
from .selection import Selection as Selection
from .selection import TileLayout as TileLayout
from .settings import OPTIONS as OPTIONS
from .settings import Settings as Settings
from .settings import Tiling as Tiling
