"""Calls functions of the web pages' scripts in one Node process: only scripts without a DOM."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kits.tree.documents import ROOT

STATIC = ROOT / "router/gateway/dashboard/static"
NODE = shutil.which("node")
_RUN = """
import { createInterface } from "node:readline";
for await (const line of createInterface({ input: process.stdin })) {
  const [path, name, args] = JSON.parse(line, (_, value) =>
    value?.$map ? new Map(Object.entries(value.$map)) : value);
  const result = (await import(`./static/${path}`))[name](...args);
  console.log(JSON.stringify(result, (_, value) =>
    value instanceof Map ? Object.fromEntries(value) : value));
}
"""


@contextmanager
def called_scripts(folder: Path) -> Iterator[Callable[..., Any]]:
    """Yields `call(file, function, *arguments)`, which returns the function's result.

    A JavaScript Map is returned as a dictionary; `{"$map": {…}}` passes a Map as an argument.
    """
    assert NODE is not None
    shutil.copytree(STATIC, folder / "static")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(_RUN)
    process = subprocess.Popen(
        [NODE, "run.js"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    sent, answers = process.stdin, process.stdout

    def call(path: str, name: str, *arguments: Any) -> Any:
        sent.write(json.dumps([path, name, arguments]) + "\n")
        sent.flush()
        return json.loads(answers.readline())

    try:
        yield call
    finally:
        sent.close()
        process.wait(10)
        answers.close()
