"""An event-stream parser: bytes in, at any cut, complete `data` payloads out.

No I/O. Follows the WHATWG event-stream format: comments ignored, fields joined, LF, CR and CRLF all
end a line, a leading BOM is dropped. One deviation, on purpose: data still waiting when the stream
ends is delivered, because servers end with `data: [DONE]` and no blank line.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EventStream"]

_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class EventStream:
    """Feed it chunks as they come; it yields the payload of each finished event, in order."""

    _pending: list[bytes] = field(default_factory=list, init=False)
    _data: list[bytes] = field(default_factory=list, init=False)
    _has_started: bool = field(default=False, init=False)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that `chunk` completes."""
        self._pending.append(chunk)
        is_inside_line = b"\n" not in chunk and b"\r" not in chunk
        if self._has_started and is_inside_line and not self._pending[0].endswith(b"\r"):
            return []  # joined once, when its line ends: six megabytes may be one line
        text = b"".join(self._pending)
        if not self._has_started:
            if len(text) < len(_BOM) and _BOM.startswith(text):
                return []
            text = text.removeprefix(_BOM)
            self._has_started = True
        if b"\r" in text:
            text, held_back = self._unify_line_ends(text)
        else:
            held_back = b""
        *lines, rest = text.split(b"\n")
        self._pending = [rest + held_back]
        return self._take(lines)

    def close(self) -> list[bytes]:
        """What an ended stream still held: an unfinished last line or event."""
        rest = b"".join(self._pending).removesuffix(b"\r")
        self._pending.clear()
        return self._take([rest, b""] if rest else [b""])

    @staticmethod
    def _unify_line_ends(text: bytes) -> tuple[bytes, bytes]:
        # A CR at the very end may be half of a CRLF: keep it until the next byte is known.
        held_back = b"\r" if text.endswith(b"\r") else b""
        body = text[: len(text) - len(held_back)]
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), held_back

    def _take(self, lines: list[bytes]) -> list[bytes]:
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
            else:
                name, _, value = line.partition(b":")  # of a comment the name is empty
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
        return events
