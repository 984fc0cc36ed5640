"""Every event is a frozen record of plain values, documented field by field."""

import re

import msgspec
import pytest

from .examples import EVENTS


@pytest.mark.parametrize("event", EVENTS.values(), ids=list(EVENTS))
def test_events_are_frozen_and_json_safe(event):
    with pytest.raises(AttributeError):
        setattr(event, event.__struct_fields__[0], "changed")
    msgspec.json.encode(event)


@pytest.mark.parametrize("event", EVENTS.values(), ids=list(EVENTS))
def test_every_field_is_documented(event):
    documented = re.findall(r"^\s+(\w+): ", type(event).__doc__, re.MULTILINE)
    assert documented == list(event.__struct_fields__)
