"""The ``bucketrank`` command.

``__main__.py`` lists the commands, ``train.py``, ``model.py`` and ``data.py`` hold them, and ``arguments.py`` turns the
signature of a command into its parser. A command checks its flags, calls the package that does the work and prints the
result. Heavy imports stand inside the functions, so that ``--help`` is quick.
"""

from typing import TYPE_CHECKING

from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.cli.__main__ import main as main

__all__, __getattr__ = import_on_use(__name__, {"bucketrank.cli.__main__": "main"})
