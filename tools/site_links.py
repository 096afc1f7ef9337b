"""A hook of MkDocs for links to files outside `docs/`, such as `../../deploy/README.md`.

Pages are also read in a clone, where these links work. The site has no such files: the links lead to the repository when
`repo_url` is set in mkdocs.yml, and otherwise show the path. A link to a missing file is a warning, so a strict build fails.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_log = logging.getLogger("mkdocs.hooks.site_links")
_LINK = re.compile(r"\[([^\]\n]+)\]\((\.\./[^)\s#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs with the source of each page."""
    docs = Path(config["docs_dir"]).resolve()

    def replaced(link: re.Match[str]) -> str:
        target = (docs / page.file.src_path).parent.joinpath(link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            _log.warning("%s: the link %s leads to no file; correct it", page.file.src_path, link[2])
            return link[0]
        path = target.relative_to(docs.parent)
        if config["repo_url"]:
            return f"[{link[1]}]({config['repo_url'].rstrip('/')}/blob/main/{path})"
        return link[1] if str(path) in link[1] else f"{link[1]} (`{path}`)"

    return _LINK.sub(replaced, markdown)
