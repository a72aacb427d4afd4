"""`datc probe`: how well each credit point forecasts what replacing a token does to the score. See README.md."""

from datc_train.probe.run import probe
from datc_train.probe.table import table
from datc_train.probe.types import Estimate, PointResult, Probe, Quality, Replacement, check_out

__all__ = ["Estimate", "PointResult", "Probe", "Quality", "Replacement", "check_out", "probe", "table"]
