"""Results as pages: numbers in a frame, what the paper reports beside them, sentences, tables, plots, templates."""

from cdeq_experiments.pages.joining import join, read_page
from cdeq_experiments.pages.render import show, write_pages, write_report

__all__ = ["join", "read_page", "show", "write_pages", "write_report"]
