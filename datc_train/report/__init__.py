"""`report.html`: what one run or several did, on one page without any request. See `write_report`."""

from datc_train.report.write import write_report

__all__ = ["write_report"]
