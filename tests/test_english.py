"""Plain English, as far as a machine can hold it: short sentences, no clause as a subject, names that exist."""

import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_house import ROOT, SOURCES, documented, nodes_of, python_files

MOST_WORDS = 30
# A phrase of fewer words without a full stop is no sentence.
SENTENCE_WORDS = 5
WRITTEN_BY_OTHERS = {"SAMPLES.md"}

# A sentence that begins so has a clause as its subject, unless it is a question.
CLAUSE = re.compile(r"(who|whoever|whom|whose|what|whatever|whether|which|whichever|how)\b", re.I)

CODE_BLOCK = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
IN_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
CODE_SUFFIXES = (".py", ".c", ".h", ".proto", ".sh", ".toml")
# By commands, and of transformers.
NOT_HERE = ("deploy/secrets", "run/", "build/", "conversion_mapping.py")
OPTIONS_OF_OTHERS = {
    *("--build-arg", "--install-completion", "--local-dir"),
    # Of ``vllm bench serve``, which docs/use/load.md compares.
    *("--base-url", "--chat-template-kwargs", "--disable-tqdm", "--no-stream", "--plot-timeline"),
    *("--plot-dataset-stats", "--probe-request-rate", "--profile", "--skip-chat-template"),
    *("--skip-tokenizer-init", "--tokenizer-mode", "--trust-remote-code", "--use-beam-search"),
    *("--enable-multimodal-chat", "--no-reranker", "--lora-modules", "--lora-assignment"),
}


@cache
def tracked() -> frozenset[str]:
    """Files of the repository, and the folders that hold them, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = [Path(name) for name in listed.stdout.splitlines()]
    return frozenset(
        {str(file) for file in files} | {str(up) for file in files for up in file.parents}
    )


@cache
def ends() -> frozenset[str]:
    """The paths of ``tracked``, also from each of their folders on."""
    parts = [name.split("/") for name in tracked()]
    return frozenset("/".join(path[start:]) for path in parts for start in range(len(path)))


# Pages in docs/reference are made from texts that stand in the code and are tested there.
PAGES = sorted(
    ROOT / name
    for name in tracked()
    if name.endswith(".md")
    and Path(name).name not in WRITTEN_BY_OTHERS
    and not name.startswith("docs/reference/")
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and cells of tables, each as one line; no headings, no code blocks."""
    lines: list[str] = []
    for line in [*CODE_BLOCK.sub("", text).splitlines(), ""]:
        line = line.strip().lstrip("> ")
        item = re.match(r"([-*]|\d+\.) ", line)
        if (not line or item or line[0] in "#|") and lines:
            yield " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line))
        elif line and line[0] != "#":
            lines.append(line[item.end() :] if item else line)


