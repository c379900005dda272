"""The pages: their links and pictures are there, and what is made from the code is up to date."""

import html
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from megatron_async.config import own_flags
from megatron_async.config.arguments import flags
from tests.support.gpt import REPOSITORY

LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    check=False,
)
PAGES = [REPOSITORY / name for name in LISTED.stdout.split()] or sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
)
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")


def text_of(page: Path) -> str:
    """Without blocks and spans of code, in which nothing is a link."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return re.sub(r"`[^`\n]*`", "", text)


def slug(heading: str) -> str:
    """The anchor that GitHub, and docs/ as a site, give a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    plain = html.unescape(plain).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+?)#*$", text, re.MULTILINE):
        first = name = slug(heading)
        count = 0
        while name in found:
            count += 1
            name = f"{first}-{count}"
        found.add(name)
    return frozenset(found)


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        found = page if not path else (page.parent / path).resolve()
        if not found.exists() or (
            anchor and found.suffix == ".md" and anchor not in anchors(found)
        ):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# One `--flag`: two\n\n```\n# no heading\n```\n# Same\n# Same\n")
    page = tmp_path / "page.md"
    good = (
        "[a](other.md) [b](other.md#one---flag-two) [c](#here) [d](other.md#same-1) [e](http://x)"
    )
    page.write_text(f"# Here\n\n{good} `[x](nowhere.md)`\n\n    [y](nowhere.md)\n")
    assert broken_links(page) == []
    page = tmp_path / "second.md"
    page.write_text("[a](nowhere.md) ![b](no.png) [c](other.md#no-heading) [d](#here)")
    assert broken_links(page) == ["nowhere.md", "no.png", "other.md#no-heading", "#here"]


def test_page_of_own_flags_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    own_flags.main()
    assert (REPOSITORY / "docs" / "own_flags.md").read_text() == capsys.readouterr().out, (
        "python -m megatron_async.config.own_flags > docs/own_flags.md"
    )


def test_readme_lists_every_own_flag_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(--[a-z0-9-]+)(?: \w+)?`[^|]* \| ([^|]+) \|",
        (REPOSITORY / "README.md").read_text(),
        re.MULTILINE,
    )
    shown = dict(rows)
    known = {flag.name: flag for flag in flags().values()}
    assert set(shown) == set(known)
    for name, text in shown.items():
        flag = known[name]
        if flag.switch:
            assert text.startswith("on" if flag.default or flag.default is None else "off"), name
        elif flag.default is None:
            assert text == "none", name
        else:
            assert text.strip("`") == str(flag.default), name


@pytest.mark.parametrize("picture", ["schedules.png", "pipedream.png"])
def test_pictures_are_small(picture: str) -> None:
    assert (REPOSITORY / "docs" / "pictures" / picture).stat().st_size < 300_000


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for page in ("index.html", "theory/index.html", "study/index.html"):
        assert (tmp_path / page).is_file()


def test_navigation_leaves_out_and_adds_pages(tmp_path: Path) -> None:
    for name in ("a.md", "b.md", "new.md"):
        (tmp_path / name).touch()
    nav = [{"First": "a.md"}, {"Part": ["b.md", "gone.md", {"Gone": "gone.md"}]}]
    hook = runpy.run_path(str(REPOSITORY / "scripts" / "mkdocs_nav.py"))["on_config"]
    made = hook({"docs_dir": str(tmp_path), "nav": nav})["nav"]
    assert made == [{"First": "a.md"}, {"Part": ["b.md"]}, {"More": ["new.md"]}]
