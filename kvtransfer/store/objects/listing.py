"""Names of objects, and the segments that a listing shows. Pure: no I/O, no clock.

    <folder>/<seconds since 1970>-<writer>-<number>.segment     blocks without gaps
    <folder>/<seconds since 1970>-<writer>-<number>.manifest    written after the segment, and
                                                                deleted before it

The writer is a random number that a store draws at each start. So stores never write the same
object and need no coordination. An object is never changed. Objects with other names are ignored.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from kvtransfer.store.objects.manifest import MAX_MANIFEST_BYTES

MANIFEST_SUFFIX = ".manifest"
SEGMENT_SUFFIX = ".segment"
WRITER_BYTES = 8

GARBAGE_AGE_S = 86_400.0
OWN_GARBAGE_AGE_S = 3_600.0

_OBJECT = re.compile(r"(([0-9a-f]{10})-[0-9a-f]{16}-[0-9a-f]{8})\.(manifest|segment)")


class ObjectFacts(NamedTuple):
    """A listed object; `modified_s` is in seconds since 1970, or None if the store omits it."""

    name: str
    num_bytes: int
    modified_s: float | None


class ListedSegment(NamedTuple):
    """A segment with the sizes of its two objects; None if an object is absent."""

    name: str
    segment_bytes: int | None
    manifest_bytes: int | None
    written_s: float  # since 1970

    @property
    def num_bytes(self) -> int:
        """The size of both objects together."""
        return (self.segment_bytes or 0) + (self.manifest_bytes or 0)

    @property
    def is_half(self) -> bool:
        """True if one of the two objects is absent."""
        return self.segment_bytes is None or self.manifest_bytes is None

    def has_our_size(self, max_segment_bytes: int) -> bool:
        """Returns true if both objects exist, with sizes that this store could have written."""
        if self.segment_bytes is None or self.manifest_bytes is None:
            return False
        is_manifest = 0 < self.manifest_bytes <= MAX_MANIFEST_BYTES
        return is_manifest and 0 < self.segment_bytes <= max_segment_bytes


def segment_name(written_s: int, writer: str, number: int) -> str:
    """Returns the name of a writer's segment. Names sort by the time of writing."""
    return f"{written_s:010x}-{writer}-{number:08x}"


def pair_objects(objects: Iterable[ObjectFacts]) -> list[ListedSegment]:
    """Returns the listed segments, the oldest first."""
    found: dict[str, ListedSegment] = {}
    for facts in objects:
        match = _OBJECT.fullmatch(facts.name)
        if match is None or facts.num_bytes < 0:
            continue
        name, named_s, kind = match.group(1), float(int(match.group(2), 16)), match.group(3)
        modified_s = named_s if facts.modified_s is None else facts.modified_s
        one = found.get(name, ListedSegment(name, None, None, modified_s))
        one = one._replace(written_s=max(one.written_s, modified_s))
        if kind == "segment":
            found[name] = one._replace(segment_bytes=facts.num_bytes)
        else:
            found[name] = one._replace(manifest_bytes=facts.num_bytes)
    return sorted(found.values(), key=lambda one: (one.written_s, one.name))


def find_garbage(
    segments: Iterable[ListedSegment], bad: Collection[str], writer: str, now_s: float
) -> Iterator[str]:
    """Yields the names of old segments that will never be complete.

    `bad` are the names of segments with an unusable manifest. `now_s` is in seconds since 1970.
    Another writer may still write the manifest of its segment, so that segment must be a day old.
    """
    for one in segments:
        is_own = one.name.split("-")[1] == writer
        oldest_s = now_s - (OWN_GARBAGE_AGE_S if is_own else GARBAGE_AGE_S)
        if (one.is_half or one.name in bad) and one.written_s < oldest_s:
            yield one.name
