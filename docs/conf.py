"""Sphinx configuration: pages in MyST Markdown and notebooks, API reference from the docstrings."""

import re

import ml4cube

project = "ml4cube"
author = "The ml4cube developers"
version = release = ml4cube.__version__
extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_design",
]
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_title = "ml4cube"
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    # not beside notebooks, whose code and tables are wide
    "secondary_sidebar_items": {
        pages: ["page-toc"]
        for pages in ("index", "tutorials/*", "how_to/*", "explanation/*", "reference/**")
    },
    "show_toc_level": 2,
}
html_sidebars = {"gallery": []}
autosummary_generate = True
numpydoc_class_members_toctree = False
numpydoc_show_class_members = False
autodoc_default_options = {"members": True, "undoc-members": False}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make notebooks` runs them


def skip_what_is_not_ours(app, what, name, obj, skip, options):
    """Leave out type aliases and names imported from elsewhere; None means no opinion."""
    if what == "module" and not str(getattr(obj, "__module__", "")).startswith("ml4cube"):
        return True
    return None


def escape_shapes(app, what, name, obj, options, lines):
    """Keep the star of a shape such as (samples, *window) from starting an emphasis."""
    code_or_star = re.compile(r"(``.*?``|`[^`]*`)|(?<=[(, ])\*(?=\w)")
    lines[:] = [code_or_star.sub(lambda found: found[1] or r"\*", line) for line in lines]


def setup(app):
    """Connect the two, this one before numpydoc reads the lines."""
    app.connect("autodoc-skip-member", skip_what_is_not_ours)
    app.connect("autodoc-process-docstring", escape_shapes, priority=100)
