"""Origin of a number or figure: machine, versions and commit; and the style that all figures share.

This package imports nothing else of ours, so every other package may use it.
"""
