"""What torch's C++ code writes to a rank's standard error when communication fails: pages of frames. Pure.

They come before the sentence that explains the failure, and push it off the screen. The rank's log has all of it.
"""

import re

_SOURCES = r"(?:ProcessGroup\w*|TCPStore\w*|[A-Z]+CCL\w*|FlightRecorder\w*|HeartbeatMonitor|socket|reducer)\.[ch]pp"
_HEADER = re.compile(rf"(?:\[rank\d+\]:)?\[[EWF]\d{{4}} [\d:.]+ +(?:\d+ )?{_SOURCES}:\d+\]")
"""`[rank0]:[E1116 19:09:59.808213046 TCPStore.cpp:612] …`"""
_CONTINUATION = re.compile(
    r"$|frame #\d+: |Exception raised from |<omitting python frames>|[a-z]+ccl\w*Error: |Last error:"
    r"|#\d+ .* from .*:\d+$|terminate called after throwing|  what\(\):  "
)


class TorchLogFilter:
    """Decides which lines of one rank's output are such a page."""

    def __init__(self) -> None:
        self._inside = self._quotes = False

    def hides(self, line: str) -> bool:
        """Return whether the next line of the output belongs to a page."""
        if _HEADER.match(line):
            self._inside = True
        elif self._inside:
            self._inside = self._quotes or bool(_CONTINUATION.match(line))
        elif line.startswith("terminate called after throwing an instance of 'c10::Dist"):
            self._inside = True
        self._quotes = self._inside and line.startswith("Last error:")  # the next line is that error
        return self._inside
