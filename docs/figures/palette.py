"""The colours of figures, for light and for dark pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Palette:
    """The colours of one page scheme."""

    text: str
    faint: str
    band: str
    series: tuple[str, str, str]
    point: str
    rival: str

    @property
    def colours(self) -> tuple[str, ...]:
        """All colours, in the same order for each scheme."""
        return (self.text, self.faint, self.band, *self.series, self.point, self.rival)


PALETTES = {
    "light": Palette("#2b3540", "#9aa7b4", "#12355b", ("#1f6aa5", "#c8553d", "#3f8f5f"), "#55616d", "#a0569c"),
    "dark": Palette("#dfe6ee", "#77869a", "#9cc3ea", ("#7db9e8", "#f0937a", "#86d3a2"), "#aab6c3", "#dc9fd8"),
}
