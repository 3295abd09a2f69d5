"""HTML as values: whatever is not markup already is escaped.

Text enters a page through ``tag`` only, or as the JSON of a chart (html.py). Attributes are escaped as well, so nothing
that a result file says can become an element, a script or a style.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = frozenset(("meta", "br", "input"))

Attribute = str | int | bool | None


class Markup(str):
    """Text that is markup: it goes into a page as it is."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """``text`` as a browser has to read it to show it, quotes included; markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


def join(children: Iterable[object]) -> Markup:
    """The markup of all children in order; None is left out."""
    return Markup("".join(escape(child) for child in children if child is not None))


def tag(name: str, /, *children: object, **attributes: Attribute) -> Markup:
    """One element. ``class_`` means class, ``data_rival`` data-rival; attributes of None or False are left out."""
    opening = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Markup(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(str(value))}"'
