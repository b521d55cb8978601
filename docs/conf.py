"""Sphinx configuration of the documentation site (`make docs`).

The source directory is the repository itself, so that links between pages, reports and source files are the same on the site
and in the repository.
"""

from importlib.metadata import version as installed

project = "hgnp"
author = "The hgnp authors"
version = release = installed("hgnp")
copyright = f"2026, {author}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/*.md", "results/README.md", "results/**/README.md"]
exclude_patterns = ["docs/examples/**", ".venv"]
default_role = "code"

myst_heading_anchors = 3

autodoc_typehints = "none"  # signatures of `Recipe` are long enough without; the docstrings name the types that matter
autodoc_member_order = "bysource"
napoleon_use_ivar = True

sphinx_gallery_conf = {
    "examples_dirs": "docs/examples",
    "gallery_dirs": "docs/gallery",
    "filename_pattern": r"/\d_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
}

html_theme = "furo"
html_title = "hgnp"
