"""LaTeX tables."""

from __future__ import annotations

from collections.abc import Sequence

SYMBOLS = {
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{EN DASH}": "--",
    "\N{ALMOST EQUAL TO}": r"$\approx$",
    "\N{MICRO SIGN}": r"$\mu$",
}
SPECIAL = {"\\": r"\textbackslash{}", **{letter: "\\" + letter for letter in "#_%&${}"}}


def latex_table(title: str, head: Sequence[str], groups: Sequence[Sequence[Sequence[str]]]) -> str:
    r"""Return a table with a line between groups of rows; it needs the LaTeX package booktabs.

    >>> print(latex_table("Times", ["loss", "T_iter"], [[["RS", "0.5 %"]]]))
    % Times; needs \usepackage{booktabs}
    \begin{tabular}{lr}
    \toprule
    loss & T\_iter \\
    \midrule
    RS & 0.5 \% \\
    \bottomrule
    \end{tabular}
    <BLANKLINE>
    """
    lines = [
        f"% {title}; needs \\usepackage{{booktabs}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
    ]
    lines.append(_line(head))
    for group in groups:
        lines += [r"\midrule", *map(_line, group)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_escape, cells)) + r" \\"


def _escape(text: str) -> str:
    text = "".join(SPECIAL.get(letter, letter) for letter in text)
    return "".join(SYMBOLS.get(letter, letter) for letter in text)
