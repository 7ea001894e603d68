"""The tables of docs/protocol.md, made from the code.

python -m tests.golden.tables           says whether the page differs from the code
python -m tests.golden.tables --write   writes the tables anew, between their markers
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from tests.golden import samples
from zmqueue import errors
from zmqueue.wire import frames

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def operations() -> Iterator[str]:
    yield "| number | operation | request | response |"
    yield "|---|---|---|---|"
    for operation in frames.Operation:
        request, response = frames.REQUESTS[operation], frames.RESPONSES.get(operation)
        answer = f"`{response.__name__}`" if response else "none"
        yield f"| {int(operation)} | {operation.name} | `{request.__name__}` | {answer} |"


def message_fields() -> Iterator[str]:
    yield "| message | form | fields |"
    yield "|---|---|---|"
    for name, cls in samples.message_types().items():
        form = "array" if cls.__struct_config__.array_like else "map"
        listed = ", ".join(_field(cls, number) for number in range(len(fields(cls))))
        yield f"| `{name}` | {form} | {listed or 'none'} |"


def _field(cls: type[Struct], number: int) -> str:
    found = fields(cls)[number]
    kind = cls.__annotations__[found.name]
    kind = re.sub(r"Annotated\[int, Meta\(ge=(.+?), le=(.+?)\)\]", r"int from \1 to \2", kind)
    kind = re.sub(r"Annotated\[(.+), Meta\(max_length=(\d+)\)\]", r"\1, at most \2", kind)
    optional = "" if found.default is NODEFAULT and found.default_factory is NODEFAULT else ", optional"
    return f"`{found.name}` ({kind}{optional})".replace("|", "or").replace("None", "null").replace(" ** ", "^")


def error_numbers() -> Iterator[str]:
    yield "| number | name | retry | refresh | in doubt | meaning |"
    yield "|---|---|---|---|---|---|"
    for code, cls in sorted(errors.BY_CODE.items()):
        flags = ("yes" if flag else "" for flag in (cls.retriable, cls.refresh_metadata, cls.indeterminate))
        meaning = (cls.__doc__ or "").strip().splitlines()[0]
        yield f"| {code} | {errors.error_name(cls)} | {' | '.join(flags)} | {meaning} |"


TABLES = {"operations": operations, "messages": message_fields, "errors": error_numbers}


def rewritten(page: str) -> str:
    """The page with every table as the code has it today."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE.name} has no place for the table {name!r}")
        page = "\n".join([before + begin, *rows(), end]) + after
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables anew")
    page = PAGE.read_text()
    new = rewritten(page)
    if parser.parse_args().write:
        PAGE.write_text(new)
        return 0
    print("the tables are current" if new == page else "the tables differ from the code")
    return int(new != page)


if __name__ == "__main__":
    sys.exit(main())
