"""mkdocs hook: pages outside docs/ (README.md and its like) join the site, with links that lead to its pages."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Where a file of the repository stands in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "csrc/README.md": "sources.md",
    "csrc/DESIGN.md": "design.md",
    "python/README.md": "python_sources.md",
    "benchmarks/README.md": "benchmarks.md",
}
NAVIGATION = "docs/README.md"  # the list of pages for those who read them without the site
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, target in PAGES.items():
        text = lead_links((ROOT / source).read_text(encoding="utf-8"), source, target)
        if target == "index.md":
            text = f"---\nhide: [toc]\n---\n{text}"  # short, and its code is wide
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in PAGES.values():
        return markdown
    return lead_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def lead_links(text: str, source: str, target: str) -> str:
    """The links of a page of the repository (`source`), as they must be on the site (`target`). A file with no page on
    the site (a source file, an example, the list of pages) keeps its name and loses its link."""

    def lead(match: re.Match[str]) -> str:
        mark, words, link, anchor = match.groups()
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        page = PAGES.get(in_repository) or in_repository.removeprefix("docs/")
        has_page = in_repository in PAGES or (in_repository.startswith("docs/") and (ROOT / in_repository).is_file())
        if in_repository == NAVIGATION or (not has_page and (ROOT / in_repository).exists()):
            return words
        return f"{mark}[{words}]({posixpath.relpath(page, posixpath.dirname(target) or '.')}{anchor or ''})"

    return LINK.sub(lead, text)
