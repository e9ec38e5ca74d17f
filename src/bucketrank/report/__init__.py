"""The report: one HTML page about runs with curves, tables, images, and ranked lists with their gradients."""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.report.page import write_report as write_report

__all__, __getattr__ = import_on_use(__name__, {"bucketrank.report.page": "write_report"})
