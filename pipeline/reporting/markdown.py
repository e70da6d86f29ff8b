"""Markdown as GitHub renders it: tables, figures with a light and a dark file."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A pipe table: the first `left` columns flush left, numbers flush right."""
    align = ["left"] * left + ["right"] * (len(headers) - left)
    cells = [[escape(c) for c in row] for row in rows]
    return tabulate(cells, [escape(h) for h in headers], tablefmt="pipe", colalign=align, disable_numparse=True)


def escape(cell: str) -> str:
    """A cell may not end its own column or line."""
    return cell.replace("\n", " ").replace("|", "\\|")


def picture(folder: str, name: str, alt: str) -> str:
    """The figure `name` of `folder` (relative to the report), in the reader's theme where the viewer has one."""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">\n'
        f'  <img alt="{alt}" src="{folder}/{name}-light.svg">\n</picture>'
    )


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def section(title: str, *parts: str) -> str:
    """A heading and its non-empty parts, a blank line between them."""
    return "\n\n".join([f"## {title}", *(p for p in parts if p)])
