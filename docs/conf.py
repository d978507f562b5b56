"""Configure Sphinx: Markdown pages, and the API from docstrings."""

from graphoffload import __version__

project = "graphoffload"
author = "graphoffload contributors"
copyright = "graphoffload contributors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"graphoffload {__version__}"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
nitpicky = False
