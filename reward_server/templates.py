"""Jinja templates in a sandbox: what a judge or a generative reward model is asked."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from reward_server import extras


class Template:
    """A template of `{{ prompt }}`, `{{ completion }}`, `{{ fields.NAME }}` and what else `text` is given.

    Example: `Template("Is {{ completion }} right?").text(completion="4")`. Raises ValueError for a template that does not compile, or
    that names what is not given: a name left out by mistake is no empty text.
    """

    def __init__(self, source: str, names: frozenset[str] | None = None) -> None:
        try:
            used = _meta().find_undeclared_variables(_environment().parse(source))
            self._template = _environment().from_string(source)
        except _jinja().TemplateError as error:
            raise ValueError(f"template: {error}; it is Jinja, with {', '.join(sorted(names or ('completion', 'prompt')))}") from None
        if names is not None and used - names:
            raise ValueError(f"template: it names {', '.join(sorted(used - names))}, and there are {', '.join(sorted(names))}")

    def text(self, **values: Any) -> str:
        """Raises ValueError for a name that is not given, and for what a sandbox does not allow."""
        try:
            rendered: str = self._template.render(**values)
        except Exception as error:  # a template may raise whatever an operation of its raises
            raise ValueError(f"template: {type(error).__name__}: {error}") from None
        return rendered


def _jinja() -> Any:
    return extras.need("jinja2", scorer="with a template", extra="reward-judge")


def _meta() -> Any:
    return extras.need("jinja2.meta", scorer="with a template", extra="reward-judge")


@lru_cache(maxsize=1)
def _environment() -> Any:
    sandbox = extras.need("jinja2.sandbox", scorer="with a template", extra="reward-judge")
    return sandbox.ImmutableSandboxedEnvironment(undefined=_jinja().StrictUndefined, autoescape=False, keep_trailing_newline=True)
