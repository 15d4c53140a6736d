"""The pages of the project, as tests know them: code blocks, links, and tables that are generated from the code.

`python -m tests.support.readme` writes the generated parts into the pages, between the markers `<!-- NAME -->` and
`<!-- /NAME -->`: the map of the package and the modules of each folder, and the tables of architectures, of public
names and of measured numbers.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tp_transformers
from tests.support import fits
from tests.support.imports import ORDER
from tests.support.measured import computing, exactness, loading
from tests.support.proofs import KINDS, PROVEN_ON, Proof, read
from tp_transformers.plans.yaml_file import available_plans

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PACKAGE = ROOT / "tp_transformers"
STRATEGIES_PAGE = PACKAGE / "strategies" / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(
        page
        for folder in ("docs", "model_plans", "tp_transformers", "examples", "benchmarks", "tests")
        for page in sorted((ROOT / folder).rglob("*.md"))
        if page.parent.name != "results"
    ),
]
"""Every page, README first, except for results of benchmarks, which are written by them."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    """Line of its opening fence, counted from 1."""
    language: str
    """"python", "sh", "yaml", "text" for the output of the block before it, "py" for Python that is only shown, such as
    another library's, or "" for a drawing."""
    code: str

    @property
    def file(self) -> str:
        """The name of a script, given by its first line; else ""."""
        named = re.match(r"# (\w+\.\w+)\n", self.code)
        return named[1] if named else ""

    @property
    def place(self) -> str:
        """The page and the line, for messages."""
        return f"{called(self.page)} line {self.line}"


def called(page: Path) -> str:
    """The path of a page within the project."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    ]


def prose(page: Path) -> str:
    """The text of a page, with code blocks left out."""
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def links(page: Path) -> Iterator[str]:
    """The targets of a page's links and pictures."""
    for found in re.finditer(r"\]\(([^()\s]+(?:\([^()]*\))?)\)", prose(page)):
        yield found[1]


def anchors(page: Path) -> list[str]:
    """The anchors that GitHub makes of a page's headings."""
    return [_anchor(title) for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)]


def _anchor(title: str) -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def architectures(page: Path) -> str:
    """A link to each plan, with the title that is the first comment of the file."""
    from tp_transformers.features.planner.plans import catalogue

    return ";\n".join(f"[{entry.title}]({entry.file.name})" for entry in catalogue())


def proofs() -> str:
    """A count by kind of model, and a table a kind: what each rank holds, the errors, and what stays whole."""
    known = read()
    releases = sorted({proof.release for proof in known.values()})
    sizes = " and ".join(map(str, PROVEN_ON))
    seeds = min(proof.seeds for proof in known.values())
    models = "small models with other weights each" if seeds > 1 else "small model each"
    counts = ["| models | types | load sharded | proven |", "| --- | --- | --- | --- |"]
    text = [f"Looked at with transformers {' and '.join(releases)}, proven on {sizes} ranks with {seeds} {models}."]
    seen: set[str] = set()
    for kind in KINDS:
        rows = {name: proof for name, proof in known.items() if kind in proof.kinds and name not in seen}
        seen |= rows.keys()
        made = {name: proof for name, proof in rows.items() if not proof.unmade}
        loads = [proof for proof in made.values() if proof.shares]
        count = sum(len(proof.proven) == len(PROVEN_ON) for proof in loads)
        title = kind.capitalize()
        counts.append(f"| [{title}](#{_anchor(title)}) | {len(made)} | {len(loads)} | {count} |")
        table = [
            "| `model_type` | plan | of 2, 3, 4 | output | gradient | replicated, and why not more |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_row(name, proof, _around(name, known) if kind == "encoder" else "") for name, proof in made.items()),
        ]
        text += [f"## {title}", "\n".join(table)]
        if unmade := [f"`{name}`" for name in rows if name not in made]:
            told = f"Not made by transformers from default configs: {', '.join(unmade)}."
            text.append(textwrap.fill(told, 120, break_on_hyphens=False))
    return "\n\n".join(["\n".join(counts), _wrapped(ABOUT_PROOFS), *text])


ABOUT_PROOFS = """
    The model types of transformers, each with its default config. `of 2, 3, 4`: the largest fraction of the model's
    bytes on one of 2, 3 or 4 ranks. The errors are the largest relative errors of a small model on ranks, compared with
    one process in fp64: of its logits or states, and of the gradient of any parameter. `make proofs` verifies changed
    model types again, and writes these tables.
"""
"""The meaning of the columns of `proofs`."""


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def _row(name: str, proof: Proof, around: str) -> str:
    plans = ", ".join(f"[{file.removesuffix('.yaml')}]({file})" for file in proof.plans) or "transformers'"
    shares = " ".join(f"{share:.2f}".removeprefix("0") for share in proof.shares.values()) or "-"
    errors = ["-" if error is None else f"{error:.0e}" for error in (proof.output, proof.gradient)]
    whole = ", ".join(f"`{param}` {share:.0%}" for param, share in list(proof.whole.items())[:3])
    unproven = f"proven in {around}" if around else f"unproven: {proof.unproven}"
    told = (whole if proof.shares else "", *proof.notes, proof.refused or (unproven if proof.unproven else ""))
    why = "; ".join(filter(None, told)).replace("|", "\\|") or "-"
    return f"| `{name}` | {plans if proof.shares else '-'} | {shares} | {' | '.join(errors)} | {why} |"


def _around(name: str, known: dict[str, Proof]) -> str:
    """The first proven models with a part of that type; "" for none."""
    file = available_plans()[name].name if name in available_plans() else ""
    found = [other for other, proof in known.items() if proof.proven and "encoder" not in proof.kinds]
    return ", ".join(f"`{other}`" for other in [each for each in found if file in known[each].plans][:3])


