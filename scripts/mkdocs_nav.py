"""A hook of mkdocs: the navigation of mkdocs.yml, without pages that are not there, and with a last
section of those that it does not name."""

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Complete the navigation."""
    docs = Path(config["docs_dir"])
    named: set[str] = set()
    nav = _existing(config["nav"], docs, named)
    rest = sorted({path.name for path in docs.glob("*.md")} - named)
    config["nav"] = [*nav, {"More": rest}] if rest else nav
    return config


def _existing(entries: list[Any], docs: Path, named: set[str]) -> list[Any]:
    kept = []
    for entry in entries:
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(target, list):
            kept.append({title: _existing(target, docs, named)})
        elif (docs / target).is_file():
            named.add(target)
            kept.append(entry)
    return kept
