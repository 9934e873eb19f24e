"""`python -m tests.tokens.profiles` counts traits over the corpus; `--write` puts them into docs/chat-templates.md."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator

from runner.tokens.probing.profile import TemplateProfile, TraitValue
from runner.tokens.probing.traits import profile_of
from runner.tokens.probing.usable import TemplateFault, UnusableTemplate, usable_renderer
from runner.tokens.template import ChatTemplate
from tests.conformance.corpus import CLOCK, VARIABLES, Entry, corpus
from tests.repository import DOCS

TRAITS = [field.name for field in dataclasses.fields(TemplateProfile)]
PAGE = DOCS / "chat-templates.md"
BEGIN, END = "<!-- counts -->\n", "<!-- /counts -->\n"


def profile(entry: Entry) -> TemplateProfile | TemplateFault:
    """Return the profile of a template of the corpus, or the reason why it cannot be used."""
    template = ChatTemplate(entry.text, name=entry.name, variables=VARIABLES)
    try:
        return profile_of(usable_renderer(template, {}, CLOCK))
    except UnusableTemplate as error:
        return error.fault


def traits(entry: Entry) -> str:
    """Return the traits of a template of the corpus in words."""
    found = profile(entry)
    return (
        found.value if isinstance(found, TemplateFault) else " ".join(_word(getattr(found, trait)) for trait in TRAITS)
    )


def table(processes: int = 2) -> str:
    """Return the counts as Markdown, for all templates and for tool-capable ones."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        found = pool.map(profile, corpus(), chunksize=8)
    profiles = [each for each in found if isinstance(each, TemplateProfile)]
    capable = [each for each in profiles if each.carries_tools]
    faults = Counter(each.value for each in found if isinstance(each, TemplateFault))
    lines = [
        f"Of {len(found)} public templates, {len(profiles)} can be used, with tools or without. {len(capable)} of "
        "these *carry tools*: they show the definitions of tools, calls and results. The other templates: "
        + ", ".join(f"{count} {fault}" for fault, count in faults.most_common())
        + ".",
        "",
        "| property | value | templates | that carry tools |",
        "|---|---|---:|---:|",
        *_rows(profiles, capable),
    ]
    return "\n".join(lines) + "\n"


def _rows(profiles: Iterable[TemplateProfile], capable: Iterable[TemplateProfile]) -> Iterator[str]:
    all_of_them, with_tools = list(profiles), list(capable)
    for trait in TRAITS:
        counts, among = (Counter(_word(getattr(p, trait)) for p in some) for some in (all_of_them, with_tools))
        for value, count in sorted(counts.items()):
            yield f"| {trait} | {value} | {count} | {among[value]} |"


def _word(value: TraitValue) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "some" if value else "none"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tokens.profiles", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    text = table()
    print(text)
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