def public_names(page: Path) -> str:
    """One row for the names at the top, and one for each namespace, whose names link to their modules."""
    top = {name: getattr(tp_transformers, name) for name in tp_transformers.__all__}
    spaces = {name: value for name, value in top.items() if inspect.ismodule(value)}
    rows = ["| import from | names |", "| --- | --- |"]
    for title, space in {"tp_transformers": tp_transformers, **spaces}.items():
        title = title if space is tp_transformers else f"tp_transformers.{title}"
        names = [name for name in space.__all__ if name not in spaces]
        linked = ", ".join(f"[`{name}`]({_module(getattr(space, name), page)})" for name in names)
        rows.append(f"| `{title}` | {linked} |")
    return "\n".join(rows)


def _module(value: object, page: Path) -> str:
    """The path of the module that defines a public name, or the type of its value, from a page."""
    assert inspect.getdoc(value), f"{value} has no docstring"
    owner = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return Path(inspect.getsourcefile(sys.modules[owner.__module__]) or "").relative_to(page.parent).as_posix()


def first_sentence(text: str) -> str:
    """The first sentence of a text, on one line; the first paragraph where that has none."""
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    found = re.match(r"((?:`[^`]*`|[^`])+?(?<!et al)(?<!\.\.)\.)(?=\s|$)", paragraph)
    return found[1] if found else paragraph


def opening(page: Path) -> str:
    """The first sentence of prose below the title of a page; links are replaced by their texts."""
    paragraphs = re.split(r"\n\s*\n", prose(page).strip())
    first = next(each for each in paragraphs if not each.startswith(("#", "|", "![", "<!--")))
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first_sentence(first))


def _content(path: Path) -> str:
    """The title of a feature, or the first sentence about another folder or a module, for a cell of a table."""
    if path.parent.name == "features":
        return _cell((path / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
    if path.is_dir():
        return _cell(opening(path / "README.md"))
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, f"{path.relative_to(ROOT)} has no docstring"
    return _cell(first_sentence(doc))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(path: Path) -> str:
    """A link to a module or a folder's page, from the page of the folder around it."""
    return f"[{path.name}/]({path.name}/README.md)" if path.is_dir() else f"[{path.name}]({path.name})"


def modules(page: Path) -> str:
    """The modules and folders of the page's folder: one row each with its content.

    Links alone for a feature, and where there are only folders: the text of the page says what is in them, and the
    docstring or the page of each says it again.
    """
    files = sorted(path for path in page.parent.glob("*.py") if path.name != "__init__.py")
    paths = files + sorted({path.parent for path in page.parent.glob("*/*.py")})
    is_list = page.parent.name == "features"
    if "features" in page.relative_to(PACKAGE).parent.parts[:-1] or not (files or is_list):
        return textwrap.fill(", ".join(map(_link, paths)), 120, break_long_words=False, break_on_hyphens=False)
    rows = [f"| {_link(path)} | {_content(path)} |" for path in paths]
    return "\n".join(["| module | content |", "| --- | --- |", *rows])


def package_map(page: Path) -> str:
    """One row a package or module at the top level, the lowest first: each imports only from those above it."""
    rows = ["| package | content |", "| --- | --- |"]
    for name in ORDER:
        path = PACKAGE / name if (PACKAGE / name / "__init__.py").exists() else PACKAGE / f"{name}.py"
        path = path if name else PACKAGE / "__init__.py"
        rows.append(f"| {_link(path)} | {_content(path)} |")
    return "\n".join(rows)


def quantised(page: Path) -> str:
    """The extremes of all formats, models and ranks of 1 to 4, as `test_quantized_table` recorded them."""
    rows = json.loads((ROOT / "tests" / "data" / "quantised.json").read_text(encoding="utf-8"))
    models = dict.fromkeys(row["model"].partition(",")[0] for row in rows)
    error = max(row["error"] for row in rows)
    read, held = sorted(row["read"] for row in rows), sorted(row["held"]["4"] for row in rows)
    return _wrapped(
        f"{len({row['format'] for row in rows})} formats of {', '.join(models)}: errors of at most {error:.0e}; "
        f"{read[0]:.2f} to {read[-1]:.2f} of the bytes; {held[0]:.2f} to {held[-1]:.2f} of the weights."
    )


def fitting(page: Path) -> str:
    """One row a model: gigabytes of the fullest of some GPUs, and the fewest GPUs that hold it."""
    sizes = [f"{size} GPUs" for size in fits.SIZES]
    count = "parameters"
    head = ["model", count, *sizes, "generates on at least", "trains on at least"]
    text = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, fit in json.loads(fits.FILE.read_text(encoding="utf-8")).items():
        held = [fit["bytes"][str(size)] / 1e9 for size in fits.SIZES]
        cells = [f"{gigabytes:.1f} GB" if gigabytes <= fits.MEMORY else "-" for gigabytes in held]
        least = [str(fit[task] or "-") for task in ("generates on", "trains on")]
        text.append(f"| {' | '.join([name, f'{fit[count] / 1e9:.1f} B', *cells, *least])} |")
    return "\n".join(text)


GENERATED: dict[str, Callable[[Path], str]] = {
    "map": package_map,
    "modules": modules,
    "architectures": architectures,
    "public names": public_names,
    "quantised": quantised,
    "loading": loading,
    "computing": computing,
    "exactness": exactness,
    "fits": fitting,
}
"""Marker -> the text between it and its end, for a page."""


def generated(page: Path) -> str:
    """The page, with its generated parts as they should be."""
    text = page.read_text(encoding="utf-8")
    for name, make in GENERATED.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        if begin in text:
            head, rest = text.split(begin)
            text = f"{head}{begin}{make(page)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(generated(each), encoding="utf-8")
