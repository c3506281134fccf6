"""Tables as pictures: groups of bars, in an SVG that any browser shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

# Pixels.
_LABELS = 180
_BARS = 460
_VALUES = 90
BAR_HEIGHT = 15
_BAR = BAR_HEIGHT + 3
_GAP = 12
_LINE = 22

# Apart also for those who see no red and green. Source: Okabe and Ito, Color Universal Design.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")


@dataclass(frozen=True, slots=True)
class Plot:
    """Values by group and by series, as bars from zero. There are five colours, and so five series at the most."""

    title: str
    groups: Mapping[str, Mapping[str, float]]
    unit: str


def svg(plot: Plot) -> str:
    """Draws the plot."""
    series = list(dict.fromkeys(name for values in plot.groups.values() for name in values))
    colours = dict(zip(series, _COLOURS, strict=False))
    largest = max(value for values in plot.groups.values() for value in values.values()) or 1
    drawn = [_text(_GAP, _LINE, plot.title, "font-weight='bold'")]
    for number, name in enumerate(series):
        left = _LABELS + number * (_BARS + _VALUES) // len(series)
        drawn.append(f"<rect x='{left}' y='{_LINE + 11}' width='12' height='12' fill='{colours[name]}'/>")
        drawn.append(_text(left + 18, 2 * _LINE, name))
    top = 2 * _LINE + _GAP
    for group, values in plot.groups.items():
        drawn.append(_text(_GAP, top + len(values) * _BAR / 2 + 5, group))
        for name, value in values.items():
            width = _BARS * value / largest
            drawn.append(
                f"<rect x='{_LABELS}' y='{top}' width='{width:.1f}' height='{BAR_HEIGHT}' fill='{colours[name]}'/>"
            )
            drawn.append(_text(_LABELS + width + 6, top + 12, _shown(value) + plot.unit))
            top += _BAR
        top += _GAP
    size = f"width='{_LABELS + _BARS + _VALUES}' height='{top}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='13'>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='white'/>", *drawn, "</svg>", ""])


def _shown(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - what has three digits


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"
