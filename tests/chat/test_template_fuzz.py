"""Odd templates: text or a typed error; no code runs, no file is read, and the child process lives on."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import CheckpointError
from hybridrt.chat.renderer import Renderer
from tests.chat.test_chat import USER

SECRET = "not for templates"
# What escapes from weaker sandboxes: attributes of objects, format strings, globals of functions, loaders.
OBJECTS = ["messages", "x", "''", "namespace", "cycler", "joiner", "lipsum", "raise_exception", "self", "range", "dict"]
WAYS = [
    ".__class__.__mro__[1].__subclasses__()",
    ".__init__.__globals__",
    ".__globals__['os']",
    "['__class__']",
    "|attr('__class__')",
    "|map(attribute='__class__')|list",
    ".__func__",
    ".mro()",
    "|string|list",
    ".gi_frame",
    ".append(1)",
    "['a']['b']['c']",
    "()",
    "|tojson",
    "|length",
    "[0]",
    "._TemplateReference__context",
    "|pprint",
]
ENDS = [
    "",
    ".os.popen('{touch}').read()",
    ".open('{secret}').read()",
    "|format('%s')",
    ".format(x)",
    " ~ x",
    ".read()",
]
WHOLES = [
    "{% include '{secret}' %}",
    "{% import '{secret}' as y %}",
    "{% extends '{secret}' %}",
    "{{ '{0.__class__}'.format(x) }}",
    "{{ '{0.__init__.__globals__}'.format_map({'0': x}) }}",
    "{% for y in messages %}",
    "{% endfor %}",
    "{{",
    "}}",
    "{#",
    "{% set x = namespace(__class__=1) %}",
    "{% macro m() %}{{ caller() }}{% endmacro %}",
    "{% do x %}",
    "{% debug %}",
    "{{ strftime_now('%c') }}",
    "{% generation %}a{% endgeneration %}",
    "{{ lipsum(1) }}",
    "{% if x %}{% endif %}",
    "text",
]

expressions = st.builds("{{{{ {}{}{} }}}}".format, *(st.sampled_from(each) for each in (OBJECTS, WAYS, ENDS)))
templates = st.lists(st.one_of(expressions, st.sampled_from(WHOLES), st.text(max_size=5)), max_size=4).map("".join)


def attack(folder: Path, examples: int) -> None:
    secret, made = folder / "secret.txt", folder / "made"
    secret.write_text(SECRET)
    touch = f"{shutil.which('touch')} {made}"
    own = Renderer()
    own.start()
    child = own._child.process

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(templates)
    def one(template: str) -> None:
        template = template.replace("{touch}", touch).replace("{secret}", str(secret))
        try:
            text = own.render(template, [USER], {"x": {"a": [1]}})
        except CheckpointError as e:
            text = str(e)
        assert SECRET not in text and not made.exists(), template

    try:
        one()
        assert own.render("{{ messages[0].content }}", [USER], {}) == "Hi" and own._child.process is child
    finally:
        own.close()


@pytest.mark.parametrize(
    "count", [20, pytest.param(400, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_odd_templates(count: int, tmp_path: Path) -> None:
    attack(tmp_path, count)
