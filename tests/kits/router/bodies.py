"""Prompts and messages that the gateway must refuse."""

from tests.kits.router.gateway import CONTEXT_LEN

VALUE = "invalid_value"
UNSUPPORTED = "unsupported_parameter"
TOO_LONG = "context_length_exceeded"

# each case: prompt, the field that the error names, the error code
BAD_PROMPTS = [
    ("", "prompt", VALUE),
    ([], "prompt", VALUE),
    ([""], "prompt", VALUE),
    ([[]], "prompt", VALUE),
    (None, "prompt", VALUE),
    (5, "prompt", VALUE),
    ({}, "prompt", VALUE),
    ([1.5], "prompt[0]", VALUE),
    ([True], "prompt[0]", VALUE),
    ([-1], "prompt", VALUE),
    ([260], "prompt", VALUE),
    ([[260]], "prompt", VALUE),
    ([10**30], "prompt", VALUE),
    (["a", ""], "prompt[1]", VALUE),
    ([[1], [260]], "prompt[1]", VALUE),
    (["a", "x" * CONTEXT_LEN], "prompt[1]", TOO_LONG),
    ([1, "a"], "prompt", VALUE),
    (["a", [1]], "prompt", VALUE),
    ([[1]] * 129, "prompt", VALUE),
    ("x" * CONTEXT_LEN, "prompt", TOO_LONG),
    ([1] * CONTEXT_LEN, "prompt", TOO_LONG),
]

# each case: messages, the field that the error names, the error code
BAD_MESSAGES = [
    ([], "messages", VALUE),
    (None, "messages", VALUE),
    ("hi", "messages", VALUE),
    (["hi"], "messages[0]", VALUE),
    ([{"content": "x"}], "messages[0]", VALUE),
    ([{"role": "", "content": "x"}], "messages[0].role", VALUE),
    ([{"role": "k" * 65, "content": "x"}], "messages[0].role", VALUE),
    ([{"role": "user"}], "messages[0].content", VALUE),
    ([{"role": "user", "content": None}], "messages[0].content", VALUE),
    ([{"role": "user", "content": 5}], "messages[0].content", VALUE),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", VALUE),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", VALUE),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content",
        "unsupported_content",
    ),
    ([{"role": "user", "content": "x" * CONTEXT_LEN}], "messages", TOO_LONG),
    ([{"role": "tool", "content": "x"}], "messages", None),  # the template raises for this role
]