def sentences(text: str) -> Iterator[str]:
    """Sentences of a text; a link counts as its words, and a piece of code as one word."""
    for paragraph in paragraphs(text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        plain = re.sub(r"``?[^`]*``?", "`code`", plain).replace("**", "")
        for sentence in re.split(r"(?<=[.!?])[\")”]?\s+(?=[\"“(`*A-Z0-9])", plain):
            if sentence.strip():
                yield sentence.strip()


def too_long(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if len(sentence.split()) > MOST_WORDS]


def clauses_as_subjects(text: str) -> list[str]:
    """Sentences that begin with a clause; heads of columns and other short phrases are no sentences."""
    return [
        sentence
        for sentence in sentences(text)
        if CLAUSE.match(sentence)
        and not sentence.rstrip(")").endswith("?")
        and (len(sentence.split()) >= SENTENCE_WORDS or sentence.endswith("."))
    ]


def test_sentences_are_found_in_lists_tables_and_paragraphs() -> None:
    text = "# A\nOne `a b` two. Three\nfour!\n- Five.\n| six | [seven](x) |\n```\nno\n```\n"
    assert list(sentences(text)) == ["One `code` two.", "Three four!", "Five.", "six", "seven"]


def test_a_clause_as_a_subject_is_found() -> None:
    assert clauses_as_subjects("Who waits gets an error. Who waits? Users wait.") == [
        "Who waits gets an error."
    ]


@every_page
def test_sentences_of_pages_are_short(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


@every_page
def test_no_sentence_of_a_page_has_a_clause_as_its_subject(page: Path) -> None:
    assert clauses_as_subjects(page.read_text(encoding="utf-8")) == []


@every_page
def test_paths_in_backticks_exist(page: Path) -> None:
    tops = {name.split("/")[0] for name in tracked() if "/" in name}

    def exists(path: str) -> bool:
        path = path.rstrip("/")
        alike = fnmatch.filter(ends(), path) if "*" in path else {path} & ends()
        return any(end.count("/") == path.count("/") for end in alike)

    named = IN_BACKTICKS.findall(CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))
    ours = [
        name
        for name in named
        if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", name)
        and not name.startswith(NOT_HERE)
        and (name.endswith(CODE_SUFFIXES) or ("/" in name and name.split("/")[0] in tops))
    ]
    assert [name for name in ours if not exists(name)] == []


@every_page
def test_options_and_variables_in_backticks_exist(page: Path) -> None:
    named = IN_BACKTICKS.findall(page.read_text(encoding="utf-8"))
    found = {
        word
        for name in named
        for word in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+|\bMOESAIC_[A-Z0-9_]+\b", name)
    }
    assert sorted(word for word in found if not known(word)) == []


def known(word: str) -> bool:
    """If code has an option or a variable of this name, written out or as the name of a setting."""
    name = re.sub("^(--no-|--|MOESAIC_)", "", word).replace("-", "_").lower()
    return not words_of_code().isdisjoint({word, name, f"{name}_s"}) or word in OPTIONS_OF_OTHERS


@cache
def words_of_code() -> frozenset[str]:
    names = [
        name
        for name in tracked()
        if name.endswith((".py", ".sh", ".yaml", ".toml")) or Path(name).name == "Makefile"
    ]
    text = "\n".join(
        (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).is_file()
    )
    return frozenset(re.findall(r"--[a-z][a-z0-9-]+|\b\w+\b", text))


def entries_apart(docstring: str) -> str:
    """A docstring whose entries (``name: text``) and cells of tables are paragraphs; no code blocks."""
    lines: list[str] = []
    section = code = sys.maxsize
    for line in docstring.splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if text and indent <= code:
            code = sys.maxsize
        if text and indent <= section:
            section = sys.maxsize
        if code < sys.maxsize or re.fullmatch(r"=+( +=+)+", text):
            text = ""
        elif text in {"Args:", "Attributes:", "Raises:", "Returns:", "Yields:"}:
            section, text = indent, ""
        elif indent == section + 4 and re.match(r"[\w*`, ]+: ", text):
            lines.append("")
        elif text.endswith("::"):
            code = indent
        lines.append("\n\n".join(re.split(r" {2,}", text)))
    return "\n".join(lines)


def test_entries_and_cells_of_a_docstring_are_sentences_of_their_own() -> None:
    text = "One.\n\nArgs:\n    a: two\n        three.\n    b: four\n\n====  ==\nfive  six\n====  =="
    assert list(sentences(entries_apart(text))) == [
        "One.",
        "a: two three.",
        "b: four",
        "five",
        "six",
    ]


def test_sentences_of_docstrings_are_short() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{line} {sentence}"
        for file, line, text in documented()
        for sentence in too_long(entries_apart(text))
    ]
    assert long == []


METRICS = {"Counter", "Gauge", "Histogram", "TalliedHistogram"}


def told_to_users() -> Iterator[tuple[Path, int, str]]:
    """Texts of settings, options, metrics and errors, as far as they are written out where they are used."""
    for file in python_files(*SOURCES):
        for node in nodes_of(file):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = node.exc.args
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                texts = [k.value for k in node.keywords if k.arg in {"description", "help"}]
                if called in METRICS:
                    texts += node.args[1:2]
                elif called == "option":
                    texts += node.args[:1]
            else:
                continue
            for text in texts:
                yield file, node.lineno, _written(text)


def _written(node: ast.expr) -> str:
    """A text as it is written; what is put into it counts as one word."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_written(part) or "x" for part in node.values)
    return ""


def test_texts_that_users_see_are_short() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{line} {sentence}"
        for file, line, text in told_to_users()
        for sentence in too_long(text)
    ]
    assert long == []


def test_texts_that_users_see_begin_with_no_clause() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {sentence}"
        for file, line, text in told_to_users()
        for sentence in clauses_as_subjects(text)
    ]
    assert wrong == []


def test_comments_stand_above_statements() -> None:
    """Behind code stand a shape, a unit, or what a name that begins there is: of definitions and elements."""
    behind = []
    for file in python_files(*SOURCES):
        source = file.read_text(encoding="utf-8")
        marked = {number for number, line in enumerate(source.splitlines(), 1) if "#" in line}
        statements = {
            part.lineno
            for node in nodes_of(file)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for part in ast.walk(node)
            if isinstance(part, ast.stmt)
            and part is not node
            and part.lineno in marked
            and not _defines(part)
        }
        if not statements:
            continue
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            code = token.line[: token.start[1]].strip()
            if (
                token.type == tokenize.COMMENT
                and code
                and token.start[0] in statements
                and not re.match(r"# (\[|noqa|type:|pragma|fmt:)", token.string)
            ):
                behind.append(f"{file.relative_to(ROOT)}:{token.start[0]} {token.line.strip()}")
    assert behind == []


def _defines(statement: ast.stmt) -> bool:
    """If a statement gives a name its first value: an attribute, or a variable with a type."""
    if isinstance(statement, ast.AnnAssign):
        return True
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
