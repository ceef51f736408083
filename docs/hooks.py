"""What of the site is made when it is built? Pages of files beside docs/, tables of what the code knows, and a check.

`<!-- symptoms -->` in a page becomes what `headrace doctor --symptoms` knows, `<!-- command NAME -->` what
`headrace NAME --help` prints: neither can differ from the program.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from headrace.cli.doctor import SYMPTOMS
from headrace.cli.main import build_parser

ROOT = Path(__file__).parent.parent
BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
LINK = re.compile(r"\]\((?:\.\./)+([A-Z]+\.md)")
FROM_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//[^\"> ]*"
    r"|<link\b(?![^>]*\brel=\"?(?:canonical|next|prev))[^>]*\bhref=\"?(?:https?:)?//[^\"> ]*"
    r"|(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*"
)


def on_files(files: Files, config: Any) -> Files:
    """The site has pages of files that GitHub and packages want beside docs/."""
    for name, page in BESIDE.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in what the code knows, and leads links to files beside docs/ to their pages."""
    here = posixpath.dirname(page.file.src_uri)
    markdown = LINK.sub(lambda found: f"]({posixpath.relpath(BESIDE[found[1]], here or '.')}", markdown)
    markdown = markdown.replace("<!-- symptoms -->", symptoms())
    return re.sub(r"<!-- command ([\w-]+) -->", lambda found: help_of(found[1]), markdown)


def symptoms() -> str:
    """A section for each."""
    sections = []
    for row in SYMPTOMS:
        rows = (("Why", row["cause"]), ("Make sure", row["confirm"]), ("What helps", row["fix"]))
        text = "\n".join(f"**{name}.** {sentence(said)}  " for name, said in rows)
        seen, says = escaped(row["symptom"]), escaped(row["says"])
        sections.append(f"### {capital(seen)}\n\nLook for the words *{says}*.\n\n{text}\n")
    return "\n".join(sections)


def sentence(text: str) -> str:
    return capital(escaped(text)) + "."


def capital(text: str) -> str:
    """With a capital at the beginning, but for names."""
    first = text.split(maxsplit=1)[0]
    return text if first == "headrace" or "_" in first else text[0].upper() + text[1:]


def escaped(text: str) -> str:
    """As it stands there: `*` and the like are no Markdown."""
    return re.sub(r"([*_\[\]<>`])", r"\\\1", text)


def help_of(command: str) -> str:
    parser = build_parser().commands[command]
    parser.formatter_class = wide(parser.formatter_class)
    return f"```text\n{parser.format_help()}```"


def wide(formatter: Any) -> Any:
    """As on a terminal of 100 columns, whatever the one is that builds the site."""
    return lambda prog: formatter(prog, width=100)


def on_post_build(config: Any) -> None:
    """No page needs the network to be read."""
    for path in Path(config.site_dir).rglob("*"):
        if path.suffix in (".html", ".css", ".svg"):
            found = FROM_ELSEWHERE.search(path.read_text())
            if found:
                raise PluginError(f"{path}: {found[0]!r} comes from elsewhere when the page is read; put it into docs/")
