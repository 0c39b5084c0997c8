"""Sphinx configuration: pages in MyST Markdown, API reference from the docstrings."""

import ml4cube

project = "ml4cube"
author = "The ml4cube developers"
version = release = ml4cube.__version__
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "ml4cube"
autosummary_generate = True
numpydoc_class_members_toctree = False
numpydoc_show_class_members = False
autodoc_default_options = {"members": True, "undoc-members": False}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
