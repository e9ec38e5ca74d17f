"""The commands: ``bucketrank bench losses`` is the function in ``bench_losses.py``, and so on for every command.

A function's signature is the parser of its command, and its docstring the help. A command checks its flags, calls the
room that does the work, and prints the outcome. Heavy imports stand inside the functions, so that ``--help`` is quick.
"""
