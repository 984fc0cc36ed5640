"""Every event is a frozen record of plain values."""

import msgspec
import pytest

from tests.helpers.loops import looped

from .examples import EVENTS


@looped("event", EVENTS.values(), ids=list(EVENTS))
def test_events_are_frozen_and_json_safe(event):
    with pytest.raises(AttributeError):
        setattr(event, event.__struct_fields__[0], "changed")
    msgspec.json.encode(event)
