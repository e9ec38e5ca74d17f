"""One HTML page about runs: curves, tables, precision and recall, images, and ranked lists with their gradients.

Names are imported on first use, so that the command line shows its help without loading torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketrank.report.write import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":
        from bucketrank.report.write import write_report

        return write_report
    raise AttributeError(f"module 'bucketrank.report' has no attribute {name!r}")
