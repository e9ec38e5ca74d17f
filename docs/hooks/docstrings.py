"""Sets docstrings as Markdown for the API page: examples as code blocks, roles as links, fields with their help.

Defaults that are constants appear as their values.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from typing import Any, get_type_hints

import griffe

# A paragraph that opens with a prompt: the example, to its last line.
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
# :func:`~package.name` and the like.
ROLE = re.compile(r":\w+:`~?([\w.]+)`")
SECTION = re.compile(r"^(Args|Attributes):$", re.MULTILINE)
COMMENT = re.compile(r"  # (.+)$")
CONSTANT = re.compile(r"""([A-Z][A-Z_]+)(?:\[['"](\w+)['"]\])?""")  # MAX_IMAGES or DEFAULT_DELTAS["rs"]


def _help(attr: griffe.Attribute) -> str:
    """Return the help of a field whose text is computed, from the class itself."""
    module, class_name, field = attr.path.rsplit(".", 2)
    hints = get_type_hints(getattr(import_module(module), class_name), include_extras=True)
    text: str = hints[field].__metadata__[0]
    return text


class Markdown(griffe.Extension):
    """Rewrites each docstring as it is collected, and lists the fields of data classes with their help."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **more: Any) -> None:
        """Called by griffe with every attribute: keep the help of a field, and show its type without it."""
        if not isinstance(node, ast.AnnAssign):
            return
        match node.annotation, attr.annotation:
            case (
                ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[_, text])),
                griffe.ExprSubscript(slice=griffe.ExprTuple(elements=[type_alone, *_])),
            ):
                attr.extra["help"]["text"] = _help(attr) if isinstance(text, ast.JoinedStr) else ast.literal_eval(text)
                attr.annotation = type_alone
                return
        line = more["agent"].code.splitlines()[(node.end_lineno or node.lineno) - 1]
        if match := COMMENT.search(line):
            attr.extra["help"]["text"] = match[1]

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called by griffe with every class: list the fields that have help."""
        fields = {
            name: member.extra["help"]["text"]
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute) and not name.startswith("_") and "help" in member.extra
        }
        if fields and cls.docstring and not SECTION.search(cls.docstring.value):
            lines = [f"    {name}: {text}" for name, text in fields.items()]
            cls.docstring.value = "\n".join([cls.docstring.value.rstrip(), "", "Attributes:", *lines])

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called by griffe with every function: show the value of a default that is a constant."""
        for parameter in func.parameters:
            if match := CONSTANT.fullmatch(str(parameter.default)):
                value = getattr(import_module(func.module.path), match[1])
                parameter.default = repr(value[match[2]] if match[2] else value)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with every module, class, function and attribute."""
        if obj.docstring:
            fenced = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = ROLE.sub(_link, fenced)


def _link(role: re.Match[str]) -> str:
    """Return the name of a role as code, as a link if the role has the full path of a name on the API page."""
    path = role[1]
    name = f"`{path.rpartition('.')[2]}`"
    return f"[{name}][{path}]" if path.startswith("bucketrank.") else name
