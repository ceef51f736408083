"""Does a request tell whoever waits all that is known of what failed in it?"""

import pytest

from headrace.memory.disk.requests import Access, Kind, Request


def test_the_cause_of_a_failure_is_told() -> None:
    cause = OSError("the drive is gone")
    request = Request(None, Access.WRITE, (), Kind.TURN, (0, 0))
    request.error = ValueError("cannot be written")
    request.error.__cause__ = cause
    request.end()
    with pytest.raises(ValueError, match="cannot be written") as told:
        request.synchronize()
    assert told.value.__cause__ is cause
    assert told.value is not request.error
