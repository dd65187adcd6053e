"""Docstrings as Markdown, for the site: names without Sphinx's roles, examples as code."""

import re

import griffe

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=`)")
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)


class AsMarkdown(griffe.Extension):
    """Griffe hands over each object that it finds."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring:
            plain = ROLE.sub("", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", plain)
