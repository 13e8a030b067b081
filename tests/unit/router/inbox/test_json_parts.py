"""A value encoded in parts gives the JSON of the whole, and no part is long."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.inbox.json_parts import NUM_AT_ONCE, PART_BYTES, LazyItems, encode_lazy, json_parts

SIMPLE = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=9)
VALUES = st.recursive(
    SIMPLE | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@given(VALUES)
def test_parts_together_are_the_json_of_the_value(value):
    assert b"".join(json_parts(value)) == msgspec.json.encode(value)


@given(st.lists(VALUES, max_size=5))
def test_lazy_items_are_a_list(values):
    lazy = {"found": LazyItems(values, lambda value: {"value": value})}
    plain = msgspec.json.encode({"found": [{"value": value} for value in values]})
    assert b"".join(json_parts(lazy)) == encode_lazy(lazy) == plain


def test_items_are_made_part_by_part():
    made = []

    def make(number):
        made.append(number)
        return "x" * 1000

    parts = json_parts([{"items": LazyItems(range(1000), make)}])
    sizes, counts = [], []
    for part in parts:
        sizes.append(len(part))
        counts.append(len(made))
    assert counts[0] <= PART_BYTES / 1000 + 1
    assert max(sizes) < PART_BYTES + 2000
    assert len(sizes) > 10
    assert made == list(range(1000))


def test_a_long_plain_list_is_encoded_in_slices():
    ids = list(range(1000 * NUM_AT_ONCE + 3))
    parts = list(json_parts({"ids": ids, "none": [], "texts": ("a", "b")}))
    assert msgspec.json.decode(b"".join(parts)) == {"ids": ids, "none": [], "texts": ["a", "b"]}
    assert len(parts) > 3
