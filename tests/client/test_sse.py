"""The event-stream parser: the same events for every way of cutting the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.client._sse import EventStream

STREAMS = [
    b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n',
    b': OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\ndata: {"a":1}\n\n',
    b'data:{"a":1}\r\n\r\nevent: x\r\nid: 7\r\ndata: two\r\ndata: lines\r\n\r\n',
    b"data: one\r\rdata: two\r\r",
    b"\xef\xbb\xbfdata: bom\n\n",
    "data: h\u00e9llo \u2028 \U0001f600\n\n".encode(),
    b"data: no blank line at the end",
    b"data: [DONE]",
    b"data\n\ndata:\n\n",
    b"\n\n\n",
]


def whole(stream: bytes) -> list[bytes]:
    parser = EventStream()
    return parser.feed(stream) + parser.close()


EXPECTED = [
    [b'{"a":1}', b'{"b":2}', b"[DONE]"],
    [b'{"a":1}'],
    [b'{"a":1}', b"two\nlines"],
    [b"one", b"two"],
    [b"bom"],
    ["h\u00e9llo \u2028 \U0001f600".encode()],
    [b"no blank line at the end"],
    [b"[DONE]"],
    [b"", b""],
    [],
]


@pytest.mark.parametrize(("stream", "expected"), list(zip(STREAMS, EXPECTED, strict=True)))
def test_events_of_known_streams(stream: bytes, expected: list[bytes]) -> None:
    assert whole(stream) == expected


@pytest.mark.parametrize("stream", STREAMS)
def test_every_cut_in_two_gives_the_same_events(stream: bytes) -> None:
    expected = whole(stream)
    for cut in range(len(stream) + 1):
        parser = EventStream()
        events = parser.feed(stream[:cut]) + parser.feed(stream[cut:]) + parser.close()
        assert events == expected, cut


@given(st.sampled_from(STREAMS), st.lists(st.integers(1, 7), max_size=60))
def test_any_cutting_gives_the_same_events(stream: bytes, sizes: list[int]) -> None:
    parser, events, rest = EventStream(), [], stream
    for size in sizes:
        events += parser.feed(rest[:size])
        rest = rest[size:]
    assert events + parser.feed(rest) + parser.close() == whole(stream)


@given(st.binary(max_size=200))
def test_rubbish_never_raises(rubbish: bytes) -> None:
    whole(rubbish)
