"""The list of environment variables is the whole truth."""

import re

from ebbtide.settings import SETTINGS


def test_every_variable_that_the_sources_read_is_listed_and_no_other(root):
    read = set()
    for folder, pattern, expression in (
        ("csrc", "*.cpp", r'getenv\("(EBBTIDE_[A-Z_]+)"\)'),
        ("python", "*.py", r'"(EBBTIDE_[A-Z_]+)"'),
    ):
        for path in (root / folder).rglob(pattern):
            if path.name != "settings.py":
                read.update(re.findall(expression, path.read_text()))
    assert read == {setting.name for setting in SETTINGS}


def test_each_entry_says_something():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    for setting in SETTINGS:
        assert setting.default
        assert setting.meaning.endswith(".")
