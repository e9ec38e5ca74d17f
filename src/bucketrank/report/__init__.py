"""A page about runs: curves, tables, precision and recall, images, and the ranked list with its gradients.

Names are imported when they are asked for: the help of the command does not wait for torch.
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
